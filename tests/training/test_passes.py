"""An update of several passes: gradients travel once, and a rank may leave out passes in which it has no samples."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from convoy.engine import microbatch_sizes, prepare
from convoy.engine.gradients import GradientReducer
from convoy.models import create
from convoy.ops.statistics import RunningStatistics
from convoy.planner.planner import passes_of
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE
from convoy.training import load_recipe
from convoy.training.build import divisible_sizes, merged, probed
from convoy.training.derived import num_microbatches
from convoy.training.division import Division, divide, soonest
from convoy.training.parallel import Method, ParallelNetwork, TrainedNetwork
from convoy.training.set_up import parts_of
from convoy.training.workloads import workload_of_recipe
from ranks import run_ranks
from tiny import TinyDepth

SIZE, COUNTS = 2, (4, 1)


def _network(normed: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6)
    layers = [nn.Conv2d(3, 6, 3), *([norm, nn.ReLU(), norm] if normed else []), nn.Flatten(), nn.Linear(24, 5)]
    return nn.Sequential(*layers).double()


def _images() -> Tensor:
    return torch.randn(10, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


Result = dict[str, Tensor]
"""Gradients of the second of two updates, and buffers after it, by their names."""


def _serial(normed: bool = False) -> Result:
    model = _network(normed)
    context = prepare(model, 0, "microbatch")
    for update in range(2):
        model.zero_grad()
        for start in range(0, len(_images()), SIZE):
            context.enter(update, start, (SIZE,), torch.device("cpu"))
            model(_images()[start : start + SIZE]).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | dict(model.named_buffers())


def _update(plan: str, normed: bool = False, late: bool = False, forget: bool = False) -> tuple[Result, list[int], int]:
    """Two updates of four passes: the result, and of the second the passes that ran and the exchanges."""
    model = _network(normed)
    example = torch.zeros(SIZE, 3, 4, 4, dtype=torch.float64)
    network = ParallelNetwork(model, Plan.parse(plan), example, batch_norm="microbatch", seed=0, method=Method())
    exchanges: list[int] = []
    finish = GradientReducer._finish

    def counted(self: GradientReducer) -> None:
        exchanges.append(1)
        finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientReducer, "_finish", counted)
        if forget:
            patch.setattr(RunningStatistics, "record_left_out", lambda self, starts, owners: None)
        for update in range(2):
            exchanges.clear()
            model.zero_grad()
            ran = _passes(network, update, late)
    state = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | dict(model.named_buffers())
    result = {name: network.whole(name, tensor) for name, tensor in state.items()}
    return result, ran, len(exchanges)


def _passes(network: ParallelNetwork, update: int, late: bool) -> list[int]:
    division = Division((SIZE,) * sum(COUNTS), COUNTS if network.engine.num_sample_ranks == 2 else (sum(COUNTS),))
    passes = division.passes(1, late)
    network.divide(division, len(passes))
    ran = []
    for number, piece in enumerate(passes):
        part, last = piece.parts[network.engine.sample_rank], number == len(passes) - 1
        if not len(part) and not last and network.leaves_out(update, piece):
            continue
        ran.append(number)
        network.enter(update, piece)
        network.backward(network.forward(_images()[list(part)]).square().sum(), last)
    network.finish_update()
    return ran


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("late", "few"), [(False, [0, 3]), (True, [3])])
def test_a_rank_without_samples_leaves_the_pass_out(normed: bool, late: bool, few: list[int]) -> None:
    results = run_ranks(_update, 2, "sample=2", normed, late)
    for rank, (result, ran, exchanges) in enumerate(results):
        assert ran == ([0, 1, 2, 3], few)[rank]
        assert exchanges == 1
        torch.testing.assert_close(result, _serial(normed), rtol=1e-12, atol=1e-12)
    for name, tensor in results[0][0].items():
        assert torch.equal(tensor, results[1][0][name]), name


def test_running_statistics_need_the_passes_that_are_left_out() -> None:
    with pytest.raises(AssertionError):
        for result, *_ in run_ranks(_update, 2, "sample=2", True, True, True):
            torch.testing.assert_close(result, _serial(True), rtol=1e-12, atol=1e-12)


def test_where_others_need_it_the_pass_runs() -> None:
    for _, ran, exchanges in run_ranks(_update, 2, "owt=2"):
        assert ran == [0, 1, 2, 3]
        assert exchanges == 1


def _on_one_device(again: bool) -> tuple[Result, int]:
    """Two updates of a network that calls a batch norm layer twice: the result, and the microbatches in a pass."""
    recipe = load_recipe("default", ["model.name=twice", "data.path=nowhere", "batch=10", f"microbatch={SIZE}"])
    model, sizes, cpu = _network(True), (SIZE,) * sum(COUNTS), torch.device("cpu")
    found = probed(copy.deepcopy(model).float(), recipe, (3, 4, 4), sizes, cpu, "nothing")
    assert found.normed_again
    merge, _ = merged(recipe, replace(found, normed_again=again), sizes, cpu, alone=True)
    network = TrainedNetwork(model, prepare(model, 0, "microbatch"), cpu, model, tree=False)
    for update in range(2):
        model.zero_grad()
        for piece in Division(sizes, (len(sizes),)).passes(merge):
            network.enter(update, piece)
            network.backward(network.forward(_images()[list(piece.parts[0])]).square().sum(), last=False)
        network.finish_update()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | dict(model.named_buffers()), merge


def test_a_layer_that_is_called_twice_notes_one_microbatch_after_the_other_on_any_number_of_devices() -> None:
    result, merge = _on_one_device(True)
    assert merge == 1
    torch.testing.assert_close(result, _serial(True), rtol=1e-12, atol=1e-12)
    for several, *_ in run_ranks(_update, 2, "sample=2", True):
        torch.testing.assert_close(result, several, rtol=1e-12, atol=1e-12)


def test_all_microbatches_of_one_call_before_those_of_the_next_would_be_noticed() -> None:
    result, merge = _on_one_device(False)
    assert merge == sum(COUNTS)
    wrong = {name for name, tensor in _serial(True).items() if not torch.allclose(result[name], tensor, rtol=1e-6)}
    assert wrong and all("running" in name for name in wrong)


def test_stochastic_depth_runs_a_batch_of_256_in_one_pass() -> None:
    sizes, cpu = (32,) * 8, torch.device("cpu")

    def passes(*settings: str) -> int:
        recipe = load_recipe("default", ["model.name=depth", "data.path=nowhere", "batch=256", *settings])
        found = probed(TinyDepth(), recipe, (1, 28, 28), sizes, cpu, "nothing")
        assert found.draws
        merge, _ = merged(recipe, found, sizes, cpu, alone=True)
        return len(Division(sizes, (8,)).passes(merge))

    assert passes() == 1
    assert passes("reproducible=true") == 8


@pytest.mark.parametrize("times", [(1.0, 1.0, 2.0), (1.0, 3.3), (2.0, 1.0, 1.5, 5.0)])
def test_the_parts_that_end_soonest(times: tuple[float, ...]) -> None:
    for total in range(len(times), 24):
        counts = soonest(total, times)
        assert sum(counts) == total and min(counts) >= 1
        last = max(count * time for count, time in zip(counts, times, strict=True))
        assert last == min(_last(rest, times) for rest in _divisions(total, len(times)))


def _last(counts: tuple[int, ...], times: tuple[float, ...]) -> float:
    return max(count * time for count, time in zip(counts, times, strict=True))


def _divisions(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(1, total - parts + 2) for rest in _divisions(total - first, parts - 1)]


@pytest.mark.parametrize(("asked", "made"), [(8, 8), (4, 4), (3, 3), (2, 2), (1, 1), (6, 8), (16, 8)])
def test_passes_through_stages_are_as_many_as_are_asked_for(asked: int, made: int) -> None:
    """Three passes of eight microbatches have three, three and two; six cannot be made, and more are better."""
    sizes, cpu = (4,) * 8, torch.device("cpu")
    recipe = load_recipe("default", ["model.name=depth", "data.path=nowhere", "batch=32", "microbatch=4"])
    found = probed(TinyDepth(), recipe, (1, 28, 28), sizes, cpu, "nothing")
    merge, _ = merged(recipe, replace(found, draws=False), sizes, cpu, passes=asked)
    assert len(Division(sizes, (8,)).passes(merge)) == made


@pytest.mark.parametrize("plan", ["stage=2", "stage=4", "stage=2,sample=2"])
@pytest.mark.parametrize(
    "settings", [("batch=64",), ("batch=100",), ("batch=6",), *(("batch=64", f"microbatches={n}") for n in (2, 12, 20))]
)
def test_a_given_plan_is_predicted_in_the_passes_in_which_it_runs(plan: str, settings: tuple[str, ...]) -> None:
    recipe = load_recipe("default", ["model.name=lenet", "data.path=nowhere", *settings])
    cpu, given, shape = torch.device("cpu"), Plan.parse(plan), (1, 28, 28)
    model, devices = create("lenet"), given.mesh.num_devices
    found = probed(model, recipe, shape, microbatch_sizes(recipe.batch, num_microbatches(recipe)), cpu, "nothing")
    parts, useful = parts_of(recipe, given, devices)
    sizes, _ = divisible_sizes(recipe, model, parts, found, useful)
    merge, _ = merged(recipe, found, sizes, cpu, devices // parts, passes=PARTS_PER_STAGE * given.num_stages * parts)
    runs = len(divide(sizes, parts, None).passes(merge))
    workload = workload_of_recipe(recipe, model, shape, devices, cpu)
    assert passes_of(workload, given) == runs
