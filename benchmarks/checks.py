"""What the checks of `convoy.parallelize` take in a loop of one's own: share of the time, and updates with and without.

    python benchmarks/checks.py
    python benchmarks/checks.py --seconds 60 --networks alexnet

Two ranks of one core each train the same network twice in turn, with `checks` and without; the time in the comparisons
is counted by itself, as their aim, 0.2 % of the time, is below what two runs differ by.
"""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from measuring import harness
from measuring.ranks import run_ranks
from torch import Tensor

import convoy
from convoy import models
from convoy.comm.joining import join
from convoy.engine.network import network_of

CASES = {"lenet": ("sample=2", 64, (1, 28)), "resnet18": ("sample=2", 32, (3, 64)), "alexnet": ("owt=2", 32, (3, 224))}
"""Plan, global batch, channels and size of the images."""


def measure(name: str, seconds: float) -> tuple[int, int, float, float, float]:
    """Updates, comparisons, their share of the time, and medians of an update with and without. All ranks call it."""
    join()
    plan, batch, (channels, size) = CASES[name]
    sides = []
    for checks in (True, False):
        torch.manual_seed(0)
        model = models.create(name, num_classes=10, in_channels=channels)
        images = torch.randn(batch, channels, size, size)
        net = convoy.parallelize(model, plan, images[: batch // 2], checks=checks)
        mine = convoy.local_samples(net, batch)
        sides.append((net, torch.optim.SGD(net.parameters(), lr=1e-3), images[mine], torch.arange(batch)[mine] % 10))
    guard = network_of(sides[0][0]).guard
    assert guard is not None
    spent, look = [], guard.look

    def timed(inputs: Sequence[Tensor]) -> None:
        spent.append(harness.seconds_of(lambda: look(inputs)))

    guard.look = timed  # type: ignore[method-assign]
    times: tuple[list[float], list[float]] = ([], [])
    going = torch.ones(1)
    while going:
        for side, (net, optimizer, images, labels) in enumerate(sides):
            began = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
            times[side].append(time.perf_counter() - began)
        going[0] = sum(times[0]) < seconds
        torch.distributed.broadcast(going, 0)
    compared = [t for t in spent if t > 10 * statistics.median(spent)]
    with_checks, without = (statistics.median(each) for each in times)
    return len(times[0]), len(compared), sum(spent) / sum(times[0]), with_checks, without


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the side with checks")
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    with harness.report(options.out) as report:
        columns = ("updates", "comparisons", "share of the time", "an update with", "without", "ratio")
        report.header("network", "plan", *columns)
        for name in options.networks:
            updates, compared, share, on, off = run_ranks(measure, 2, name, options.seconds)[0]
            times = (f"{100 * share:.2f} %", f"{1e3 * on:.2f} ms", f"{1e3 * off:.2f} ms", f"{on / off:.3f}")
            report.row(name, CASES[name][0], updates, compared, *times)


if __name__ == "__main__":
    main()
