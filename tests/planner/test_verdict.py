"""What holds a plan up is what was made slow, and a change is what the same plan is predicted to take with it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from convoy.hardware.catalog import Hop
from convoy.models import create
from convoy.planner.cost.costs import Costs, HostCost, Times, Update
from convoy.planner.cost.link import assumed
from convoy.planner.cost.local_op import LocalOp
from convoy.planner.explanation import Explanation, explanation_text
from convoy.planner.planner import Planned, score
from convoy.planner.workload import workload_of
from convoy.plans.plan import Plan

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
    links = assumed(Hop(0.0, gbytes * 1e9), overlap=False)
    return Costs(times=times, links=links, update=update or Update(), **around)


def explain(
    plan: str, device: Costs, alone: Costs | None = None, shares: tuple[int, ...] | None = None, batch: int = BATCH
) -> Explanation:
    """A scored plan, without a search and without measuring anything."""
    workload = workload_of(create("lenet"), torch.empty(1, 1, 28, 28), batch, name="lenet")
    workload = replace(workload, shares=shares)
    parsed = Plan.parse(plan)
    serial = score(workload, Plan.parse("serial"), alone or device)
    scored = score(workload, parsed, device)
    return Explanation(Planned(workload, parsed.mesh.num_devices, (scored,), serial, None, device))


def test_what_was_made_slow_is_what_holds_a_plan_up() -> None:
    slow = lambda factor: lambda local_op: by_flops(local_op) * factor  # noqa: E731
    issued = lambda local_op: by_flops(local_op) + Times(0.0, 0.0, 5e-3, 5e-3)  # noqa: E731
    for plan, device, alone, kind, layer, change in (
        ("sample=2", costs(), None, "compute", "features.3", "devices that compute"),
        ("sample=2", costs(with_delay), None, "batch", None, "a batch of 64"),  # calls of 5 ms on any share
        ("sample=2", costs(slow(1.5)), costs(), "division", "features.3", "devices that compute"),  # parts of a layer
        ("replicate=2", costs(), None, "repeated", "features.3", ""),
        ("sample=2", costs(update=Update(per_byte=1e-6)), None, "optimizer", None, ""),
        ("sample=2", costs(input=HostCost(per_sample=1.0)), None, "input", None, "input that is"),
        # parts that take longer than the whole are no batch that is too small
        ("sample=2", costs(lambda op: with_delay(op) * 4), costs(with_delay), "division", "features.3", ""),
        ("filter=2", costs(gbytes=1e-2), None, "communication", "features.3", ""),
        ("serial", replace(costs(issued), on_cpu=False), None, "host", None, ""),  # GPUs that wait for their host
    ):
        result = explain(plan, device, alone)
        verdict = result.verdict
        assert verdict.kind == kind and verdict.layer in (layer, verdict.layer if layer is None else layer), plan
        assert change in verdict.advice, plan
        assert sum(part.seconds for part in result.parts) == pytest.approx(result.scored.seconds), plan
    doubted = explain("sample=2", costs(), alone=costs(slow(4)))  # more than the devices can do
    assert any("busy" in note for note in doubted.notes)


def test_a_change_is_what_the_same_plan_is_predicted_to_take_with_it() -> None:
    unequal = replace(costs(with_delay), slowdowns=(0.75, 1.25))
    for device, shares in ((costs(with_delay), None), (unequal, (5, 3))):
        result, double = (explain("sample=2", device, None, shares, batch) for batch in (BATCH, 2 * BATCH))
        batch = next(change for change in result.changes if change.kind == "batch")
        assert batch.update_s == pytest.approx(double.scored.seconds)
        assert batch.gain == pytest.approx(2 * result.scored.seconds / double.scored.seconds)
    result = explain("sample=2", costs(gbytes=1e-2))
    links = next(change for change in result.changes if change.kind == "links")
    assert links.update_s == pytest.approx(explain("sample=2", costs(gbytes=2e-2)).scored.seconds)
    layer = next(layer for layer in result.layers if layer.layer == "classifier.0")
    (strategy,) = layer.next_best.strategy
    assert strategy in ("replicate", "filter", "channel")  # by rows a linear layer would be as by samples
    other = f"mesh: {{sample: 2}}\nlayers:\n  classifier.0: {{sample: {strategy}}}\n  '*': {{sample: sample}}"
    again = explain(other, costs(gbytes=1e-2))
    assert layer.next_best.extra_s == pytest.approx(again.scored.seconds - result.scored.seconds)


def test_approximate_methods_are_named_where_they_gain_something() -> None:
    slow, fast = (explain("sample=2", costs(gbytes=rate)) for rate in (1e-3, 1e3))
    assert "exact is as fast: no approximate method is predicted to gain a tenth" in explanation_text(fast)
    text, rows = explanation_text(slow), {row.method: row for row in slow.approximate}
    assert "approximate: another result" in text and "exact is as fast" not in text
    bf16, alone_s = rows["--gradient-compression bf16"], fast.scored.seconds
    exact_bytes = sum(p.numel() for p in create("lenet").parameters()) * 4
    assert (bf16.rounds, bf16.sent_bytes) == (1.0, exact_bytes / 2)  # a ring of two: each sends the whole once
    assert bf16.update_s == pytest.approx(alone_s + exact_bytes / 2 / 1e6, rel=1e-3)
    local = next(row for method, row in rows.items() if method.startswith("--local-sgd") and "staleness" not in method)
    assert 0.8 * local.update_s <= alone_s < local.update_s < slow.scored.seconds / 4
    assert explain("filter=2", costs()).approximate == ()
