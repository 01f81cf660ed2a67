"""What holds a plan up is what was made slow, and a change is what the same plan is predicted to take with it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.models import create
from convoy.planner import Planned, score, workload_of
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Assumed, Rate
from convoy.planner.cost.local_op import LocalOp
from convoy.planner.cost.times import Times
from convoy.planner.text import document, explanation_text
from convoy.planner.verdict import HOST, Explained, explained, faster
from convoy.plans.plan import Plan
from convoy.plans.timeline import ENGINE
from convoy.report.timeline_drawing import draw_timeline, kinds_in

BATCH = 32


def by_flops(local_op: LocalOp) -> Times:
    """A device of 10 GFLOP/s whose other layers take no time."""
    return Times(local_op.flops.forward / 1e10, local_op.flops.backward / 1e10)


def with_delay(local_op: LocalOp) -> Times:
    """The same, where every call also takes 5 ms."""
    return by_flops(local_op) + Times(5e-3, 5e-3)


def costs(
    times: Callable[[LocalOp], Times] = by_flops, gbytes: float = 1e3, update: Update | None = None, **around: HostCost
) -> Costs:
    links = Assumed(Rate(0.0, gbytes * 1e9), overlap=False).links()
    return Costs(times=times, links=links, update=update or Update(), **around)


def planned(plan: str, known: Costs, model: nn.Module | None = None, alone: Costs | None = None) -> Planned:
    """A scored plan, without a search and without measuring anything."""
    workload = workload_of(model or create("lenet"), torch.empty(1, 1, 28, 28), BATCH, name="lenet")
    parsed = Plan.parse(plan)
    serial = score(workload, Plan.parse("serial"), alone or known)
    return Planned(workload, parsed.mesh.num_devices, (score(workload, parsed, known),), serial, None, known)


def explain(plan: str, known: Costs, alone: Costs | None = None) -> Explained:
    return explained(planned(plan, known, alone=alone))


def test_fast_links_leave_computing() -> None:
    found = explain("sample=2", costs())
    assert found.verdict.kind == "compute"
    assert found.speedup == pytest.approx(2, rel=1e-3)
    assert found.efficiency == pytest.approx(1, rel=1e-3)
    assert found.verdict.change is not None and found.verdict.change.kind == "compute"
    assert found.verdict.change.gain == pytest.approx(2, rel=1e-2)


def test_slow_links_are_named_with_the_layer_that_waits_for_them() -> None:
    found = explain("filter=2", costs(gbytes=1e-2))
    assert found.verdict.kind == "communication"
    waits = {layer.name: layer.exposed + layer.copies for layer in found.layers}
    assert found.verdict.layer == max(waits, key=lambda name: waits[name])
    assert found.verdict.layer in found.verdict.sentence
    change = next(change for change in found.changes if change.kind == "links")
    again = explain("filter=2", costs(gbytes=2e-2))
    assert change.seconds == pytest.approx(again.scored.seconds)


def test_calls_that_take_their_time_on_any_share_ask_for_a_larger_batch() -> None:
    found = explain("sample=2", costs(with_delay))
    assert found.verdict.kind == "batch"
    assert found.verdict.change is not None and found.verdict.change.kind == "batch"
    double = score(
        workload_of(create("lenet"), torch.empty(1, 1, 28, 28), 2 * BATCH), found.scored.plan, costs(with_delay)
    )
    assert found.verdict.change.seconds == pytest.approx(double.seconds)
    assert found.verdict.change.gain == pytest.approx(2 * found.scored.seconds / double.seconds)


def test_parts_of_a_layer_that_are_slow_whatever_the_batch() -> None:
    found = explain("sample=2", costs(lambda local_op: by_flops(local_op) * 1.5), alone=costs())
    assert (found.verdict.kind, found.verdict.layer) == ("division", "features.3")
    assert found.verdict.change is not None and found.verdict.change.kind == "compute"


def test_what_runs_whole_on_every_device_is_repeated_work() -> None:
    found = explain("replicate=2", costs())
    assert (found.verdict.kind, found.verdict.layer) == ("repeated", "features.3")
    assert found.speedup == pytest.approx(1)


def test_devices_that_only_cost_are_said_to() -> None:
    assert "One device alone" in explain("filter=2", costs(gbytes=1e-3)).verdict.advice
    assert "One device alone" not in explain("sample=2", costs()).verdict.advice


def test_where_one_device_is_faster_the_first_line_says_so() -> None:
    slow = explain("filter=2", costs(gbytes=1e-3))
    first = explanation_text(slow).partition("\n")[0]
    assert first.endswith(f"; one device is faster: {slow.speedup:.2f} ×") and slow.speedup < 1
    assert "one device is faster" not in explanation_text(explain("sample=2", costs())).partition("\n")[0]


def test_a_slow_optimizer() -> None:
    found = explain("sample=2", costs(update=Update(per_byte=1e-6)))
    assert found.verdict.kind == "optimizer"
    assert found.verdict.change is not None


def test_input_that_is_not_ready() -> None:
    found = explain("sample=2", costs(input=HostCost(per_sample=1.0)))
    assert found.verdict.kind == "input"
    assert found.verdict.change is not None and found.verdict.change.kind == "input"


@pytest.mark.parametrize("beside", [False, True])
def test_input_beside_the_computation_costs_what_is_left_of_it(beside: bool) -> None:
    update = explain("sample=2", costs()).scored.seconds
    slow = costs(input=HostCost(per_sample=3 * update / (BATCH / 2), beside=beside))
    found = explain("sample=2", slow)
    assert found.scored.seconds == pytest.approx(update * (3 if beside else 4), rel=1e-3)
    assert found.verdict.kind == "input"
    fast = explain("sample=2", costs(input=HostCost(per_sample=0.5 * update / (BATCH / 2), beside=beside)))
    assert fast.scored.seconds == pytest.approx(update * (1 if beside else 1.5), rel=1e-3)
    assert fast.verdict.kind == "compute"


def test_what_the_engine_adds_is_not_the_optimizers() -> None:
    update = Update(per_byte=1e-9)
    found = explain("sample=2", costs(update=replace(update, fixed=0.5)), alone=costs(update=update))
    parts = {part.name: part.seconds for part in found.parts}
    assert parts[ENGINE] == pytest.approx(0.5)
    assert parts["optimizer"] == pytest.approx(next(part.ideal for part in found.parts if part.name == "optimizer") * 2)
    assert found.verdict.kind == "batch"


@pytest.mark.parametrize("fixed", [0.0, 0.5])
def test_every_place_has_the_same_seconds_for_the_optimizer(fixed: float) -> None:
    update = Update(per_byte=1e-9)
    found = explain("sample=2", costs(with_delay, update=replace(update, fixed=fixed)), alone=costs(update=update))
    without = explain("sample=2", costs(with_delay, update=update)).scored
    scored, parts = found.scored, {part.name: part.seconds for part in found.parts}
    assert scored.seconds == pytest.approx(without.seconds + fixed)
    own = without.timeline.by_kind()["update"]
    compared = scored.timeline.summary().parts
    assert parts["optimizer"] == pytest.approx(own) == compared["optimizer"] == scored.timeline.by_kind()["update"]
    assert parts.get(ENGINE, 0.0) == pytest.approx(fixed)
    assert compared["rest"] == pytest.approx(without.timeline.summary().parts["rest"] + fixed)
    drawn = draw_timeline(scored.timeline)
    assert ('class="span engine"' in drawn) == ("engine" in dict(kinds_in(scored.timeline))) == (fixed > 0)


@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2", "sample=2,height=2"])
def test_parts_add_up_to_the_update(plan: str) -> None:
    found = explain(plan, costs(with_delay, gbytes=0.1, update=Update(per_byte=1e-9)))
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.scored.seconds)
    assert all(part.seconds >= 0 for part in found.parts)


def test_changes_stand_in_order_and_help() -> None:
    found = explain("filter=2", costs(with_delay, gbytes=0.1))
    gains = [change.gain for change in found.changes]
    assert gains == sorted(gains, reverse=True)
    assert all(gain > 1 for gain in gains)


def test_a_layers_other_strategy_is_predicted_with_all_else_as_it_is() -> None:
    found = explain("sample=2", costs(gbytes=1e-2))
    layer = next(layer for layer in found.layers if layer.name == "classifier.0")
    assert layer.other is not None
    text = "\n".join(["mesh: {sample: 2}", "layers:", *_lines(layer.other.strategy[0])])
    again = explain(text, costs(gbytes=1e-2))
    assert layer.other.seconds == pytest.approx(again.scored.seconds - found.scored.seconds)


def _lines(strategy: str) -> list[str]:
    return [f"  classifier.0: {{sample: {strategy}}}", "  '*': {sample: sample}"]


def test_faster_links_keep_who_they_are_between() -> None:
    links = costs(gbytes=1.0).links
    mesh = Plan.parse("sample=2").mesh
    assert faster(links, 2.0).of(mesh, (0,)).all_reduce(1 << 20) == pytest.approx(
        links.of(mesh, (0,)).all_reduce(1 << 20) / 2
    )


def test_text_names_plan_figures_and_every_layer_with_weights() -> None:
    found = explain("sample=2", costs(gbytes=0.1))
    text = explanation_text(found)
    for words in ("plan sample=2", found.verdict.sentence, "speed-up", "next best", "features.0", "classifier.4"):
        assert words in text


def test_the_document_says_the_same_in_numbers() -> None:
    found = explain("sample=2", costs(gbytes=0.1))
    said = document(found)
    assert said["update_s"] == found.scored.seconds
    assert said["verdict"]["kind"] == found.verdict.kind
    assert Plan.parse({"mesh": said["plan"]["mesh"], "layers": said["plan"]["layers"]}) == found.scored.plan
    assert [layer["layer"] for layer in said["layers"]] == [layer.name for layer in found.layers]


def test_more_than_the_devices_can_do_is_doubted() -> None:
    slow = costs(lambda local_op: by_flops(local_op) * 4)
    assert any("busy" in note for note in explain("sample=2", costs(), alone=slow).notes)
    assert not explain("sample=2", costs()).notes


def test_parts_that_take_longer_than_the_whole_are_doubted_too() -> None:
    """What takes so long is not a batch that is too small."""
    assert explain("sample=2", costs(with_delay)).verdict.kind == "batch"
    found = explain("sample=2", costs(lambda local_op: with_delay(local_op) * 4), alone=costs(with_delay))
    assert found.verdict.kind == "division"
    assert "times as long as one that does all alone, which no plan explains" in found.notes[0]
    assert not explain("sample=2", costs(with_delay)).notes


def test_gpus_that_wait_for_their_host_are_bound_by_it() -> None:
    def issued(local_op: LocalOp) -> Times:
        return by_flops(local_op) + Times(0.0, 0.0, 5e-3, 5e-3)

    found = explain("serial", replace(costs(issued), on_cpu=False))
    assert found.verdict.kind == "host"
    assert found.verdict.sentence.startswith("Bound by the host: for 9")
    assert {part.name: part.seconds for part in found.parts}[HOST] > 0.9 * found.scored.seconds
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.scored.seconds)
    assert all(change.kind != "compute" for change in found.changes)
    assert found.verdict.sentence in explanation_text(found)


def test_stages_are_explained_each_by_its_own_ranks() -> None:
    found = explain("stage=2,sample=2", costs())
    first, second = found.stages
    assert (first.layer, first.ranks, first.takes, first.sent > 0) == ("features.0", (0, 1), (), True)
    assert second.ranks == (2, 3)
    assert second.takes and second.received.forward == second.received.backward > 0
    assert [layer.stage for layer in found.layers] == sorted(layer.stage or 0 for layer in found.layers)
    computing = [layer for layer in found.layers if set(layer.ops) & {"conv", "linear"}]
    assert {layer.stage for layer in computing} == {0, 1}
    assert all(layer.forward > 0 and layer.parameters > 0 for layer in computing)
    text = explanation_text(found)
    for words in ("strategy (sample)", "takes the output of", "bubble", "\n2      features.", ", schedule "):
        assert words in text
    assert "replicate" not in text
    said = document(found)
    assert [stage["begins"] for stage in said["stages"]] == [first.layer, second.layer]
    assert said["stages"][1]["received_bytes"] == {
        "forward": second.received.forward,
        "backward": second.received.backward,
    }
    assert [layer["stage"] for layer in said["layers"]] == [(layer.stage or 0) + 1 for layer in found.layers]
    assert all("stage" not in layer for layer in document(explain("sample=2", costs()))["layers"])


def test_adding_gradients_up_is_the_work_of_no_layer() -> None:
    """Nor that of what the network computes by itself, which has no layer either."""

    def adding_is_slow(local_op: LocalOp) -> Times:
        return Times(1e-7) if local_op.op == "copy" and len(local_op.inputs) == 2 else by_flops(local_op)

    def by_1f1b(known: Costs) -> Explained:
        found = planned("stage=2", known)
        scored = score(replace(found.workload, schedules=("1f1b",)), found.best.plan, known)
        return explained(replace(found, candidates=(scored,)))

    found, slow = by_1f1b(costs()), by_1f1b(costs(adding_is_slow))
    assert slow.scored.passes == found.scored.passes > 1
    assert all(more.computes > own.computes for own, more in zip(found.stages, slow.stages, strict=True))
    assert [layer.backward for layer in slow.layers] == pytest.approx([layer.backward for layer in found.layers])


def test_stages_of_unlike_work_hold_up_each_other() -> None:
    plan = str(Plan.parse({"mesh": {"stage": 2}, "stages": ["classifier"]}).to_yaml())
    found = explain(plan, costs())
    assert found.verdict.kind == "stages"
    assert "most is computed in stage 1, from features.0 on" in found.verdict.sentence
    assert "strategy " in explanation_text(found) and "()" not in explanation_text(found)


def test_what_crosses_a_cut_is_sent_for_the_layer_that_gives_it() -> None:
    plan = Plan.parse({"mesh": {"stage": 2}, "stages": ["features.3"]}).to_yaml()
    found = {layer.name: layer for layer in explain(plan, costs()).layers}
    passes = 8  # of 4 samples, whose 6 × 14 × 14 numbers go forward, and their gradients back from another rank
    assert found["features.2"].sent == passes * 4 * 6 * 14 * 14 * 4
    assert found["features.0"].sent == found["classifier.0"].sent == 0
