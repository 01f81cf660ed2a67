"""Nobody asks CUDA in the middle of a collective."""

import pytest
import torch
import torch.distributed as dist

from convoy.comm import collectives


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
