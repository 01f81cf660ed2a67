"""The rate of the link between two ranks, by a plain all-reduce of gloo."""

import statistics
import time

import torch
import torch.distributed as dist

REPEATS = 3


def bits_per_second(num_bytes: int) -> float:
    """What each of two ranks sends, and receives, in a second of an all-reduce of `num_bytes`.

    An all-reduce between two ranks sends as many bytes each way as it adds up.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    x = torch.ones(num_bytes // 4)
    dist.all_reduce(x[:1024])
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        seconds.append(time.perf_counter() - start)
    return 8 * num_bytes / statistics.median(seconds)
