"""Both directions of a link at once: gloo's all-to-all beside receives that are posted before the sends.

    python benchmarks/directions.py                                                       as root
    python benchmarks/directions.py --cluster benchmarks/clusters/two-1gbit.yaml --megabytes 20

Every rank of an emulated cluster sends its own part of a tensor to every other, by both ways in turn, the later half of
the ranks beginning some milliseconds after the others. Timed from when the last rank begins to when the last has all;
the median of the rounds counts, and the ratio is that of the all-to-all over receives first.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import machine, ranks
from torch import Tensor

from convoy.bench.emulated import Cluster, emulate
from convoy.comm.joining import join
from convoy.comm.point_to_point import start_all_to_all

LATE_MS = (0.0, 1.0, 10.0)
"""By how much the later ranks begin later."""


def measure(megabytes: float, rounds: int) -> list[tuple[float, float, float]]:
    """For each lateness: it in milliseconds, seconds by all-to-all, seconds by receives first. All ranks call it."""
    join()
    num, rank = dist.get_world_size(), dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    given = torch.ones(num, round(megabytes * 250_000))
    taken = torch.empty_like(given)

    def all_to_all() -> None:
        dist.all_to_all_single(taken, given)

    def receives_first() -> None:
        for work in start_all_to_all(list(given), list(taken), world):
            work.wait()

    ways = (all_to_all, receives_first)
    found = []
    for late_ms in LATE_MS:
        own_late = late_ms / 1e3 if rank >= num / 2 else 0.0
        seconds = [[_timed(way, own_late) for way in ways] for _ in range(rounds + 1)][1:]
        before, now = (statistics.median(row[which] for row in seconds) for which in (0, 1))
        found.append((late_ms, before, now))
    return found


def _timed(way: Callable[[], None], late: float) -> float:
    dist.barrier()
    until = time.monotonic() + late
    while time.monotonic() < until:
        pass
    times: Tensor = torch.tensor([time.monotonic(), 0.0], dtype=torch.float64)
    way()
    times[1] = time.monotonic()
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times[1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=Path("benchmarks/clusters/four-3gbit.yaml"))
    parser.add_argument("--megabytes", type=float, default=20.0, help="from each rank to each other")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ranks.prepare()
    cluster = Cluster.read(options.cluster)
    print(machine.sentence(machine.describe()) + f"\nEmulated: {cluster}; {options.megabytes:g} MB to each other rank.")
    with emulate(cluster) as places:
        rows = ranks.run_ranks(measure, len(places), options.megabytes, options.rounds, places=places)[0]
    print("| later ranks begin after | all-to-all | receives first | ratio |\n| --- | --- | --- | --- |")
    for late_ms, before, now in rows:
        print(f"| {late_ms:g} ms | {before * 1e3:.0f} ms | {now * 1e3:.0f} ms | {before / now:.2f} |")


if __name__ == "__main__":
    main()
