"""How long the search for a plan takes, and how much memory, with costs that are quickly asked for.

    python benchmarks/search_time.py
    python benchmarks/search_time.py --networks resnet152 --mesh 2x2 --batch 64
    python benchmarks/search_time.py --networks resnet152 --stages

Each network is searched in a process of its own. The time is that of `convoy.planner.search.search` on one mesh, with
all sets of sample axes; capture and what imports take come before it. The costs are those of a GPU of 50 TFLOP/s and
1 TB/s with links of 20 GB/s, a third of that between nodes (`measuring/analytic.py`). With `--stages` the
search over cuts on as many devices comes on top, at all numbers of stages and passes, with the capture at a second
size from which the network at the sizes of these passes follows.
"""

import resource
import time
from functools import cache

import torch
from measuring import harness
from measuring.analytic import Analytic
from measuring.ranks import run_ranks
from torch import nn

from convoy import models
from convoy.ops import capture
from convoy.planner.cost.link import Links, Rate
from convoy.planner.search import search
from convoy.planner.search.cuts import InPasses
from convoy.planner.search.stages import search_stages
from convoy.planner.workload import workload_of
from convoy.plans.mesh import Mesh

NETWORKS = ("resnet152", "googlenet", "densenet121")


def measure(network: str, sizes: tuple[int, ...], batch: int, limit: float | None, stages: bool) -> list[str]:
    """Search one network in this process: the cells of its row."""
    with torch.device("meta"):
        model = models.create(network)
        graph = capture(model, (torch.empty(batch, 3, 224, 224),), training=True)
    before, mesh = _peak(), Mesh(("node", "gpu")[-len(sizes) :], sizes)
    start, worked = time.perf_counter(), time.process_time()
    found = search(graph, mesh.num_devices, Analytic(), on=[mesh], memory_limit=limit)
    times = f"{time.perf_counter() - start:.2f} s ({time.process_time() - worked:.2f} s of a core)"
    exact = ", ".join(("exact" if found.exact else "not exact", *found.notes))
    cells = [network, times, f"{_peak():.0f} MB ({before:.0f} MB)", exact]
    cells.append(f"{found.best.seconds * 1e3:.2f} ms: {str(found.best.plan)[:300]}")
    return cells + (_cut(model, mesh.num_devices, batch, limit, found.best.seconds) if stages else [])


def _peak() -> float:
    """The most that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _cut(model: nn.Module, devices: int, batch: int, limit: float | None, known: float) -> list[str]:
    """Search plans with stages."""
    workload = workload_of(model, torch.empty(1, 3, 224, 224), batch, name="network")
    in_passes = workload.in_passes
    assert in_passes is not None

    @cache
    def at(passes: int) -> InPasses:
        update = in_passes(passes)
        return InPasses(update.graph, update.outputs, passes, update.parts, Analytic(passes=passes))

    counts = [number for number in range(1, batch + 1) if batch % number == 0]
    link = Rate(2e-5, 2e10 / 3)
    links = Links(otherwise=lambda ranks: link.link(len(ranks), overlap=True, cpu_share=0.0))
    start, worked = time.perf_counter(), time.process_time()
    found = search_stages(at, counts, devices, links, memory_limit=limit, known=known)
    times = f"{time.perf_counter() - start:.2f} s ({time.process_time() - worked:.2f} s of a core)"
    best = found[0] if found else None
    plan = f"{best.plan.mesh} in {best.passes} passes, {best.schedule}: {1e3 * best.seconds:.2f} ms" if best else "none"
    return [times, plan]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--mesh", default="16x8")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--memory-limit", type=float, help="bytes on each rank")
    parser.add_argument("--stages", action="store_true", help="search plans with stages too")
    options = parser.parse_args()
    sizes = tuple(map(int, options.mesh.split("x")))
    with harness.report(options.out) as report:
        more = ("cuts", "fastest") if options.stages else ()
        report.header(options.mesh, "clock", "peak memory (of it before)", "result", "predicted", *more)
        for network in options.networks:
            asked = (network, sizes, options.batch, options.memory_limit, options.stages)
            report.row(*run_ranks(measure, 1, *asked)[0])


if __name__ == "__main__":
    main()
