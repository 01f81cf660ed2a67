"""What a device was given, as a watchdog reads it while others add and forget."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from convoy.comm import collectives
from convoy.comm.position import Ledger, current


def test_a_group_may_end_while_its_state_is_read() -> None:
    given, asked, answer = Ledger(), threading.Event(), threading.Event()

    def slowly() -> bool:
        asked.set()
        answer.wait(10)
        return False

    current.to("start")  # wherever another test has left it
    given.add("group", lambda: [0, 1], "all reduce", slowly)
    found: list[dict] = []
    reader = threading.Thread(target=lambda: found.append(given.state()))
    reader.start()
    asked.wait(10)
    given.forget("group")
    answer.set()
    reader.join(10)
    assert found == [{"group": ([0, 1], 1, [(1, "all reduce", "")])}]
    assert given.state() == {}


def test_what_is_done_is_forgotten_and_little_is_shown() -> None:
    given, done = Ledger(), set[int]()

    def finished(number: int) -> Callable[[], bool]:
        return lambda: number in done

    for number in range(1, 41):
        given.add("group", lambda: [0], "exchange", finished(number))
    done |= {1, 2, 4}
    members, count, still = given.state()["group"]
    assert (members, count, [number for number, _, _ in still]) == ([0], 40, [3, *range(5, 20)])


class Nccl(dist._Work):
    """Work that forbids to be asked itself, with the result that NCCL's thread completes."""

    def __init__(self, result: torch.futures.Future) -> None:
        super().__init__()
        self.result_of_thread = result

    def get_future_result(self) -> torch.futures.Future:
        return self.result_of_thread

    def is_completed(self) -> bool:
        pytest.fail("CUDA was asked")


def test_nobody_asks_cuda_whether_a_collective_is_done() -> None:
    result: torch.futures.Future = torch.futures.Future()
    done = collectives._done(Nccl(result))
    assert not done()
    result.set_result(0)
    assert done()
