"""The memory that a plan may take: of a host, shared by its ranks."""

import pytest
import torch

from convoy.planner.cost.device import SHARE, device_memory


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.planner.cost.device.free_memory", lambda: 2**34)  # what is free changes all the time
    alone, _ = device_memory(torch.device("cpu"), 1)
    shared, source = device_memory(torch.device("cpu"), 4)
    assert shared == pytest.approx(alone / 4)
    assert alone > 0
    assert "over 4 devices" in source and f"{SHARE:.1f}" == "0.9" and "nine tenths" in source
