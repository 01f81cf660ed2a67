"""What measures: the ranks' processes, a stopwatch by a clock that the test moves, peers, and the planner's row."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.made_study import study
from convoy.bench import measurement, training_runs
from convoy.bench.ask import configurations, missing
from convoy.bench.measure import forecast, measure_rank, wrap
from convoy.bench.measurement import MeasurementTask, Stopwatch
from convoy.bench.processes import RankFailed, RankSlot, Say, run_ranks
from convoy.bench.records import COMMUNICATION, INPUT, OPTIMIZER, Forecast, Store
from convoy.bench.study import recipe_for
from convoy.bench.training_runs import Heard
from convoy.comm.collectives import waits
from convoy.comm.position import current
from convoy.engine.profiling import CallTimes, Profile, Profiler
from convoy.errors import ConvoyError
from convoy.planner import make_plan
from convoy.planner.cost.link import Links, Rate
from convoy.plans.plan import Plan
from convoy.training import load_recipe, workloads
from emulated_hosts import listening
from processes import alive
from ranks import run_ranks as run_test_ranks
from started import wait_for
from tiny import write_mnist


def test_what_lies_inside_counts_once_and_collectives_and_optimizers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def take(seconds: float) -> None:
        now[0] += seconds

    with monkeypatch.context() as patched:
        patched.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        watch = Stopwatch(torch.device("cpu"))
        watch.lap()
        watch.lap()
        watch.clear()
        watch.lap()
        with watch.section(INPUT):
            take(1)
        take(10)
        with watch.section(OPTIMIZER):
            take(2)
            with watch.section(COMMUNICATION):
                take(3)
                with watch.section(COMMUNICATION):
                    take(4)
                take(5)
            take(6)
        watch.lap()
        take(7)
        watch.lap()
        assert watch.times() == {"seconds": [31, 7], INPUT: [1, 0], OPTIMIZER: [8, 0], COMMUNICATION: [12, 0]}
    assert 0 < watch.overhead < 1
    layer = nn.Linear(1, 1)
    layer(torch.ones(1)).sum().backward()
    watch.clear()
    with watch.watch():
        watch.lap()
        waits(lambda: time.sleep(0.01))()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
        watch.lap()
    assert watch.times()[COMMUNICATION][0] >= 0.01 and watch.times()[OPTIMIZER][0] > 0


def test_a_training_that_moves_is_heard_of_while_it_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_runs, "_BEAT_S", 0.01)
    told: list[tuple[str, int, int]] = []
    heard = Heard(lambda *what: told.append(what))
    heard.prepare("counting", 3, 9)
    heard.begin(0, 50)
    heard.advance(7, "loss 2.3")
    before = [("counting", 0, 0), ("beginning", 0, 50), ("loss 2.3", 7, 50)]
    with heard.beating():
        time.sleep(0.1)
        assert told == before  # nothing has moved
        current.to("evaluation")
        wait_for(lambda: len(told) > 3, 10)
    current.to("evaluation")
    time.sleep(0.1)
    assert told == [*before, before[-1]]


def backward(kind: str, say: Say) -> tuple[list[int], int, set[str], list[float]]:
    """A rank's cores and threads, the addresses on which it listens, its gradients with and without an exchange."""
    say("here", 1, 2)
    before = listening([os.getpid()])
    model, device = nn.Linear(1, 1, bias=False), torch.device("cpu")
    wrapped = wrap(kind, model, torch.optim.SGD(model.parameters()), 2, device)
    addresses = {address for address, _ in listening([os.getpid()]) - before}
    x = torch.tensor([[1.0 + int(os.environ["RANK"])]])
    gradients = []
    for exchange in (nullcontext(), wrapped.unfinished()):
        wrapped.optimizer.zero_grad()
        with exchange:
            wrapped.backward(wrapped.network(x).sum())
        assert model.weight.grad is not None
        gradients.append(float(model.weight.grad))
    return sorted(os.sched_getaffinity(0)), torch.get_num_threads(), addresses, gradients


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fabric", "accelerate"])
def test_ranks_have_cores_listen_on_one_address_and_exchange_gradients(kind: str) -> None:
    if missing(kind) is not None:
        pytest.skip(f"{missing(kind)} is not installed")
    cores = sorted(os.sched_getaffinity(0))
    slots = [RankSlot(rank, 2, (core,)) for rank, core in enumerate((cores[0], cores[-1]))]
    heard: list[tuple[str, int, int]] = []
    results = run_ranks(backward, slots, kind, say=lambda *what: heard.append(what))
    gradients = [[1.5, 1.0], [1.5, 2.0]]
    assert results == [([core], 1, {"127.0.0.1"}, gradients[rank]) for rank, core in enumerate((cores[0], cores[-1]))]
    assert heard == [("here", 1, 2)]


def fail(how: str, say: Say) -> None:
    print("to the standard output", flush=True)
    if how == "mistake":
        raise ConvoyError("the plan is wrong: mend it")
    if how == "error":
        raise ZeroDivisionError("by nothing")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(100)


@pytest.mark.slow
def test_failures_have_reasons_and_the_standard_output_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    for how, kind, words in (
        ("mistake", ConvoyError, "mend it"),
        ("error", RankFailed, "rank 0 failed: ZeroDivisionError: by nothing"),
        ("killed", RankFailed, "rank 0 was ended by SIGKILL; the machine may be out of memory"),
        ("hang", RankFailed, "did not come back in time"),
    ):
        with pytest.raises(kind, match=words):
            run_ranks(fail, [RankSlot(0, 1)], how, seconds=1.0 if how == "hang" else 60.0)
    run_ranks(fail, [RankSlot(0, 1)], "not", quiet=True)
    assert capfd.readouterr().out == ""


STARTS_A_RANK = """
import multiprocessing, os, sys, time
from pathlib import Path
from convoy.bench.processes import RankSlot, run_ranks
from convoy.data import DataConfig, Order, open_data, training_batches

def load_pictures(folder, say):
    config = DataConfig(path=str(folder), workers=1)
    data = open_data(config)
    batches = training_batches(data, config, Order(len(data.train), 8, 0), first_update=0, num_updates=9, seed=0)
    next(batches)
    numbers = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    (folder / "unfinished").write_text(" ".join(map(str, numbers)))
    (folder / "unfinished").rename(folder / "numbers")
    time.sleep(100)

if __name__ == "__main__":
    run_ranks(load_pictures, [RankSlot(0, 1)], Path(sys.argv[1]))
"""
"""Its rank hangs while a process loads pictures for it, whose number is written beside its own."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_nothing_outlives_whoever_started_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS_A_RANK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    runs = {}
    try:
        for end in (signal.SIGKILL, signal.SIGINT):
            line = [sys.executable, str(tmp_path / "starts.py"), str(write_mnist(tmp_path / end.name))]
            runs[end] = subprocess.Popen(line, env=environment)
        for end, process in runs.items():
            numbers = tmp_path / end.name / "numbers"
            wait_for(lambda numbers=numbers, process=process: numbers.exists() or process.poll() is not None, 100)
            ranks = list(map(int, numbers.read_text().split()))
            assert len(ranks) > 1 and all(map(alive, ranks))
            process.send_signal(end)
            process.wait(30)
            wait_for(lambda ranks=ranks: not any(map(alive, ranks)), 30)
    finally:
        for process in runs.values():
            process.kill()
            process.wait(30)


# The planner's row runs what the planner chooses, on devices of which the second seems slower.

TINY = load_recipe("default", ["model.name=tiny:TinyNet", "data.path=mnist-mini", "batch=16", "microbatch=2"])


def task(**changes: object) -> MeasurementTask:
    (row,) = configurations([2], ["auto"], [])
    recipe = recipe_for(TINY, study(TINY), row, None)
    plain = MeasurementTask("convoy", recipe, study(TINY).images, "cpu", updates=1, warm_up=0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def planned(folder: str, slower: float, bound: tuple[str, ...]) -> Forecast:
    run = Profiler.run

    def taking(profiler: Profiler, *args: object) -> Profile:
        profile = run(profiler, *args)  # type: ignore[arg-type]
        seconds = 1e-3 * (slower if dist.get_rank() else 1.0)
        calls = {name: CallTimes(seconds, seconds) for name in profile.calls}
        return replace(profile, calls=calls, seconds=seconds, slowest=seconds)

    links = Links(otherwise=lambda group: Rate(2e-5, 5e9).link(len(group), overlap=False, cpu_share=1.0))
    with_links = partial(make_plan, link=links)
    with (
        patch.dict(os.environ, CONVOY_CACHE=folder),
        patch.object(Profiler, "run", taking),
        patch.object(workloads, "make_plan", partial(with_links, plans=[Plan.parse("sample=2")])),
        patch.object(sys.modules[forecast.__module__], "make_plan", with_links),
    ):
        return forecast(task(), ["auto", "sample=2"], bound, True, False, lambda *what: None)


def microbatches(recipe: object) -> int:
    return measure_rank(task(recipe=recipe), lambda *what: None).microbatches


@pytest.mark.matrix
def test_the_planners_row_has_the_planners_shares(tmp_path: Path) -> None:
    for equal in run_test_ranks(planned, 2, str(tmp_path / "equal"), 1.0, (), timeout=240):
        assert (equal.auto, equal.auto_shares, equal.bound) == ("sample=2", None, {})
        assert set(equal.predictions) == {"sample=2"}
    unequal, again = run_test_ranks(planned, 2, str(tmp_path), 3.0, ("1,1",), timeout=240)
    assert (unequal.auto, unequal.auto_shares, unequal.bound) == ("sample=2", [6, 2], {"1,1": "sample=2"})
    assert (again.auto, again.auto_shares) == (unequal.auto, unequal.auto_shares)
    assert "plan auto divides the batch by speed: 6,2 microbatches" in unequal.notes
    assert unequal.predictions["auto"].seconds < unequal.predictions["sample=2"].seconds
    store = Store.open(tmp_path, study(TINY), {})
    rows = store.add(configurations([2], ["sample", "auto"], [], ["", "1,1"]))
    store.put_forecast(2, unequal)
    recipes = [recipe_for(TINY, store.study, row, store.plan_of(row), store.shares_of(row)) for row in rows]
    assert [run_test_ranks(microbatches, 2, recipe) for recipe in recipes] == [[4, 4], [4, 4], [6, 2], [4, 4]]
