"""How long the search for a plan takes, and how much memory, with costs that are quickly asked for.

    python benchmarks/search_time.py
    python benchmarks/search_time.py --networks resnet152 --mesh 2x2 --batch 64
    python benchmarks/search_time.py --networks resnet152 --stages

Each network is searched in a process of its own. The time is that of `convoy.planner.search.search` on one mesh, with
all sets of sample axes; capture and what imports take come before it. The costs are those of a GPU of 50 TFLOP/s and
1 TB/s with links of 20 GB/s, a third of that between nodes of eight. With `--stages` the search over cuts on as many
devices comes on top, at all numbers of stages and passes, with the capture at a second size from which the network at
the sizes of these passes follows.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from measuring import harness
from measuring.ranks import run_ranks

from convoy import models
from convoy.hardware.catalog import Hop
from convoy.planner.cost.costs import Costs, Roofline, Update
from convoy.planner.cost.link import assumed
from convoy.planner.search.layers import Constraints
from convoy.planner.search.search import search
from convoy.planner.search.stages import search_stages
from convoy.planner.workload import Workload, workload_of
from convoy.plans.mesh import Mesh

NETWORKS = ("resnet152", "googlenet", "densenet121")
COSTS = Costs(
    Roofline(flops_per_s=5e13, bytes_per_s=1e12, overhead_s=5e-6),
    assumed(Hop(2e-5, 2e10 / 3), Hop(2e-5, 2e10), per_host=8),
    Update(per_byte=5e-12, state=1.0),
    on_cpu=False,
)


def measure(network: str, sizes: tuple[int, ...], batch: int, stages: bool) -> list[str]:
    """Search one network in this process: the cells of its row."""
    with torch.device("meta"):
        model = models.create(network)
    workload = workload_of(model, torch.empty(1, 3, 224, 224), batch, name=network)
    before, mesh = _peak(), Mesh(("node", "gpu")[-len(sizes) :], sizes)
    found, times = _timed(search, workload, mesh.num_devices, COSTS, Constraints(meshes=[mesh]))
    exact = ", ".join(("exact" if found.exact else "not exact", *found.notes))
    cells = [network, times, f"{_peak():.0f} MB ({before:.0f} MB)", exact]
    cells.append(f"{found.best.seconds * 1e3:.2f} ms: {str(found.best.plan)[:300]}")
    return cells + (_cut(workload, mesh.num_devices, found.best.seconds) if stages else [])


def _peak() -> float:
    """The most that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _cut(workload: Workload, devices: int, known: float) -> list[str]:
    """Search plans with stages, in any number of equal passes."""
    counts = tuple(number for number in range(1, workload.batch + 1) if workload.batch % number == 0)
    asked = (replace(workload, counts=counts), devices, COSTS, Constraints())
    found, times = _timed(search_stages, *asked, known=known)
    best = found[0] if found else None
    plan = f"{best.plan.mesh} in {best.passes} passes, {best.schedule}: {1e3 * best.seconds:.2f} ms" if best else "none"
    return [times, plan]


def _timed(search: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, str]:
    """What a search finds, and how long it took."""
    start, worked = time.perf_counter(), time.process_time()
    found = search(*args, **options)
    return found, f"{time.perf_counter() - start:.2f} s ({time.process_time() - worked:.2f} s of a core)"


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--mesh", default="16x8")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--stages", action="store_true", help="search plans with stages too")
    options = parser.parse_args()
    sizes = tuple(map(int, options.mesh.split("x")))
    with harness.report(options.out) as report:
        more = ("cuts", "fastest") if options.stages else ()
        report.header(options.mesh, "clock", "peak memory (of it before)", "result", "predicted", *more)
        for network in options.networks:
            asked = (network, sizes, options.batch, options.stages)
            report.row(*run_ranks(measure, 1, *asked)[0])


if __name__ == "__main__":
    main()
