"""Each rank gets its own samples, evaluation counts every sample once, and one rank speaks."""

import copy
import os
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import convoy
from convoy.data.order import Order
from convoy.script.data import BatchSampler, evaluate
from ranks import run_ranks
from script.saved import refused
from small_nets import Dense


def tiny(plan: str) -> nn.Module:
    return convoy.parallelize(nn.Sequential(nn.Flatten(), nn.Linear(4, 6)), plan, torch.zeros(2, 4))


def drawn(plan: str, epochs: list[tuple[int, ...]], cases: list[dict[str, Any]]) -> list[list[list[list[int]]]]:
    """Samplers' batches in some epochs."""
    net, found = tiny(plan), []
    for options in cases:
        sampler, batches = BatchSampler(net, **options), []
        for epoch in epochs:
            sampler.set_epoch(*epoch)
            batches.append(list(sampler))
            assert len(sampler) == len(batches[-1]) + sum(epoch[1:])
        found.append(batches)
    return found


def whole(*parts: list[list[int]]) -> list[list[int]]:
    """The global batches of one epoch: the ranks' parts one after another."""
    return [list(chain(*each)) for each in zip(*parts, strict=True)]


SHUFFLED = {"num_samples": 22, "global_batch": 6, "shuffle": True, "seed": 3}


def test_ranks_divide_the_batches_of_one_device_and_of_the_trainer() -> None:
    epochs = [(0,), (1,), (1, 2), (1, 3)]
    (alone,) = drawn("serial", epochs, [SHUFFLED])
    order = Order(22, 6, seed=3)
    assert alone[0] + alone[1] == [order.update(k)[1].tolist() for k in range(6)]
    assert alone[2:] == [alone[1][2:], []]
    first, second = run_ranks(drawn, 2, "sample=2", epochs, [SHUFFLED, SHUFFLED | {"shares": (3, 1)}])
    for case, sizes in enumerate(([3, 3], [5, 1])):
        assert [whole(a, b) for a, b in zip(first[case], second[case], strict=True)] == alone
        assert [[len(part) for part in found[case][0]] for found in (first, second)] == [[size] * 3 for size in sizes]
    for (found,) in run_ranks(drawn, 2, "filter=2", epochs, [SHUFFLED]):
        assert found == alone  # ranks that share samples get the same ones


def test_every_sample_comes_once_and_no_part_is_empty() -> None:
    sizes = [(22, 6), (24, 6), (3, 2), (2, 100), (5, 3)]
    more: list[dict[str, Any]] = [{}, {"shares": (5, 1)}, {"shuffle": True, "drop_last": False}]
    cases = [{"num_samples": num, "global_batch": batch} | options for num, batch in sizes for options in more]
    for options, *parts in zip(cases, *run_ranks(drawn, 2, "sample=2", [(0,)], cases), strict=True):
        num, batch = options["num_samples"], options["global_batch"]
        batches = whole(*(part for (part,) in parts))
        samples = list(chain(*batches))
        assert (sorted(samples) if "shuffle" in options else samples) == list(range(num))
        assert all(part for (each,) in parts for part in each)
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        assert max(map(len, batches)) <= max(batch, 3)


def right(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.argmax(1) == labels


class ProgressBar:
    """Around a loader, as tqdm is."""

    def __init__(self, iterable: DataLoader) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


def refused_on_ranks() -> None:
    """What cannot be is refused on every rank."""
    net, rank = tiny("sample=2"), dist.get_rank()
    assert "another global_batch, shuffle, seed, " in refused(BatchSampler, net, 20, 4, seed=rank)
    pairs = TensorDataset(torch.zeros(9, 4), torch.zeros(9, dtype=torch.int64))
    uneven = DataLoader(pairs, batch_size=3 + 6 * rank)
    sampled = DataLoader(pairs, sampler=DistributedSampler(pairs), batch_size=2)
    dropping = DataLoader(pairs, batch_sampler=BatchSampler(net, 9, 4, drop_last=True))
    for shown in (lambda loader: loader, ProgressBar):
        assert "rank 1 has no more batches where rank 0 has one" in refused(evaluate, net, shown(uneven), right)
        assert "DistributedSampler repeats samples" in refused(evaluate, net, shown(sampled), right)
        assert "leaves out 1 of the 9 samples" in refused(evaluate, net, shown(dropping), right)


def test_samplers_and_loaders_that_would_count_wrongly_are_refused() -> None:
    run_ranks(refused_on_ranks, 2)
    net, loader = tiny("serial"), [(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))]
    assert "each of the 3 samples of the batch, shape [3], but it" in refused(evaluate, net, loader, F.cross_entropy)
    assert "pairs (inputs, targets)" in refused(evaluate, net, [torch.zeros(3, 4)], F.cross_entropy)


def digits(samples: int = 13) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, 8, 8, dtype=torch.float64, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (samples,), generator=generator))


def measures(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(outputs, labels, reduction="none")
    return {"loss": loss, "right": right(outputs, labels), "class": labels}


def evaluated(plan: str, shares: tuple[int, ...] | None) -> tuple[dict[str, float], float, list[bool]]:
    """What Convoy finds, its largest difference from the plain network, and whether layers are in its modes."""
    torch.manual_seed(0)
    serial = Dense().double()
    net = convoy.parallelize(copy.deepcopy(serial), plan, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    for each, mine in ((serial, slice(None)), (net, convoy.local_samples(net, 13))):
        each(digits()[:][0][mine])  # running statistics that are not the first ones, and a layer that is frozen
        each.norm.eval()
    loader = DataLoader(digits(), batch_sampler=BatchSampler(net, 13, 4, shares=shares))
    found = evaluate(net, loader, measures)
    assert evaluate(net, loader, right) == found["right"]
    images, labels = digits()[:]
    modes = [a.training == b.training for a, b in zip(serial.modules(), net.modules(), strict=True)]
    with torch.no_grad():
        want = {name: x.double().mean().item() for name, x in measures(serial.eval()(images), labels).items()}
    assert found.keys() == want.keys()
    return found, max(abs(found[name] - want[name]) for name in want), modes


@pytest.mark.parametrize(("plan", "shares"), [("sample=2", (3, 1)), ("filter=2", None)])
def test_evaluation_is_that_of_one_device(plan: str, shares: tuple[int, ...] | None) -> None:
    ranks = run_ranks(evaluated, 2, plan, shares)
    assert all(found == ranks[0][0] and error < 1e-12 and all(modes) for found, error, modes in ranks)


def as_a_task_of_slurms() -> list[tuple[int, int]]:
    """What a script that `srun` has started is told of its place, before its network is parallelized and after."""
    names = {"PROCID": "RANK", "LOCALID": "LOCAL_RANK", "NTASKS": "WORLD_SIZE", "STEP_NUM_TASKS": "LOCAL_WORLD_SIZE"}
    for name, of_torchrun in names.items():
        os.environ[f"SLURM_{name}"] = os.environ.pop(of_torchrun)
    os.environ |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost"}
    places = [(convoy.rank(), convoy.num_ranks())]
    tiny("sample=2")
    return [*places, (dist.get_rank(), dist.get_world_size())]


def test_tasks_of_slurms_are_ranks() -> None:
    assert run_ranks(as_a_task_of_slurms, 2, join=False) == [[(rank, 2)] * 2 for rank in range(2)]
