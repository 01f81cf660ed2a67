import copy
import os
import socket
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from convoy.comm import backend
from convoy.comm.groups import Groups
from convoy.comm.joining import join, leave
from convoy.errors import ConvoyError, MachineError, MeetingError
from convoy.plans.mesh import Mesh
from ranks import run_ranks

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


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_ranks_that_are_to_compute_on_the_cpu_leave_gpus_alone(num_gpus, capfd):
    for device, current, backends in run_ranks(_join_with_gpus, 2, num_gpus, "cpu", join=False):
        assert device == "cpu" and current == [] and "nccl" not in backends
    assert "share a GPU" not in capfd.readouterr().err


def _wrong_mesh():
    with pytest.raises(ConvoyError, match=r"mesh sample=4 is for 4 devices, but 2 ranks run"):
        Groups(Mesh(("sample",), (4,)))


def test_a_mesh_of_another_size_is_refused():
    run_ranks(_wrong_mesh, 2)


def test_without_variables_there_is_one_device(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    join()
    assert not dist.is_initialized()
    groups = Groups(Mesh(("sample",), (1,)))
    assert groups.of((0,)) is None and groups.coordinates == (0,)
    assert Groups(MESH, rank=3).coordinates == (1, 0, 1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, r"^RANK set but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT: start the ranks with torchrun"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, "but not RANK:"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, "RANK='x' must be a whole"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"},
            "RANK=2 must be below WORLD_SIZE",
        ),
    ],
)
def test_wrong_variables_are_refused(monkeypatch, variables, message):
    for name in [*os.environ]:
        if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") or name.startswith("TORCHELASTIC"):
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
