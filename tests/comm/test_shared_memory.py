"""Who shares memory, what happens when one of them ends, and that nothing is left behind."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from convoy.comm import collectives
from convoy.comm.shared_memory import SWITCH
from ranks import RankFailed, run_ranks

MISMATCHES = {
    "sizes": lambda rank, group: collectives.all_reduce(torch.ones(8 - 4 * rank), group),
    "types": lambda rank, group: collectives.all_reduce(torch.ones(8, dtype=(torch.float32, torch.int32)[rank]), group),
    "functions": lambda rank, group: (collectives.all_reduce, collectives.all_gather)[rank](torch.ones(8), group),
    "pieces": lambda rank, group: collectives.exchange([torch.ones(3), torch.ones(3)], [(4 + rank,)] * 2, group),
}


def _channel(group=None):
    x, group = torch.ones(3), group or dist.group.WORLD
    collectives.all_reduce(x, group)
    return collectives._channel(x, group)


def _together():
    """All ranks share memory or none; ranks that do different things are told; groups that are gone leave no open
    files; and a child that ends does not end its parent."""
    rank, first = dist.get_rank(), dist.get_rank() == 0
    for switches, share in (("11", True), ("00", False), ("10", False)):
        os.environ[SWITCH] = switches[rank]
        assert (_channel(dist.new_group()) is not None) == share
    os.environ[SWITCH] = "1"
    for mismatch in MISMATCHES.values():
        words = "exchange different things: all ranks must pass images of the same size"
        with pytest.raises(RuntimeError, match=words):
            mismatch(rank, dist.new_group())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        group = dist.new_group([0, 1])
        assert collectives.all_reduce(torch.ones(4), group).tolist() == [2.0] * 4
        dist.destroy_process_group(group)
        del group
    left = len(list(Path("/proc/self/fd").iterdir())) - before
    names = [entry.name for entry in Path("/dev/shm").iterdir()] if Path("/dev/shm").is_dir() else []
    assert left <= 12 and not any("convoy" in name for name in names)

    x = collectives.all_reduce(torch.ones(3), dist.group.WORLD)
    if first and os.fork() == 0:
        collectives._channels[dist.group.WORLD].close()
        os._exit(0)
    os.wait() if first else time.sleep(0.5)
    assert collectives.all_reduce(x, dist.group.WORLD).tolist() == [4.0] * 3


def test_all_ranks_share_memory_or_none_know_of_each_others_mistakes_and_leave_nothing():
    run_ranks(_together, 2)


def _one_dies(begin):
    _channel()
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        collectives.all_reduce(torch.ones(5), dist.group.WORLD)
    except RuntimeError as error:
        Path(begin).write_text(f"{error} {time.time()}")
        raise


def test_a_rank_that_dies_is_noticed_at_once(tmp_path):
    begin = time.time()
    with pytest.raises(RankFailed):
        run_ranks(_one_dies, 2, str(tmp_path / "said"))
    *sentence, when = (tmp_path / "said").read_text().split()
    assert " ".join(sentence) == "Connection closed by peer: rank 1 has ended"
    assert float(when) - begin < 10
