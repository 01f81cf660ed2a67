"""Each rank gets its own samples, evaluation counts every sample once, and one rank speaks."""

import copy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import convoy
from convoy.data import Order
from convoy.errors import ConvoyError
from convoy.script import ranks as script_ranks
from convoy.script.data import BatchSampler, evaluate
from ranks import RankFailed, run_ranks
from small_nets import Dense


def tiny(plan: str) -> nn.Module:
    return convoy.parallelize(nn.Sequential(nn.Flatten(), nn.Linear(4, 6)), plan, torch.zeros(2, 4))


def drawn(plan: str, epochs: list[tuple[int, ...]], options: dict[str, Any]) -> list[list[list[int]]]:
    """A sampler's batches in some epochs."""
    sampler = BatchSampler(tiny(plan), **options)
    found = []
    for epoch in epochs:
        sampler.set_epoch(*epoch)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1]) + sum(epoch[1:])
    return found


def whole(parts: list[list[list[int]]]) -> list[list[int]]:
    """The global batches of one epoch: the ranks' parts one after another."""
    return [list(chain(*each)) for each in zip(*parts, strict=True)]


SHUFFLED = {"num_samples": 22, "global_batch": 6, "shuffle": True, "seed": 3}


def test_ranks_divide_the_batches_of_one_device_and_of_the_trainer() -> None:
    epochs = [(0,), (1,), (1, 2), (1, 3)]
    alone = drawn("serial", epochs, SHUFFLED)
    order = Order(22, 6, seed=3)
    assert alone[0] + alone[1] == [order.update(k)[1].tolist() for k in range(6)]
    assert alone[2:] == [alone[1][2:], []]
    for options, sizes in ((SHUFFLED, [3, 3]), (SHUFFLED | {"shares": (3, 1)}, [5, 1])):
        ranks = run_ranks(drawn, 2, "sample=2", epochs, options)
        assert [whole([found[i] for found in ranks]) for i in range(len(epochs))] == alone
        assert [[len(part) for part in found[0]] for found in ranks] == [[size] * 3 for size in sizes]


def test_ranks_that_share_samples_get_the_same_ones() -> None:
    first, second = run_ranks(drawn, 2, "filter=2", [(0,)], SHUFFLED)
    assert first == second == drawn("serial", [(0,)], SHUFFLED)
    ranks = run_ranks(drawn, 4, "sample=2,filter=2", [(0,)], SHUFFLED)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert [whole([ranks[0][0], ranks[2][0]])] == first


def drawn_once(cases: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [drawn("sample=2", [(0,)], options)[0] for options in cases]


def test_every_sample_comes_once_and_no_part_is_empty() -> None:
    sizes = [(22, 6), (24, 6), (13, 4), (3, 2), (2, 100), (7, 2), (5, 3)]
    more: list[dict[str, Any]] = [{}, {"shares": (5, 1)}, {"shuffle": True, "drop_last": False}]
    cases = [{"num_samples": num, "global_batch": batch} | options for num, batch in sizes for options in more]
    for options, *parts in zip(cases, *run_ranks(drawn_once, 2, cases), strict=True):
        num, batch = options["num_samples"], options["global_batch"]
        batches = whole(parts)
        samples = list(chain(*batches))
        assert (sorted(samples) if "shuffle" in options else samples) == list(range(num))
        assert all(part for each in parts for part in each)
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        assert max(map(len, batches)) <= max(batch, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_samples": 1, "global_batch": 8}, "num_samples=1 cannot be divided over 2 ranks .* at least 2"),
        ({"num_samples": 9, "global_batch": 1}, "global_batch=1 cannot be divided over 2 ranks"),
        ({"num_samples": 9, "global_batch": 0}, "global_batch=0 must be a whole number of at least 1"),
        ({"num_samples": 9, "global_batch": 4.0}, "global_batch=4.0 must be a whole number"),
        ({"num_samples": 9, "global_batch": 4, "shares": (1, 1, 1)}, r"shares=\(1, 1, 1\) must be 2 positive numbers"),
        ({"num_samples": 9, "global_batch": 4, "shares": (1, 0)}, "must be 2 positive numbers"),
        ({"num_samples": 9, "global_batch": 10, "shuffle": True}, "global_batch=10 is larger than the data set"),
    ],
)
def test_impossible_samplers_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RankFailed, match=f"ConvoyError: BatchSampler: .*{says}"):
        run_ranks(drawn, 2, "sample=2", [(0,)], options)


def differing(name: str) -> None:
    options = {"num_samples": 20, "global_batch": 4, "seed": 0}
    BatchSampler(tiny("sample=2"), **(options | {name: options[name] + dist.get_rank()}))


def test_samplers_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"has 2[01] samples where this one has 2[01]: make it alike on all ranks"):
        run_ranks(differing, 2, "num_samples")
    with pytest.raises(RankFailed, match="another global_batch, shuffle, seed, drop_last or shares"):
        run_ranks(differing, 2, "seed")


def test_epochs_that_do_not_exist_are_refused() -> None:
    sampler = BatchSampler(tiny("serial"), 20, 4)
    for wrong in ((-1,), (0, 6), (0, -1)):
        with pytest.raises(ConvoyError, match="epochs count from 0, and each has 5 batches to start from"):
            sampler.set_epoch(*wrong)


def digits(samples: int = 13) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, 8, 8, dtype=torch.float64, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (samples,), generator=generator))


def measures(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(outputs, labels, reduction="none")
    return {"loss": loss, "right": outputs.argmax(1) == labels, "class": labels}


def trained_a_little(net: nn.Module, mine: slice) -> nn.Module:
    """With running statistics that are not the first ones, and one layer frozen in evaluation mode."""
    images, _ = digits()[:]
    net(images[mine])
    net.norm.eval()
    return net


def evaluated(plan: str, batch: int, shares: tuple[int, ...] | None) -> tuple[dict[str, float], float, list[bool]]:
    """What Convoy finds, and its largest difference from the plain network."""
    torch.manual_seed(0)
    serial = Dense().double()
    example = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    net = convoy.parallelize(copy.deepcopy(serial), plan, example)
    trained_a_little(serial, slice(None))
    trained_a_little(net, convoy.local_samples(net, 13))
    loader = DataLoader(digits(), batch_sampler=BatchSampler(net, 13, batch, shares=shares))
    found = evaluate(net, loader, measures)
    assert evaluate(net, loader, lambda outputs, labels: outputs.argmax(1) == labels) == found["right"]
    images, labels = digits()[:]
    modes = [(a.training, b.training) for a, b in zip(serial.modules(), net.modules(), strict=True)]
    with torch.no_grad():
        want = {name: x.double().mean().item() for name, x in measures(serial.eval()(images), labels).items()}
    assert found.keys() == want.keys()
    return found, max(abs(found[name] - want[name]) for name in want), [a == b for a, b in modes]


@pytest.mark.slow
@pytest.mark.parametrize("shares", [None, (3, 1)])
@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "sample=2,filter=2"])
def test_evaluation_is_that_of_one_device(plan: str, shares: tuple[int, ...] | None) -> None:
    if shares is None or plan.startswith("sample"):
        ranks = run_ranks(evaluated, 4 if "," in plan else 2, plan, 4, shares)
        assert all(found == ranks[0][0] and error < 1e-12 and all(modes) for found, error, modes in ranks)


def test_evaluation_on_one_device() -> None:
    _, error, modes = evaluated("serial", 4, None)
    assert error < 1e-12
    assert all(modes)


def wrongly(case: str) -> None:
    net = tiny("sample=2")
    pairs = TensorDataset(torch.zeros(9, 4), torch.zeros(9, dtype=torch.int64))
    loaders = {
        "uneven": DataLoader(pairs, batch_size=3 + 6 * dist.get_rank()),
        "repeats": DataLoader(pairs, sampler=DistributedSampler(pairs), batch_size=2),
        "leaves out": DataLoader(pairs, batch_sampler=BatchSampler(net, 9, 4, drop_last=True)),
        "nothing": [],
    }
    evaluate(net, loaders[case], lambda outputs, labels: outputs.argmax(1) == labels)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("uneven", "rank 1 has no more batches where rank 0 has one"),
        ("repeats", "DistributedSampler repeats samples"),
        ("leaves out", "leaves out 1 of the 9 samples"),
        ("nothing", "the loader gave no batch"),
    ],
)
def test_loaders_that_would_count_wrongly_are_refused(case: str, says: str) -> None:
    with pytest.raises(RankFailed, match=f"ConvoyError: evaluate: .*{says}"):
        run_ranks(wrongly, 2, case)


def test_measurements_that_are_not_one_for_each_sample_are_refused() -> None:
    net = tiny("serial")
    loader = [(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))]
    with pytest.raises(
        ConvoyError, match=r"each of the 3 samples of the batch, shape \[3\], but it returned shape \[\]"
    ):
        evaluate(net, loader, F.cross_entropy)
    with pytest.raises(ConvoyError, match="returned float"):
        evaluate(net, loader, lambda outputs, labels: 1.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConvoyError, match="pairs \\(inputs, targets\\)"):
        evaluate(net, [torch.zeros(3, 4)], F.cross_entropy)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(first * second)


def test_networks_of_several_inputs() -> None:
    net = convoy.parallelize(TwoInputs(), "serial", (torch.zeros(2, 4), torch.zeros(2, 4)))
    x = torch.arange(20.0).view(5, 4)
    dataset = [((x[i], x[i] + 1), i) for i in range(5)]
    loader = DataLoader(dataset, batch_sampler=BatchSampler(net, 5, 2))
    found = evaluate(net, loader, lambda outputs, numbers: outputs.sum(1) + numbers)
    with torch.no_grad():
        assert found == pytest.approx((net(x, x + 1).sum(1) + torch.arange(5)).mean().item())


def speaking(path: Path, joined: bool) -> tuple[int, int]:
    if joined:
        tiny("sample=2")
    with (path / f"{script_ranks.rank()}").open("w") as file:
        script_ranks.print("loss", 0.5, sep="=", file=file)
    return script_ranks.rank(), script_ranks.num_ranks()


@pytest.mark.parametrize("joined", [True, False])
def test_one_rank_speaks(tmp_path: Path, joined: bool) -> None:
    assert run_ranks(speaking, 2, tmp_path, joined, join=joined) == [(0, 2), (1, 2)]
    assert [(tmp_path / name).read_text() for name in "01"] == ["loss=0.5\n", ""]
