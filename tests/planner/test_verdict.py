"""What holds a plan up is what was made slow, and a change is what the same plan is predicted to take with it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.models import create
from convoy.planner import Planned, score, workload_of
from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Assumed, Rate
from convoy.planner.cost.local_op import LocalOp
from convoy.planner.text import document, explanation_text
from convoy.planner.verdict import HOST, Explained, explained
from convoy.plans.plan import Plan
from convoy.plans.timeline import ENGINE

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


def planned(plan: str, device: Costs, model: nn.Module | None = None, alone: Costs | None = None) -> Planned:
    """A scored plan, without a search and without measuring anything."""
    workload = workload_of(model or create("lenet"), torch.empty(1, 1, 28, 28), BATCH, name="lenet")
    parsed = Plan.parse(plan)
    serial = score(workload, Plan.parse("serial"), alone or device)
    return Planned(workload, parsed.mesh.num_devices, (score(workload, parsed, device),), serial, None, device)


def explain(plan: str, device: Costs, alone: Costs | None = None) -> Explained:
    return explained(planned(plan, device, alone=alone))


def test_what_was_made_slow_is_what_holds_a_plan_up() -> None:
    slow = lambda factor: lambda local_op: by_flops(local_op) * factor  # noqa: E731
    for plan, device, alone, kind, layer, change in (
        ("sample=2", costs(), None, "compute", None, "compute"),
        ("sample=2", costs(with_delay), None, "batch", None, "batch"),  # calls that take their time on any share
        ("sample=2", costs(slow(1.5)), costs(), "division", "features.3", "compute"),  # parts of a layer
        ("replicate=2", costs(), None, "repeated", "features.3", None),
        ("sample=2", costs(update=Update(per_byte=1e-6)), None, "optimizer", None, "batch"),
        ("sample=2", costs(input=HostCost(per_sample=1.0)), None, "input", None, "input"),
        # parts that take longer than the whole are no batch that is too small
        ("sample=2", costs(lambda op: with_delay(op) * 4), costs(with_delay), "division", "features.3", "compute"),
    ):
        result = explain(plan, device, alone)
        assert result.verdict.kind == kind, (plan, kind, result.verdict)
        assert layer is None or result.verdict.layer == layer
        assert change is None or result.verdict.change is None or result.verdict.change.kind == change
    fast = explain("sample=2", costs())
    assert (fast.speedup, fast.efficiency, fast.verdict.change.gain) == pytest.approx((2, 1, 2), rel=1e-2)
    assert (
        "which no plan explains" in result.notes[0] and not fast.notes and "One device alone" not in fast.verdict.advice
    )
    doubted = explain("sample=2", costs(), alone=costs(slow(4)))  # more than the devices can do
    assert any("busy" in note for note in doubted.notes)


def test_slow_links_are_named_with_the_layer_that_waits_for_them_and_with_one_device_where_that_is_faster() -> None:
    result = explain("filter=2", costs(gbytes=1e-2))
    waits = {layer.name: layer.exposed + layer.copies for layer in result.layers}
    assert (result.verdict.kind, result.verdict.layer) == ("communication", max(waits, key=lambda name: waits[name]))
    assert result.verdict.layer in result.verdict.sentence
    change = next(change for change in result.changes if change.kind == "links")
    assert change.seconds == pytest.approx(explain("filter=2", costs(gbytes=2e-2)).scored.seconds)
    gains = [change.gain for change in result.changes]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 1
    slow = explain("filter=2", costs(gbytes=1e-3))
    first = explanation_text(slow).partition("\n")[0]
    assert first.endswith(f"; one device is faster: {slow.speedup:.2f} ×") and "One device alone" in slow.verdict.advice
    assert "one device is faster" not in explanation_text(explain("sample=2", costs())).partition("\n")[0]


def test_a_change_is_what_the_same_plan_is_predicted_to_take_with_it() -> None:
    result = explain("sample=2", costs(with_delay))
    larger = workload_of(create("lenet"), torch.empty(1, 1, 28, 28), 2 * BATCH)
    double = score(larger, result.scored.plan, costs(with_delay))
    assert result.verdict.change.seconds == pytest.approx(double.seconds)
    assert result.verdict.change.gain == pytest.approx(2 * result.scored.seconds / double.seconds)
    result = explain("sample=2", costs(gbytes=1e-2))
    layer = next(layer for layer in result.layers if layer.name == "classifier.0")
    strategy = layer.other.strategy[0]
    other = f"mesh: {{sample: 2}}\nlayers:\n  classifier.0: {{sample: {strategy}}}\n  '*': {{sample: sample}}"
    again = explain(other, costs(gbytes=1e-2))
    assert layer.other.seconds == pytest.approx(again.scored.seconds - result.scored.seconds)


def test_parts_add_up_to_the_update_and_what_the_engine_adds_is_not_the_optimizers() -> None:
    update = Update(per_byte=1e-9)
    for plan in ("serial", "sample=2", "filter=2", "sample=2,height=2"):
        result = explain(plan, costs(with_delay, gbytes=0.1, update=update))
        assert sum(part.seconds for part in result.parts) == pytest.approx(result.scored.seconds)
        assert all(part.seconds >= 0 for part in result.parts)
    without = explain("sample=2", costs(with_delay, update=update)).scored
    for fixed in (0.0, 0.5):
        device = costs(with_delay, update=replace(update, fixed=fixed))
        result = explain("sample=2", device, costs(update=update))
        scored, parts = result.scored, {part.name: part.seconds for part in result.parts}
        assert scored.seconds == pytest.approx(without.seconds + fixed)
        before = without.timeline.by_kind()["update"]
        compared = scored.timeline.summary().parts
        assert (
            parts["optimizer"] == pytest.approx(before) == compared["optimizer"] == scored.timeline.by_kind()["update"]
        )
        assert parts.get(ENGINE, 0.0) == pytest.approx(fixed)
        assert compared["rest"] == pytest.approx(without.timeline.summary().parts["rest"] + fixed)


def test_text_and_document_say_the_same() -> None:
    result = explain("sample=2", costs(gbytes=0.1))
    text, record = explanation_text(result), document(result)
    for words in ("plan sample=2", result.verdict.sentence, "speed-up", "next best", "features.0", "classifier.4"):
        assert words in text
    assert (record["update_s"], record["verdict"]["kind"]) == (result.scored.seconds, result.verdict.kind)
    assert [layer["layer"] for layer in record["layers"]] == [layer.name for layer in result.layers]


def test_gpus_that_wait_for_their_host_are_bound_by_it() -> None:
    def issued(local_op: LocalOp) -> Times:
        return by_flops(local_op) + Times(0.0, 0.0, 5e-3, 5e-3)

    result = explain("serial", replace(costs(issued), on_cpu=False))
    assert result.verdict.kind == "host" and result.verdict.sentence.startswith("Bound by the host: for 9")
    assert {part.name: part.seconds for part in result.parts}[HOST] > 0.9 * result.scored.seconds
    assert all(change.kind != "compute" for change in result.changes)


def test_stages_are_explained_each_by_its_own_ranks() -> None:
    result = explain("stage=2,sample=2", costs())
    first, second = result.stages
    assert (first.layer, first.ranks, first.takes, first.sent > 0) == ("features.0", (0, 1), (), True)
    assert second.ranks == (2, 3) and second.takes and second.received.forward == second.received.backward > 0
    computing = [layer for layer in result.layers if set(layer.ops) & {"conv", "linear"}]
    assert {layer.stage for layer in computing} == {0, 1}
    assert all(layer.forward > 0 and layer.parameters > 0 for layer in computing)
    text, record = explanation_text(result), document(result)
    for words in ("strategy (sample)", "takes the output of", "bubble", "\n2      features.", ", schedule "):
        assert words in text
    assert [stage["begins"] for stage in record["stages"]] == [first.layer, second.layer]


def test_stages_of_unlike_work_hold_up_each_other_and_send_for_the_layer_that_gives_a_value() -> None:
    def cut_at(layer: str) -> str:
        return Plan.parse({"mesh": {"stage": 2}, "stages": [layer]}).to_yaml()

    result = explain(cut_at("classifier"), costs())
    assert result.verdict.kind == "stages" and "()" not in explanation_text(result)
    assert "most is computed in stage 1, from features.0 on" in result.verdict.sentence
    sent = {layer.name: layer.sent for layer in explain(cut_at("features.3"), costs()).layers}
    passes = 8  # of 4 samples, whose 6 × 14 × 14 numbers go forward, and their gradients back from another rank
    assert sent["features.2"] == passes * 4 * 6 * 14 * 14 * 4
    assert sent["features.0"] == sent["classifier.0"] == 0

    def adding_is_slow(local_op: LocalOp) -> Times:
        return Times(1e-7) if local_op.op == "copy" and len(local_op.inputs) == 2 else by_flops(local_op)

    def by_1f1b(device: Costs) -> Explained:
        result = planned("stage=2", device)
        scored = score(replace(result.workload, schedules=("1f1b",)), result.best.plan, device)
        return explained(replace(result, candidates=(scored,)))

    plain, slow = by_1f1b(costs()), by_1f1b(costs(adding_is_slow))  # adding gradients up is the work of no layer
    assert all(more.computes > before.computes for before, more in zip(plain.stages, slow.stages, strict=True))
    assert [layer.backward for layer in slow.layers] == pytest.approx([layer.backward for layer in plain.layers])
