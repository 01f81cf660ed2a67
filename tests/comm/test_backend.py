"""All ranks choose one backend: NCCL wherever their GPUs differ, whatever each of them sees."""

import os
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from convoy.comm import backend
from convoy.comm.backend import GLOO, NCCL, Seen
from convoy.comm.groups import generation_store, open_store
from ranks import run_ranks

LIMIT = timedelta(seconds=30)
LAYOUTS = {
    "two GPUs of a host": ("a1 a2", NCCL, ""),
    "two hosts of one GPU": ("a1 b2", NCCL, ""),
    "two hosts of two": ("a1 a2 b3 b4", NCCL, ""),
    "hosts with unlike numbers of GPUs": ("a1 a2 a3 b4", NCCL, ""),
    "one rank": ("a1", NCCL, ""),
    "two ranks on one GPU": ("a1 a1", GLOO, "ranks 0, 1 share a GPU of host a"),
    "four ranks on two GPUs": ("a1 a2 a1 a2", GLOO, "ranks 0, 2 share"),
    "one host shares, one does not": ("a1 a2 b3 b3", GLOO, "ranks 2, 3 share a GPU of host b"),
    "one GPU that containers with other names share": ("a1 b1", GLOO, "ranks 0, 1 share"),
    "a host without": ("a1 b-", GLOO, "rank 1 on host b has no GPU"),
    "two without": ("a- b1 a-", GLOO, "ranks 0, 2 have no GPU"),
    "nobody has one": ("a- a- b-", GLOO, ""),
}


def seen(text: str) -> Seen:
    return Seen(text[0], "" if text[1:] == "-" else f"GPU-{text[1:]}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    ranks, name, note = LAYOUTS[layout]
    chosen = backend.choose([seen(rank) for rank in ranks.split()])
    assert chosen.backend == name
    assert (note in chosen.note) if note else not chosen.note


def agree(ranks: list[str], alone: bool = False) -> str:
    """The backend that this rank takes, by real messages; `alone`: by what it sees itself, as it was once."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if alone:
        return backend.choose([seen(other) for other in ranks if other[0] == ranks[rank][0]]).backend
    store = generation_store(open_store(rank, world, LIMIT), rank, world, LIMIT)
    found = backend.agreed(store, rank, world, seen(ranks[rank])).backend
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world:  # it keeps the store
        pass
    return found


@pytest.mark.parametrize("layout", [name for name, (ranks, _, _) in LAYOUTS.items() if len(ranks.split()) > 1])
def test_ranks_choose_alike(layout: str) -> None:
    ranks, name, _ = LAYOUTS[layout]
    assert run_ranks(agree, len(ranks.split()), ranks.split(), join=False) == [name] * len(ranks.split())


def test_each_by_itself_would_not() -> None:
    """The negative control."""
    ranks = LAYOUTS["one host shares, one does not"][0].split()
    assert len(set(run_ranks(agree, 4, ranks, True, join=False))) == 2


def test_one_visible_gpu_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Slurm's --gpus-per-task=1: every rank sees one GPU, number 0, and they differ."""
    found = []
    for number in range(2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(number))
        with mock.patch("torch.cuda.get_device_properties", lambda device, n=number: SimpleNamespace(uuid=f"GPU-{n}")):
            found.append(backend.own(torch.device("cuda", 0)))
    assert backend.choose(found).backend == NCCL
    with mock.patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace()):  # an older torch
        assert backend.own(torch.device("cuda", 0)).gpu.endswith("/1/0")
