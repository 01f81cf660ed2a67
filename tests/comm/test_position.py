"""What a device was given, as a watchdog reads it while others add and forget."""

import threading

import pytest
import torch
import torch.distributed as dist

from convoy.comm import collectives
from convoy.comm.position import Ledger, current


def test_a_group_may_end_while_its_state_is_read() -> None:
    ledger, asked, answer = Ledger(), threading.Event(), threading.Event()

    def slowly() -> bool:
        asked.set()
        answer.wait(10)
        return False

    current.to("start")  # wherever another test has left it
    ledger.add("group", lambda: [0, 1], "all reduce", slowly)
    states: list[dict] = []
    reader = threading.Thread(target=lambda: states.append(ledger.state()))
    reader.start()
    asked.wait(10)
    ledger.forget("group")
    answer.set()
    reader.join(10)
    assert states == [{"group": ([0, 1], 1, [(1, "all reduce", "")])}]
    assert ledger.state() == {}


class Nccl(dist._Work):
    """Work that forbids to be asked itself, with the result that NCCL's thread completes."""

    def __init__(self, result: torch.futures.Future) -> None:
        super().__init__()
        self.get_future_result = lambda: result

    def is_completed(self) -> bool:
        pytest.fail("CUDA was asked")


def test_nobody_asks_cuda_whether_a_collective_is_done() -> None:
    result: torch.futures.Future = torch.futures.Future()
    done = collectives._done(Nccl(result))
    assert not done()
    result.set_result(0)
    assert done()
