"""What ranks tell each other: objects and named tensors of any kind."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from convoy.comm.groups import everyone
from convoy.comm.joining import num_ranks
from convoy.comm.ranks import Ranks, broadcast_object, broadcast_tensors, gather_objects, received
from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh
from convoy.training.environment import join_ranks
from ranks import RankFailed, run_ranks

THINGS: list[Any] = [None, 3, "läuft", {"a": (1, 2.5), "b": [None]}, "x" * 100_000, torch.arange(5)]
TENSORS = {
    "weight": torch.randn(3, 4),
    "steps": torch.tensor(7),
    "none": torch.empty(0, 2),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "turned": torch.randn(4, 3).t(),
    "mask": torch.tensor([True, False]),
}


def told() -> tuple[list[Any], dict[str, torch.Tensor], list[Any]]:
    group, rank = everyone(), dist.get_rank()
    objects = [broadcast_object(thing if rank == 0 else "nothing", group) for thing in THINGS]
    tensors = broadcast_tensors(TENSORS if rank == 0 else None, group)
    tensors = {name: received(tensor) for name, tensor in tensors.items()}
    return objects, tensors, gather_objects({"rank": rank, "words": "a" * 1000 * rank}, group)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_objects_and_tensors(world: int) -> None:
    for objects, tensors, gathered in run_ranks(told, world):
        assert str(objects) == str(THINGS)
        assert list(tensors) == list(TENSORS)
        for name, tensor in tensors.items():
            assert tensor.dtype == TENSORS[name].dtype
            if name != "weight" and name != "turned":  # random: of rank 0's own
                assert torch.equal(tensor, TENSORS[name])
        assert gathered == [{"rank": rank, "words": "a" * 1000 * rank} for rank in range(world)]


def test_without_a_process_group_there_is_one_rank() -> None:
    assert everyone() is None
    assert num_ranks() == 1
    assert broadcast_object("a", None) == "a"
    assert gather_objects("a", None) == ["a"]
    assert broadcast_tensors(TENSORS, None) is TENSORS


def as_the_trainer_does() -> Any:
    ranks, device = join_ranks()
    assert device == torch.device("cpu")
    assert (ranks.rank, ranks.num) == (dist.get_rank(), 3)
    ranks.follow(Mesh(("sample",), (3,)), (0,))
    assert ranks.is_group_leader
    assert ranks.largest(ranks.rank, -ranks.rank, 5) == (2, 0, 5)
    assert ranks.gather_samples(ranks.rank) == [0, 1, 2]
    assert ranks.first(lambda: dist.get_rank()) == 0
    ranks.barrier()
    return ranks.broadcast(ranks.rank)


def test_devices() -> None:
    assert run_ranks(as_the_trainer_does, 3) == [0, 0, 0]
    alone = Ranks()
    assert alone.largest(3, 4) == (3, 4)
    alone.barrier()


def mistaken() -> None:
    ranks, _ = join_ranks()

    def work() -> None:
        raise ConvoyError("the file is not there")

    ranks.first(work)


def test_a_mistake_of_rank_0_is_everybodys() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(mistaken, 2)
    assert str(caught.value).count("ConvoyError: the file is not there") == 2
