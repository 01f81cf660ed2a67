"""All ranks choose one backend: NCCL wherever their GPUs differ, whatever each of them sees."""

import os
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from convoy.comm import backend
from convoy.comm.backend import GLOO, NCCL, RankDevice
from convoy.comm.joining import choose_interface, generation_store, open_store
from convoy.errors import MeetingError
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


def seen(text: str) -> RankDevice:
    return RankDevice(text[0], "" if text[1:] == "-" else f"GPU-{text[1:]}")


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


REFUSED = """NCCL error in: ProcessGroupNCCL.cpp:2690, unhandled system error, NCCL version 2.27.3
ncclSystemError: System call or external library call failed
Last error:
socketStartConnect: Connect to 10.0.0.2<4321> failed : No route to host"""


def test_gpus_that_cannot_be_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(one: torch.Tensor, group: object) -> None:
        raise dist.DistBackendError(REFUSED)

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 4])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth0")
    cpu, group = torch.device("cpu"), mock.Mock()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", refuse)
        with pytest.raises(MeetingError) as caught:
            backend.warm_up(group, cpu)
    said = str(caught.value)
    assert said.startswith("NCCL cannot connect the GPUs of ranks 0, 4 (NCCL error in: ")
    assert "No route to host" in said and "NCCL_SOCKET_IFNAME (is =eth0)" in said
    assert "NCCL_P2P_DISABLE=1" in said and "driver" in said and "\n" not in said
    lacks = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."))
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", lacks)
        with pytest.raises(torch.OutOfMemoryError):  # no matter of NCCL's
            backend.warm_up(group, cpu)
    monkeypatch.setattr(dist, "all_reduce", lambda one, group: one.mul_(2))
    backend.warm_up(group, cpu)
    monkeypatch.setattr(dist, "all_reduce", lambda one, group: one)
    with pytest.raises(MeetingError, match="a sum of 2 ones is 1"):
        backend.warm_up(group, cpu)


def test_nccl_talks_where_gloo_does() -> None:
    """And exactly there: without the sign NCCL takes every interface whose name begins so."""
    local = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
    found = dict(local)
    choose_interface(2, found)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    chosen = local | {"NCCL_SOCKET_IFNAME": "eth1"}
    choose_interface(2, chosen)
    assert (chosen["GLOO_SOCKET_IFNAME"], chosen["NCCL_SOCKET_IFNAME"]) == ("lo", "eth1")


@pytest.mark.parametrize("chosen", [{}, {"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}])
def test_collectives_are_recorded_unless_the_user_says_otherwise(chosen: dict[str, str]) -> None:
    found = dict(chosen)
    backend.record_collectives(found)
    assert found == (chosen or {"TORCH_FR_BUFFER_SIZE": "2000"})
