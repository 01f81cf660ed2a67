"""Updates in stages: pipelines by hand, and what a rank of a stage holds."""

from functools import partial

import pytest

from convoy.ops.recompute import with_recomputed
from convoy.planner.cost import step
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.local_op import LocalOp, Operand
from convoy.planner.cost.pipeline import StageTimes, Staging, pipeline_seconds
from convoy.planner.cost.prediction import scored
from convoy.planner.cost.program import copied, joined, laid_out
from convoy.planner.cost.times import Times
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.schedule import bubble
from plans.made_graph import Chain, placed

SAMPLES, WIDTH = 4, 64
ONE = SAMPLES * WIDTH * 4
"""Bytes of an activation."""


def net(layers):
    chain = Chain(SAMPLES, WIDTH)
    for number in range(layers):
        chain = chain.linear(f"l{number}", WIDTH)
    return chain.graph()


def links(seconds=0.0, overlap=True, cpu_share=0.0):
    """Links on which an activation takes so many seconds."""
    link = Link(Curve(((0, 0.0),)), Curve(((0, 0.0), (ONE, seconds))), overlap, cpu_share)
    return Links(otherwise=lambda ranks: link)


def layers_only(local_op):
    if local_op.op != "linear" or local_op.is_empty:
        return Times()
    passes = max(1.0, local_op.outputs[0].shape[0] / SAMPLES)  # at once
    return Times(passes, 2.0 * passes)


AT_ONCE = links()


def predicted(
    plan, passes, schedule, links=AT_ONCE, layers=4, samples=None, recompute=False, times=layers_only, **costs
):
    """An update of as many layers; each takes a second forward and two backward."""
    plan = Plan.parse(plan)
    placement = with_recomputed(placed(net(layers), plan), recompute)
    output = placement.graph.calls[-1].outputs
    staging = Staging.of(plan, placement.graph, output, samples or (SAMPLES,) * passes)
    staging = staging and staging.scheduled(schedule)
    return scored(plan, placement, Costs(times, links, **costs), passes, staging)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "passes"), [(2, 1), (2, 4), (4, 3), (4, 8)])
def test_equal_stages_take_as_long_as_the_passes_and_the_others_stages(schedule, stages, passes):
    """(M + S - 1) (f + b), and a bubble of (S - 1) / (M + S - 1)."""
    found = predicted(f"stage={stages}", passes, schedule, layers=4)
    share = 4 // stages
    assert found.seconds == pytest.approx((passes + stages - 1) * 3.0 * share)
    assert found.bubbles == pytest.approx([(stages - 1) / (passes + stages - 1)] * stages)
    assert pipeline_seconds([StageTimes(share, 2.0 * share)] * stages, passes, schedule) == pytest.approx(found.seconds)


@pytest.mark.parametrize(("stages", "passes"), [(2, 4), (4, 8)])
def test_zero_bubble_waits_for_the_first_forward_passes_alone(stages, passes):
    """Every layer has a weight, whose gradient is half of its backward pass but in the first: M (f + b) + (S - 1) f."""
    found = predicted(f"stage={stages}", passes, "zero-bubble", layers=4)
    share = 4 // stages
    by_hand = passes * 3.0 * share + (stages - 1) * share
    times = [StageTimes(share, 2.0 * share, weights=share)] * stages
    assert pipeline_seconds(times, passes, "zero-bubble") == pytest.approx(by_hand)
    assert found.seconds == pytest.approx(by_hand)
    assert max(found.bubbles) == pytest.approx(bubble("zero-bubble", passes, stages))


def test_weight_gradients_of_several_passes_at_once_may_take_less():
    """The second stage computes all of them at the end. Here a second of each backward pass is for reading weights."""

    def times(local_op):
        found = layers_only(local_op)
        return Times(found.forward, 1.0 + found.backward) if found.forward else found

    plan = {"mesh": {"stage": 2}, "layers": {}, "stages": ["l1"]}
    found = predicted(plan, 4, "zero-bubble", layers=3, times=times)
    assert found.seconds == pytest.approx(1.0 + 4 * 2 * (1.0 + 1.5) + 2 * 0.5 * (1.0 + 4 * 2.0))
    one_by_one = predicted(plan, 4, "gpipe", layers=3, times=times)
    assert one_by_one.seconds == pytest.approx(1.0 + 4 * 2 * (1.0 + 3.0) + 3.0)


def test_large_images_are_not_copied_for_one_call(monkeypatch):
    """The engine adds their weight gradients up: three times of two layers, a quarter of a second each."""
    monkeypatch.setattr(step, "joined", lambda one, number: None)

    def times(local_op):
        is_sum = local_op == copied((WIDTH + 1) * WIDTH * 4, 2)
        return Times(0.25) if is_sum else layers_only(local_op)

    plan = {"mesh": {"stage": 2}, "layers": {}, "stages": ["l1"]}
    found = predicted(plan, 4, "zero-bubble", layers=3, times=times)
    assert found.seconds == pytest.approx(1.0 + 4 * 6.0 + 3 * 2 * 0.25)


def test_what_is_joined_is_what_the_engine_joins():
    """It copies inputs and gradients where they have fewer numbers than the weight."""

    def one(samples, pixels):
        shapes = (samples, 16, pixels, pixels), (16, 16, 3, 3), (samples, 16, pixels, pixels)
        x, weight, y = (
            Operand(shape, "float32", role)
            for shape, role in zip(shapes, ("activation", "parameter", "activation"), strict=True)
        )
        return LocalOp("conv", "", (x, weight), (y,))

    assert joined(one(2, 6), 3) == one(6, 6)  # 2 · 16 · 36 twice are as many as 16 · 16 · 9
    assert joined(one(2, 6), 2.5) == one(5, 6)  # the last pass is smaller
    for apart in (joined(one(3, 6), 3), joined(one(4, 16), 8), joined(one(2, 6), 1)):
        assert apart is None


def test_weights_are_laid_out_in_the_first_pass_alone(monkeypatch):
    """Of the six passes of the second stage's two layers five save a quarter of a second forward and one back."""
    once = LocalOp("copy", "", (), ())
    monkeypatch.setattr(step, "laid_out", lambda one: once if one.op == "linear" else None)
    once_a_pass = partial(predicted, times=lambda one: Times(0.25) if one is once else layers_only(one))
    laid = partial(once_a_pass, lays_out=True)
    assert laid("stage=2", 6, "zero-bubble").seconds == pytest.approx(6 * 6.0 + 2.0 - 5 * 4 * 0.25)
    assert laid("stage=2", 6, "1f1b").seconds == pytest.approx(7 * 6.0)
    assert laid("serial", 6, "1f1b").seconds == pytest.approx(6 * 12.0)
    assert once_a_pass("stage=2", 6, "zero-bubble").seconds == pytest.approx(6 * 6.0 + 2.0)


def test_what_is_laid_out_is_the_weight_of_a_convolution_with_few_pixels():
    def convolution(pixels, **options):
        x, weight, y = (
            Operand(shape, "float32", role)
            for shape, role in (
                ((2, 8, pixels, pixels), "activation"),
                ((16, 8, 3, 3), "parameter"),
                ((2, 16, pixels, pixels), "activation"),
            )
        )
        options = {"groups": 1, "transposed": False, **options}
        return LocalOp("conv", "", (x, weight), (y,), tuple(sorted(options.items())))

    assert laid_out(convolution(16)) == copied(16 * 8 * 9 * 4)
    for other in (convolution(32), convolution(0), convolution(16, groups=2), convolution(16, transposed=True)):
        assert laid_out(other) is None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_slowest_of_unequal_stages_decides(schedule):
    """One layer in the first stage, three in the second."""
    plan = {"mesh": {"stage": 2}, "stages": ["l1"]}
    found = predicted(plan, 5, schedule)
    assert found.seconds == pytest.approx(5 * 9.0 + 3.0)
    assert found.bubbles == pytest.approx([33 / 48, 3 / 48])
    assert pipeline_seconds([StageTimes(1.0, 2.0), StageTimes(3.0, 6.0)], 5, schedule) == pytest.approx(48.0)


@pytest.mark.parametrize(("schedule", "seconds"), [("gpipe", 92.0), ("1f1b", 74.0)])
def test_a_link_that_is_slower_than_the_stages_decides(schedule, seconds):
    """Two stages, 2 s forward and 4 s back; a message takes 10 s. GPipe sends four one way, 2 + 4·10 + 2 s, then four
    the other, 4 + 4·10 + 4 s. 1F1B uses both ways at once, but waits for a pass to come back before it begins the next
    but one, so that two passes take a round trip of 32 s: by hand it ends after 74 s."""
    times = [StageTimes(2.0, 4.0, sends=10.0), StageTimes(2.0, 4.0, returns=10.0)]
    assert pipeline_seconds(times, 4, schedule) == pytest.approx(seconds)
    assert predicted("stage=2", 4, schedule, links(10.0)).seconds == pytest.approx(seconds)


def test_messages_that_take_the_core_slow_both_ends():
    without = predicted("stage=2", 4, "gpipe", links(1.0)).seconds
    beside = predicted("stage=2", 4, "gpipe", links(1.0, cpu_share=1.0)).seconds
    assert without < beside < without + 2 * 4 * 1.0
    assert predicted("stage=2", 4, "gpipe", links(1.0, overlap=False)).seconds == pytest.approx(beside)


def test_devices_of_unequal_speed():
    plan = {"mesh": {"stage": 2}, "stages": ["l2"]}
    found = predicted(plan, 3, "1f1b", layers=3, slowdowns=(0.5, 1.0))
    assert found.seconds == pytest.approx(4 * 3.0)
    assert predicted(plan, 3, "1f1b", layers=3, slowdowns=(1.0, 0.5)).seconds > found.seconds


def test_smaller_passes_take_less():
    """The third pass has half of the samples: the first stage waits for the second's 6 + 6 s behind its own 2 s, takes
    the second pass back from 14 to 18 s, and the third in half the time."""
    assert predicted("stage=2", 3, "1f1b", samples=(4, 4, 2)).seconds == pytest.approx(20.0)
    assert predicted("stage=2", 3, "1f1b").seconds == pytest.approx(24.0)


def test_the_loss_is_the_last_stages_and_every_stage_updates_its_own():
    found = predicted(
        "stage=2", 2, "1f1b", loss=HostCost(0.5), update=Update(per_byte=1 / (WIDTH * WIDTH * 4 + WIDTH * 4))
    )
    kinds = [found.timeline.by_kind(rank) for rank in (0, 1)]
    assert [kind.get("around", 0.0) for kind in kinds] == [0.0, 1.0]
    assert [kind["update"] for kind in kinds] == pytest.approx([2.0, 2.0])
    assert [one.parameters for one in found.by_stage] == [2 * (WIDTH * WIDTH + WIDTH) * 4] * 2


@pytest.mark.parametrize("plan", ["stage=2,sample=2", "sample=2,stage=2", "stage=2,filter=2"])
def test_other_axes_divide_the_layers_of_a_stage(plan):
    found = predicted(plan, 4, "1f1b", links(0.5))
    assert found.placement.mesh.num_devices == 4
    assert len(found.timeline.ranks) == 2 if "sample" in plan else 4  # one of each stage
    staged = found.staging
    for span in found.timeline.spans:
        if span.task.stream == "stages":
            assert staged.stage_of(span.task.rank) != staged.stage_of(span.task.peer)
            assert span.task.num_bytes == (ONE // 2)


def test_activations_of_the_passes_in_flight_are_kept():
    """Every layer keeps its input; the first stage sends what the second keeps."""
    for schedule, flights in (("gpipe", (6, 6)), ("1f1b", (2, 1))):
        found = predicted("stage=2", 6, schedule)
        held = [3 * ONE, 2 * ONE]
        assert [one.activations for one in found.by_stage] == [n * size for n, size in zip(flights, held, strict=True)]
    later = predicted("stage=2", 6, "zero-bubble").by_stage  # every layer's input and its output's gradient
    assert [one.activations for one in later] == [6 * 2 * 2 * ONE] * 2
    assert predicted("stage=2", 1, "gpipe").by_stage == predicted("stage=2", 1, "1f1b").by_stage


@pytest.mark.parametrize(
    ("schedule", "passes", "held"),
    [
        ("gpipe", 6, [2, 2, 0]),  # gradients of a pass and of the next one
        ("1f1b", 6, [2, 4, 2]),  # besides, the next pass forward, and the gradients that were sent back last
        ("zero-bubble", 6, [2, 4, 3]),  # the second stage runs three parts further ahead than the last
        ("gpipe", 1, [1, 1, 0]),
    ],
)
def test_what_stages_send_each_other_takes_memory(schedule, passes, held):
    """In values at a cut; and of one weight two gradients, as those of the passes are added."""
    found = predicted("stage=3", passes, schedule, layers=3).by_stage
    assert [one.messages for one in found] == [number * ONE for number in held]
    weight = WIDTH * WIDTH * 4
    assert [one.gradients - one.parameters for one in found] == [weight * (passes > 1)] * 3


@pytest.mark.parametrize(("schedule", "flights"), [("gpipe", (6, 6)), ("1f1b", (2, 1))])
def test_what_is_computed_again_is_there_once_and_takes_time(schedule, flights):
    """Of each of the other passes a stage keeps what it received and what it sends. Every layer runs forward again, up
    to the output of the last."""
    found = predicted("stage=2", 6, schedule, recompute=True)
    first, last = flights
    held = [(first - 1) * 2 * ONE + 3 * ONE, (last - 1) * ONE + 3 * ONE]
    assert [one.activations for one in found.by_stage] == held
    assert found.seconds == pytest.approx((6 + 1) * 2 * (1.0 + 3.0))


def test_a_plan_without_stages_has_no_bubble():
    found = predicted("serial", 3, "1f1b")
    assert found.staging is None and found.bubble == 0 and found.by_stage == ()
    assert found.seconds == 3 * 12
    assert Mesh(("stage",), (2,)).stage_axis == 0
