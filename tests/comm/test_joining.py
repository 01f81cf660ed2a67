"""How ranks meet: torchrun's variables, one backend that all choose, groups over axes, and proof of who they are."""

import copy
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from convoy.comm import backend
from convoy.comm.backend import GLOO, NCCL, RankDevice
from convoy.comm.groups import Groups
from convoy.comm.joining import choose_interface, generation_store, join, leave, open_store
from convoy.errors import ConvoyError, MachineError, MeetingError
from convoy.plans.mesh import Mesh
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


def test_ranks_choose_one_backend_and_nccl_where_their_gpus_differ() -> None:
    for layout, (text, name, note) in LAYOUTS.items():
        ranks = text.split()
        chosen = backend.choose([seen(rank) for rank in ranks])
        assert chosen.backend == name and ((note in chosen.note) if note else not chosen.note), layout
        if len(ranks) in (2, 4):
            assert run_ranks(agree, len(ranks), ranks, join=False) == [name] * len(ranks), layout
    ranks = LAYOUTS["one host shares, one does not"][0].split()
    assert len(set(run_ranks(agree, 4, ranks, True, join=False))) == 2, "each by itself would choose another one"


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


def test_collectives_are_recorded_unless_the_user_says_otherwise() -> None:
    for chosen in ({}, {"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}):
        found = dict(chosen)
        backend.record_collectives(found)
        assert found == (chosen or {"TORCH_FR_BUFFER_SIZE": "2000"})


MESH = Mesh(("a", "b", "c"), (2, 1, 2))


def _groups():
    groups = Groups(MESH)
    found = {}
    for axes in [(2,), (0,), (0, 1), (1,), (), (0, 1, 2)]:
        group = groups.of(axes)
        found[axes] = None if group is None else dist.get_process_group_ranks(group)
    assert groups.of((0,)) is groups.of((0, 1)) and groups.of((0, 2)) is dist.group.WORLD
    assert copy.deepcopy({"here": groups})["here"] is groups
    return groups.coordinates, found


def test_groups_over_every_subset_of_axes():
    for rank, (coordinates, found) in enumerate(run_ranks(_groups, 4)):
        a, c = divmod(rank, 2)
        assert coordinates == (a, 0, c)
        assert found == {
            (2,): [2 * a, 2 * a + 1],
            (0,): [c, 2 + c],
            (0, 1): [c, 2 + c],
            (1,): None,
            (): None,
            (0, 1, 2): [0, 1, 2, 3],
        }


def _join():
    first = join(timeout=30)
    assert dist.is_initialized() and dist.get_backend() == "gloo"
    assert join() == first
    x = torch.ones(1)
    dist.all_reduce(x)
    leave()
    leave()
    assert not dist.is_initialized()
    return first.type, x.item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the processes would take the devices")
def test_join_follows_the_variables_of_torchrun():
    assert run_ranks(_join, 2, join=False) == [("cpu", 2.0)] * 2


def _join_with_gpus(num_gpus, asked=None):
    current = []
    backend.gpus.cache_clear()
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.device_count", lambda: num_gpus),
        mock.patch("torch.cuda.set_device", current.append),
        mock.patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}")),
    ):
        device = join(timeout=30, device=asked)
    return str(device), [str(device) for device in current], dist.get_backend_config()


def test_ranks_that_share_a_gpu_speak_over_gloo():
    for device, current, backends in run_ranks(_join_with_gpus, 2, 1, join=False):
        assert device == "cuda:0" and current == ["cuda:0"]
        assert "cuda:gloo" in backends and "nccl" not in backends


def test_ranks_that_are_to_compute_on_the_cpu_leave_gpus_alone(capfd):
    for device, current, backends in run_ranks(_join_with_gpus, 2, 1, "cpu", join=False):
        assert device == "cpu" and current == [] and "nccl" not in backends
    assert "share a GPU" not in capfd.readouterr().err


def test_without_variables_there_is_one_device_and_a_mesh_of_another_size_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    join()
    assert not dist.is_initialized()
    groups = Groups(Mesh(("sample",), (1,)))
    assert groups.of((0,)) is None and groups.coordinates == (0,)
    assert Groups(MESH, rank=3).coordinates == (1, 0, 1)
    with pytest.raises(ConvoyError, match=r"mesh sample=4 is for 4 devices, but 1 ranks run"):
        Groups(Mesh(("sample",), (4,)))


HERE = {"WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, r"^RANK set but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT: start the ranks with torchrun"),
        (HERE, "but not RANK:"),
        ({"RANK": "x", **HERE}, "RANK='x' must be a whole"),
        ({"RANK": "2", **HERE}, "RANK=2 must be below WORLD_SIZE"),
    ],
)
def test_wrong_variables_are_refused(monkeypatch, variables, message):
    for name in [*os.environ]:
        if name in ("RANK", *HERE) or name.startswith("TORCHELASTIC"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConvoyError, match=message):
        join(timeout=1)


def variables_of(monkeypatch, rank, port):
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        monkeypatch.delenv(name)
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**place, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_ranks_that_are_not_there_may_come_later(monkeypatch):
    variables_of(monkeypatch, 1, 9)
    with pytest.raises(MeetingError, match=r"Rank 1 cannot join .*:9 "):
        join(timeout=1)


def test_a_port_that_is_taken_may_be_free_later(monkeypatch):
    """Such as by ranks before these, which are about to end: not a mistake that another try would not mend."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        variables_of(monkeypatch, 0, taken.getsockname()[1])
        with pytest.raises(MeetingError, match="set MASTER_PORT to a free port"):
            join(timeout=1)


def test_a_gpu_that_is_full_already_is_no_matter_of_the_network(monkeypatch):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    variables_of(monkeypatch, 0, 9)
    monkeypatch.setattr("convoy.comm.joining.open_store", mock.Mock(side_effect=full))
    with pytest.raises(MachineError, match=r"^rank 0 ran out of memory when it joined .* asked for 20\.00 MiB: see"):
        join(timeout=1)


RANK = """
from convoy.comm.groups import Groups, temporary
from convoy.comm import backend
from convoy.comm.joining import join, leave
from convoy.plans.mesh import Mesh
join(timeout=30)
Groups(Mesh(("sample", "filter"), (1, 2))).of((1,))
with temporary():
    Groups(Mesh(("sample",), (2,))).of((0,))
leave()
assert not backend._key  # whoever meets next may know another one, or none
print("joined")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("secrets", "is_alike"), [(("a", "a"), True), (("a", "b"), False), (("a", ""), False)])
def test_who_does_not_know_the_secret_is_no_rank(secrets: tuple[str, str], is_alike: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ | shared | {"RANK": str(rank), "CONVOY_SECRET": secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, secret in enumerate(secrets)
    ]
    ended = [rank.communicate(timeout=60) for rank in ranks]
    assert [said for said, _ in ended] == ["joined\n" if is_alike else ""] * 2, ended
    assert any("in the place of a rank" in errors for _, errors in ended) != is_alike


ANEW = """
import os, sys
import torch, torch.distributed as dist
from convoy.comm import backend
from convoy.errors import MeetingError
rank, file = int(sys.argv[1]), sys.argv[2]
send, words = dist.all_to_all_single, []

def recorded(received, sent, group):
    words.append(sent.clone())
    send(received, sent, group=group)

for turn in "ab":
    dist.init_process_group("gloo", init_method=f"file://{file}-{turn}", rank=rank, world_size=2)
    backend.know(b"a key that somebody has written into the store again")
    if rank == 0 or turn == "a":
        dist.all_to_all_single = recorded
        try:
            backend.connect(dist.group.WORLD)
            print("a rank")
        except MeetingError:
            print("nobody")
    else:
        for sent in words:
            send(torch.empty_like(sent), sent)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_a_rank_has_once_said_proves_nothing(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", ANEW, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == [b"a rank\nnobody\n", b"a rank\n"]
