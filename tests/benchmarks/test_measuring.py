"""Cases, arrangements, results and processes of the benchmarks."""

import os

import pytest
import torch
from measuring.cases import CASES, OTHERS, hybrid
from measuring.ranks import Limits, RankFailed, run_ranks
from measuring.results import SERIAL, Results, Row, markdown
from measuring.sides import PEERS, Arrangement, Side
from measuring.training import train, try_arrangements

from convoy.plans.plan import Plan

TINY = OTHERS["lenet"].changed(8, 1)


def test_every_plan_of_a_case_is_one_for_two_devices() -> None:
    for case in (*CASES.values(), *OTHERS.values()):
        for plan in case.plans.values():
            assert Plan.parse(plan).mesh.num_devices == 2


def test_hybrid_names_layers_first() -> None:
    plan = Plan.parse(hybrid(classifier__1="filter"))
    assert plan.strategy("classifier.1", "linear") == ("filter",)
    assert plan.strategy("features.0", "conv") == ("sample",)


def test_passes_cover_the_batch_once() -> None:
    assert Arrangement(True, 3).passes(8) == [slice(0, 3), slice(3, 6), slice(6, 8)]
    assert Arrangement().passes(8) == [slice(0, 8)]
    assert Arrangement(True, 8).for_batch(8) == Arrangement()


@pytest.mark.slow
def test_accumulated_passes_are_the_same_update() -> None:
    """LeNet has no batch norm and no dropout, so the losses of all sides are the same."""
    case = TINY.changed(None, 2)
    whole = run_ranks(train, 1, Side("", "serial"), case, 0)[0].losses
    for side, num in (
        (Side("", "serial", Arrangement(True, 4)), 1),
        (Side("", "ddp", Arrangement(True, 2)), 2),
        (Side("", "convoy", Arrangement(), "sample=2"), 2),
        (Side("", "convoy", Arrangement(True, 2), "owt=2"), 2),
    ):
        timings = run_ranks(train, num, side, case, 0, limits=Limits(90))
        losses = [sum(timing.losses[i] for timing in timings) / num for i in range(2)]
        assert losses == pytest.approx(whole, rel=1e-4), side


@pytest.mark.slow
def test_arrangements_are_tried() -> None:
    found = run_ranks(try_arrangements, 1, TINY.changed(64, 1), limits=Limits(90))[0]
    assert {arrangement.samples for arrangement in found} <= {None, 32}
    assert all(seconds > 0 for seconds in found.values())


def own_core() -> tuple[set[int], int]:
    return os.sched_getaffinity(0), torch.get_num_threads()


def test_ranks_have_one_core_and_one_thread() -> None:
    cores = sorted(os.sched_getaffinity(0))
    (first, threads), (second, _) = run_ranks(own_core, 2)
    assert first == {cores[0]} and second == {cores[1 % len(cores)]} and threads == 1
    assert run_ranks(own_core, 1, first_core=1)[0][0] == {cores[1 % len(cores)]}


def fail() -> None:
    raise ValueError("on purpose")


def sleep() -> None:
    import time

    time.sleep(60)


def end() -> None:
    os._exit(7)


@pytest.mark.slow
def test_ranks_that_fail_hang_or_die_are_named() -> None:
    with pytest.raises(RankFailed, match="on purpose"):
        run_ranks(fail, 1)
    with pytest.raises(RankFailed, match="did not come back"):
        run_ranks(sleep, 1, limits=Limits(2))
    with pytest.raises(RankFailed, match="status 7"):
        run_ranks(end, 1)


def test_table() -> None:
    rows = [Row(SERIAL, "one pass", [2.0, 4.0, 3.0]), Row("Convoy", "one pass", [1.0, 2.0, 1.5])]
    results = Results("alexnet-32", 32, "alexnet", rows, skipped={"accelerate": "pip install accelerate"})
    text = markdown(results)
    assert "| Convoy | 1.5000 | 2.00 | 1.000–2.000 s, ×2.00–2.00 | one pass |" in text
    assert "accelerate: skipped, pip install accelerate" in text and "measure again" not in text
    rows[0].busy = 0.5
    assert "Other programs took 50% of the one device's core" in markdown(results)
    assert results.to_dict()["sides"][1]["ratio"] == 2.0


def test_peers_that_are_not_installed_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [Side("", kind).missing for kind in PEERS] == [None, "lightning", "accelerate"]
