"""Links of GPUs: collectives between two events, and what their kernels take from others, on a simulated GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convoy.comm import collectives
from convoy.planner import link_probe
from convoy.planner.link_probe import _Probe
from gpu_clock import FakeGpu

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    found = FakeGpu()
    found.install(monkeypatch)
    return found


@pytest.mark.parametrize("device", [2e-6, 300e-6])
def test_a_collective_of_gpus_takes_its_part_of_twenty_between_two_events(gpu: FakeGpu, device: float) -> None:
    probe = _Probe(None, None, CPU, gpu.clock)
    ran: list[int] = []

    def collective(x: torch.Tensor) -> None:
        ran.append(x.numel())
        gpu.launch(30e-6, device)

    assert probe._time(collective, 8) == pytest.approx(device)
    assert probe._issuing == [pytest.approx(30e-6)]
    assert set(ran) == {8} and len(ran) % 40 == 0


def test_the_wait_for_the_last_gpu_is_no_part_of_a_collective(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has begun before this one, and waited for it."""
    monkeypatch.setattr(
        link_probe, "gather_ints", lambda numbers, group: [list(numbers), [number + 10**6 for number in numbers]]
    )
    assert _Probe(None, None, CPU, gpu.clock)._time(lambda x: gpu.launch(30e-6, 2e-6), 8) == pytest.approx(2e-6)


def test_a_collective_of_cpus_is_done_once_by_the_hosts_clock() -> None:
    probe = _Probe(None, None, CPU)
    ran: list[int] = []
    assert 0 < probe._time(lambda x: ran.append(1), 8) < 1e-3
    assert 3 <= len(ran) <= 12 and probe._issuing == [0.0]


@pytest.mark.parametrize(("beside", "found"), [(1.25, 1.25), (1.0, 1.0), (0.98, 1.0)])
def test_kernels_are_slower_beside_messages(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, beside: float, found: float
) -> None:
    """By as much as they are while messages are on their way, which is for longer than the kernels take."""
    message_s, kernel_s = 4e-3, 1e-3
    until = [0.0]

    def start(x: torch.Tensor, group: object) -> Any:
        until[0] = max(until[0], gpu.host) + message_s
        return SimpleNamespace(wait=lambda: None)

    def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        gpu.launch(1e-6, kernel_s * (beside if max(gpu.free, gpu.host) < until[0] else 1.0))

    monkeypatch.setattr(collectives, "start_all_reduce", start)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(link_probe, "_SIDE", 4)
    assert _Probe(None, None, CPU, gpu.clock)._slowdown(message_s, 64) == pytest.approx(found, rel=1e-3)
    assert until[0] > gpu.free


def test_all_ranks_send_as_many_messages_beside_their_kernels(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though one is slower, and would send more: otherwise the others would wait for ever."""
    sent: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda left, right, out: gpu.launch(1e-6, 1e-3))
    monkeypatch.setattr(link_probe, "_SIDE", 4)
    monkeypatch.setattr(link_probe, "gather_ints", lambda numbers, group: [list(numbers), [99 for _ in numbers]])
    monkeypatch.setattr(
        collectives, "start_all_reduce", lambda x, group: (sent.append(1), SimpleNamespace(wait=lambda: None))[1]
    )
    _Probe(None, None, CPU, gpu.clock)._slowdown(4e-3, 64)
    assert len(sent) == 99
