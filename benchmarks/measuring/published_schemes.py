"""How long published tables' ways of adding gradients take, beside the rings of `convoy.hardware.data_parallel`.

They are those of a decade of software: trees, sums in the host's memory or on one GPU, servers of parameters, in one
message a tensor or in a few large ones, beside the backward pass or after it (Huang et al., "GPipe", 2019).
"""

import math
from collections.abc import Mapping

from convoy.hardware.catalog import Hop
from convoy.hardware.data_parallel import MESSAGE, Step, beside, inside_link, lateness, network_link, ring, starting
from convoy.hardware.speed import KINDS, Coefficients, Factor, Times
from measuring.published_rows import Row, work


def factors(given: Mapping[str, Coefficients]) -> Factor:
    return lambda name: math.exp(given["several devices"].get(name, 0.0))


def several(one: Times, row: Row, given: Mapping[str, Coefficients], count: int = 0) -> Step:
    """An update of the row's devices, or of `count`, by the times of `one` of them."""
    scheme, count, factor = row.scheme, count or row.count, factors(given)
    if scheme.kind == "pipeline":
        return _pipeline(one, row, count, factor)
    alone = one.total
    inside = between = exposed = slower = 0.0
    compiled = scheme.kind == "replicated" and row.software.compiled
    if count > 1 and scheme.kind != "none":
        asked = work(row.network)
        together = max(1.0, asked.parameters * scheme.itemsize / MESSAGE)
        messages = together if scheme.fused else float(asked.tensors)
        inside, between = _exchange(row, count, messages, factor)
        exposed = inside + between
        if scheme.overlap and not compiled:
            exposed = beside(exposed, one, factor)
            if scheme.kind in ("ring", "replicated"):
                exposed += scheme.cycle + starting(messages, factor)
    if count > 1:
        slower = lateness(alone, row.precision, row.software.framework, count, row.site, factor)
        is_old = row.software.framework == "tensorflow" and row.software.cudnn == 7 and not row.software.compiled
        if scheme.kind == "replicated" and is_old and row.precision == "fp16" and row.device.tensor_cores:
            # TensorFlow 1.15 to 2.3 on several GPUs; where it compiles, or has cuDNN 8, it does not happen
            normalized = float((one.forward + one.backward)[work(row.network).rows.kind == KINDS.index("norm")].sum())
            slower += 0.3 * factor("norms") * normalized * min(3.0, math.log2(count)) / 3
    seconds, feed = alone + exposed + slower, _feed(row, count, factor)
    seconds = (seconds**4 + feed**4) ** 0.25 if feed else seconds
    return Step(seconds, alone, inside + between, exposed, feed, slower, one, inside, between)


def _feed(row: Row, count: int, factor: Factor) -> float:
    """The host's time to get the input of its devices ready."""
    feed, software, local = row.scheme.feed, row.software.framework, min(count, row.site.per_host)
    if feed == "synthetic":
        return 0.0
    # a core decodes, crops and resizes some 200 photographs of ImageNet a second; fake ones are only copied
    rate = (8000.0 if feed == "fake" else 200.0 * row.cores) * factor("feed by cpu") * factor(f"feed {software}")
    if feed == "gpu":  # devices decode for themselves (DALI)
        rate = 250.0 * local * row.device.fp32**0.5 * factor("feed by gpu") * factor(f"feed {software}")
    rows = work(row.network).rows  # of which the first layer reads the image
    return float(local * row.images / rate * rows.read[rows.first > 0].max() / 150528)


def _exchange(row: Row, count: int, messages: float, factor: Factor) -> tuple[float, float]:
    """Seconds of adding gradients, on the links of a host and between hosts, if there were nothing else."""
    site, scheme = row.site, row.scheme
    local, hosts = min(count, site.per_host), -(-count // site.per_host)
    size, rate = work(row.network).parameters * scheme.itemsize, inside_link(site, local, factor).rate
    inside, between = ring(size, count, site, factor, messages)
    network = network_link(site, factor) if hosts > 1 else Hop(0.0, math.inf)
    if hosts > 1 and not scheme.fused:
        # each tensor goes around the whole ring by itself, and a step takes what its slowest hop does (NCCL 2.0 on 16
        # and 32 GPUs over InfiniBand: 15 and 12 us, Baidu DeepBench); later libraries send many together, by trees
        between += 2 * (count - hosts) * network.latency * messages
    match scheme.kind:
        case "one-weird-trick" | "hybrid" | "model":
            return _divided(row, local, rate), 0.0
        case "keras":
            # weights to every device and gradients from it, one after the other, and the graph's ends by one thread
            return local * (2 * size / rate + 0.05 * factor("keras")), 0.0
        case "host" | "host-ring":
            shared = max(1.0, local / 4) if site.link != "pcie3-x1" else 1.0  # two processors, each with two ways
            inside = 2 * size / rate * shared * factor("to host") + local * size / (12e9 * factor("adding"))
        case "server-gpu":
            inside = 2 * (local - 1) * size / rate * factor("to gpu")
        case "tree":
            inside = 2 * math.ceil(math.log2(local)) * size / rate
            between = 2 * math.ceil(math.log2(hosts)) * size / network.rate * factor("tree")
        case "replicated":
            slower = 1.0 if site.way else factor("replicated")
            inside = ring(size, local, site, lambda name: factor(name) / slower, messages)[0]
        case "servers" | "servers-gpu":
            # every host gets the weights and gives gradients, and serves its part of both to all others
            sent = 4 * (hosts - 1) / hosts * size * (1 if scheme.fused else local)
            between = sent / network.rate * factor("servers")
    return inside, between


def _divided(row: Row, count: int, rate: float) -> float:
    """Dense layers by model: their activations travel instead of their gradients (Krizhevsky, 2014)."""
    asked, scheme = work(row.network), row.scheme
    linear, convolutions = (asked.rows.kind == KINDS.index(kind) for kind in ("linear", "conv"))
    dense = float((asked.rows.count * asked.rows.weights)[linear].sum())
    activations = float((asked.rows.count * (asked.rows.read + asked.rows.written))[linear].sum()) * row.images
    if scheme.kind == "one-weird-trick":
        reduced = 2 * (count - 1) / count * (asked.parameters - dense) * scheme.itemsize
        return (reduced + 2 * activations * (count - 1) * scheme.itemsize) / rate
    # convolutions by model exchange all activations
    everything = float((asked.rows.count * asked.rows.written)[convolutions].sum()) * row.images * 2
    part = 0.5 if scheme.kind == "hybrid" else 1.0
    gradients = asked.parameters * scheme.itemsize if scheme.kind == "hybrid" else 0.0
    return float((part * everything * scheme.itemsize + gradients) / rate)


def _pipeline(one: Times, row: Row, count: int, factor: Factor) -> Step:
    """GPipe: a bubble of (stages - 1) of (parts + stages - 1), all forward passes once more, stages not quite even."""
    again = float(one.forward.sum()) * factor("again") * 0.6

    def of(stages: int, parts: int) -> float:
        uneven = 1 + 0.12 * factor("uneven") * math.log2(stages)
        return (one.total + again) * (parts + stages - 1) / (parts * stages) * uneven

    seconds, alone = of(count, row.scheme.parts), of(2, 1) if row.scheme.relative else one.total
    return Step(seconds, alone, 0.0, seconds - one.total / count, 0.0, 0.0, one, 0, 0)
