"""Updates in stages: pipelines by hand, and what a rank of a stage holds."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from convoy.ops.recompute import with_recomputed
from convoy.planner.cost import prediction
from convoy.planner.cost.costs import Costs, Times
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.local_op import LocalOp
from convoy.planner.cost.prediction import Scored
from convoy.planner.cost.simulation import StageTimes, pipeline_seconds
from convoy.planner.cost.step import Staging
from convoy.plans.plan import Plan
from convoy.plans.schedule import bubble
from plans.made_graph import chain, placed

SAMPLES, WIDTH = 4, 64
ONE, WEIGHT = SAMPLES * WIDTH * 4, WIDTH * WIDTH * 4
"""Bytes of an activation and of a weight."""


def links(seconds: float = 0.0, overlap: bool = True, cpu_share: float = 0.0) -> Links:
    """Links on which an activation takes so many seconds."""
    link = Link(Curve(((0, 0.0),)), Curve(((0, 0.0), (ONE, seconds))), overlap, cpu_share)
    return Links(otherwise=lambda ranks: link)


def layers_only(op: LocalOp) -> Times:
    if op.op != "linear" or op.is_empty:
        return Times()
    passes = max(1.0, op.outputs[0].shape[0] / SAMPLES)  # at once
    return Times(passes, 2.0 * passes)


AT_ONCE = links()


def predicted(
    plan: Any,
    passes: int,
    schedule: str,
    links: Links = AT_ONCE,
    layers: int = 4,
    samples: tuple[int, ...] = (),
    recompute: bool = False,
    times: Any = layers_only,
    **costs: Any,
) -> Scored:
    """An update of as many layers; each takes a second forward and two backward."""
    plan = Plan.parse(plan)
    graph = chain((SAMPLES, WIDTH), **{f"l{number}": nn.Linear(WIDTH, WIDTH) for number in range(layers)})
    placement = with_recomputed(placed(graph, plan), recompute)
    staging = Staging.of(plan, placement.graph, graph.calls[-1].outputs, samples or (SAMPLES,) * passes)
    staging = staging and replace(staging, schedule=schedule)
    return prediction.predicted(plan, placement, Costs(times, links, **costs), passes, staging)


def cut(layer: str) -> dict[str, Any]:
    """Two stages, the second from a layer on."""
    return {"mesh": {"stage": 2}, "stages": [layer]}


def test_equal_stages_take_as_long_as_the_passes_and_the_stages_after_the_first() -> None:
    """(M + S - 1) (f + b), and a bubble of (S - 1) / (M + S - 1). Under zero-bubble every layer has a weight, whose
    gradient is half of its backward pass but in the first: M (f + b) + (S - 1) f."""
    for stages, passes in ((2, 1), (2, 4), (4, 3), (4, 8)):
        share = 4 // stages
        for schedule in ("gpipe", "1f1b"):
            result = predicted(f"stage={stages}", passes, schedule)
            assert result.seconds == pytest.approx((passes + stages - 1) * 3.0 * share)
            assert result.bubbles == pytest.approx([(stages - 1) / (passes + stages - 1)] * stages)
            times = [StageTimes(share, 2.0 * share)] * stages
            assert pipeline_seconds(times, passes, schedule) == pytest.approx(result.seconds)
        if passes >= 2 * stages:
            result = predicted(f"stage={stages}", passes, "zero-bubble")
            by_hand = passes * 3.0 * share + (stages - 1) * share
            times = [StageTimes(share, 2.0 * share, weights=share)] * stages
            assert pipeline_seconds(times, passes, "zero-bubble") == pytest.approx(by_hand) == result.seconds
            assert max(result.bubbles) == pytest.approx(bubble("zero-bubble", passes, stages))
    result = predicted("serial", 3, "1f1b")
    assert (result.staging, result.bubble, result.by_stage, result.seconds) == (None, 0, (), 3 * 12)


def test_the_slowest_stage_device_or_link_decides() -> None:
    for schedule, seconds in (("gpipe", 92.0), ("1f1b", 74.0)):
        result = predicted(cut("l1"), 5, schedule)  # one layer in the first stage, three in the second
        assert result.seconds == pytest.approx(5 * 9.0 + 3.0) and result.bubbles == pytest.approx([33 / 48, 3 / 48])
        assert pipeline_seconds([StageTimes(1.0, 2.0), StageTimes(3.0, 6.0)], 5, schedule) == pytest.approx(48.0)
        # Two stages, 2 s forward and 4 s back; a message takes 10 s. GPipe sends four one way, 2 + 4·10 + 2 s, then
        # four the other, 4 + 4·10 + 4 s. 1F1B uses both ways at once, but waits for a pass to come back before it
        # begins the next but one, so that two passes take a round trip of 32 s: by hand it ends after 74 s.
        times = [StageTimes(2.0, 4.0, sends=10.0), StageTimes(2.0, 4.0, returns=10.0)]
        assert pipeline_seconds(times, 4, schedule) == pytest.approx(seconds)
        assert predicted("stage=2", 4, schedule, links(10.0)).seconds == pytest.approx(seconds)
    # The third pass has half of the samples: the first stage waits for the second's 6 + 6 s behind its own 2 s, takes
    # the second pass back from 14 to 18 s, and the third in half the time.
    assert predicted("stage=2", 3, "1f1b", samples=(4, 4, 2)).seconds == pytest.approx(20.0)
    assert predicted("stage=2", 3, "1f1b").seconds == pytest.approx(24.0)


def test_a_stage_keeps_the_activations_of_its_passes_in_flight() -> None:
    """Every layer keeps its input; the first stage sends what the second keeps. What is computed again is there once
    and takes time: of the other passes a stage keeps what it received and what it sends."""
    for schedule, (first, last) in (("gpipe", (6, 6)), ("1f1b", (2, 1))):
        result = predicted("stage=2", 6, schedule)
        assert [one.activations for one in result.by_stage] == [first * 3 * ONE, last * 2 * ONE]
        again = predicted("stage=2", 6, schedule, recompute=True)
        held = [(first - 1) * 2 * ONE + 3 * ONE, (last - 1) * ONE + 3 * ONE]
        assert [one.activations for one in again.by_stage] == held
        assert again.seconds == pytest.approx((6 + 1) * 2 * (1.0 + 3.0))
    later = predicted("stage=2", 6, "zero-bubble").by_stage  # every layer's input and its output's gradient
    assert [one.activations for one in later] == [6 * 2 * 2 * ONE] * 2
    # what stages send each other, in values at a cut; and of one weight two gradients, as those of the passes are added
    for schedule, passes, values in (
        ("gpipe", 6, [2, 2, 0]),  # gradients of a pass and of the next one
        ("1f1b", 6, [2, 4, 2]),  # besides, the next pass forward, and the gradients that were sent back last
        ("zero-bubble", 6, [2, 4, 3]),  # the second stage runs three parts further ahead than the last
        ("gpipe", 1, [1, 1, 0]),
    ):
        stages = predicted("stage=3", passes, schedule, layers=3).by_stage
        assert [one.messages for one in stages] == [number * ONE for number in values]
        assert [one.gradients - one.parameters for one in stages] == [WEIGHT * (passes > 1)] * 3
