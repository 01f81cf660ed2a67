"""How long an update takes on several devices that are not at hand, by the way in which gradients are added.

The ways are those of a decade of software: rings and trees, sums in the host's memory or on one GPU, servers of
parameters, in one message a tensor or in a few large ones, beside the backward pass or after it. What they cost is
counted by the bytes that pass each link (Thakur, Rabenseifner and Gropp, 2005; Patarasuk and Yuan, 2009; Huang et al.,
"GPipe", 2019); factors near 1 on these counts are fitted to published measurements (`coefficients.json`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from convoy.hardware.catalog import Device, Hop, Machine, link_named
from convoy.hardware.speed import Coefficients, Factor, Software, Times, coefficients_of
from convoy.hardware.work import KINDS, Work


@dataclass(frozen=True)
class Site:
    """Where devices stand."""

    per_host: int  # devices of a host
    # name of the link between devices of a host. With `-host` at the end all passes through the host's memory, with
    # `-shared` two devices share the way to it, with `-bridge` pairs have a link of their own beside it
    link: str
    network: str = ""  # name of the link between hosts, `-N` at the end for N cards in each
    sockets: int = 2  # processors of a host, over which its devices are spread
    memory: float = 140.0  # GB/s of the host's memory, shared by all copies through it
    cores: int = 32  # of a host, to decode pictures


@dataclass(frozen=True)
class Scheme:
    """How gradients are added."""

    # `ring`, `tree`; `replicated` as TensorFlow's towers; `host` in the memory of the host, `host-ring` the same with a
    # ring of the hosts' processors; `server-gpu` on one GPU; `servers` on the hosts, one on each; `servers-gpu` on a
    # GPU of each; `keras` one device after the other; `pipeline` through stages; `one-weird-trick`, `model`, `hybrid`
    # of Krizhevsky and Yadan; `none` not at all
    kind: str = "ring"
    overlap: bool = True  # messages travel beside the backward pass
    # small gradients share a message; with servers, the devices of a host share one copy of what they send
    fused: bool = True
    itemsize: int = 4  # bytes of a number in a message
    cycle: float = 0.0  # seconds between two looks for gradients that all devices have
    # `synthetic` from nowhere, `fake` from the host's memory, `real` decoded by the host, `gpu` by devices
    feed: str = "synthetic"
    parts: int = 1  # microbatches of a pipeline
    relative: bool = False  # the speed-up is over two stages and one microbatch


@dataclass(frozen=True)
class Step:
    """Seconds of an update of several devices."""

    seconds: float
    alone: float  # one device with its images
    exchange: float  # adding gradients, if there were nothing else
    exposed: float  # the part of `exchange` that the update waits for
    feed: float  # the host's, to get the input of its devices ready, if there were nothing else
    slower: float  # what else takes several devices longer
    times: Times  # of one device
    inside: float  # of the exchange, on the links of a host, and between hosts
    between: float

    @property
    def holds_back(self) -> str:
        """The resource without which it would be fastest."""
        spent = {
            "arithmetic": self.times.arithmetic,
            "memory": self.times.memory + self.times.update,
            "launch": self.times.launch + self.times.fixed + self.times.waiting,
            "input": max(0.0, self.feed - self.alone) + 0.5 * self.feed * (self.feed > self.alone),
            "network" if self.between > self.inside else "link": self.exposed,
            "synchronization": self.slower,
        }
        return max(spent, key=lambda name: spent[name])


def several(
    one: Times,
    work: Work,
    images: float,
    device: Device,
    precision: str,
    software: Software,
    count: int,
    site: Site,
    scheme: Scheme,
    coefficients: Mapping[str, Coefficients] | None = None,
) -> Step:
    """How long an update of `images` on each of `count` devices takes, by the times of `one` of them. The coefficients
    are by part, by default those of the package."""
    c = coefficients["several devices"] if coefficients else coefficients_of("several devices")

    def factor(name: str) -> float:
        return math.exp(c.get(name, 0.0))

    backward = float(one.backward.sum()) * one.total / one.device
    alone = one.total
    if scheme.kind == "pipeline":
        return _pipeline(one, alone, count, scheme, factor)
    hosts = -(-count // site.per_host)
    local = min(count, site.per_host)
    seconds = alone
    inside = between = exposed = 0.0
    messages = max(1.0, work.parameters * scheme.itemsize / 32e6) if scheme.fused else float(work.tensors)
    if count > 1 and scheme.kind != "none":
        inside, between = _exchange(work, images, count, local, hosts, site, scheme, software, messages, factor)
        exposed = total = inside + between
        if scheme.overlap and not (scheme.kind == "replicated" and software.compiled):
            power = 1.0 + factor("beside")
            busy = backward * (1 - 0.2)
            exposed = (busy**power + total**power) ** (1 / power) - busy + 0.05 * total
            if scheme.kind in ("ring", "replicated"):
                # a message is a kernel on all devices that waits for the last of them, and holds up what they compute
                exposed += scheme.cycle + 5e-5 * factor("message") * messages
        seconds += exposed
    slower = 0.0
    if count > 1:
        share = 0.01 * factor("slower") * factor(f"slower {software.framework}")
        share *= factor("slower halves") if precision == "fp16" else 1.0
        # of many hosts the slowest is as late as the largest of so many random delays: their logarithm's root
        doublings = math.log2(local) + 0.3 * factor("hosts") * math.log2(hosts) ** 0.5
        slower = (alone * share + 1e-3 * factor("sync")) * doublings
        normalized = float((one.forward + one.backward)[work.kind == KINDS.index("norm")].sum())
        if scheme.kind == "replicated" and _is_slow_at_norms(precision, software, device):
            # TensorFlow 1.15 to 2.3 on several GPUs; where it compiles, or has cuDNN 8, it does not happen
            slower += 0.3 * factor("norms") * normalized * min(3.0, math.log2(count)) / 3
        seconds += slower
    feed = 0.0
    if scheme.feed != "synthetic":
        # a core decodes, crops and resizes some 200 photographs of ImageNet a second; fake ones are only copied
        rate = 8000.0 if scheme.feed == "fake" else 200.0 * site.cores
        rate *= factor("feed by cpu") * factor(f"feed {software.framework}")
        if scheme.feed == "gpu":  # devices decode for themselves (DALI)
            rate = 250.0 * local * device.fp32**0.5 * factor("feed by gpu") * factor(f"feed {software.framework}")
        feed = local * images / rate * work.image / 150528
        seconds = (seconds**4 + feed**4) ** 0.25
    return Step(seconds, alone, inside + between, exposed, feed, slower, one, inside, between)


def _is_slow_at_norms(precision: str, software: Software, device: Device) -> bool:
    return (
        precision == "fp16"
        and software.framework == "tensorflow"
        and software.cudnn == 7
        and not software.compiled
        and device.tensor_cores
    )


def _exchange(
    work: Work,
    images: float,
    count: int,
    local: int,
    hosts: int,
    site: Site,
    scheme: Scheme,
    software: Software,
    messages: float,
    factor: Factor,
) -> tuple[float, float]:
    """Seconds of adding gradients, on the links of a host and between hosts, if there were nothing else."""
    size = work.parameters * scheme.itemsize
    rate = inside_link(site, local, factor).rate
    inside, between = ring(size, count, site, factor, messages)
    network = network_link(site, factor) if hosts > 1 else Hop(0.0, math.inf)
    if hosts > 1 and not scheme.fused:
        # each tensor goes around the whole ring by itself, and a step takes what its slowest hop does (NCCL 2.0 on 16
        # and 32 GPUs over InfiniBand: 15 and 12 us, Baidu DeepBench); later libraries send many together, by trees
        between += 2 * (count - hosts) * network.latency * messages
    match scheme.kind:
        case "one-weird-trick" | "hybrid" | "model":
            return _divided(work, images, local, scheme, rate), 0.0
        case "keras":
            # weights to every device and gradients from it, one after the other, and the graph's ends by one thread
            return local * (2 * size / rate + 0.05 * factor("keras")), 0.0
        case "host" | "host-ring":
            shared = max(1.0, local / (2.0 * site.sockets)) if site.link != "pcie3-x1" else 1.0
            inside = 2 * size / rate * shared * factor("to host") + local * size / (12e9 * factor("adding"))
        case "server-gpu":
            inside = 2 * (local - 1) * size / rate * factor("to gpu")
        case "tree":
            inside = 2 * math.ceil(math.log2(local)) * size / rate
            between = 2 * math.ceil(math.log2(hosts)) * size / network.rate * factor("tree")
        case "replicated":
            inside = ring(size, local, site, factor, messages, 1 / factor("replicated"))[0]
        case "servers" | "servers-gpu":
            # every host gets the weights and gives gradients, and serves its part of both to all others
            sent = 4 * (hosts - 1) / hosts * size * (1 if scheme.fused else local)
            between = sent / network.rate * factor("servers")
    return inside, between


def ring(
    size: float, count: int, site: Site, factor: Factor, messages: float = 1.0, faster: float = 1.0
) -> tuple[float, float]:
    """Seconds of an all-reduce of so many bytes, on the links of a host and between hosts."""
    local, hosts = min(count, site.per_host), -(-count // site.per_host)
    inside = between = 0.0
    if local > 1:
        link = inside_link(site, local, factor, faster)
        inside = 2 * (local - 1) * (size / local / link.rate + link.latency * messages)
    if hosts > 1:
        network = network_link(site, factor)
        between = 2 * (hosts - 1) * (size / hosts / network.rate + network.latency * messages**0.5)
    return inside, between


def inside_link(site: Site, local: int, factor: Factor, faster: float = 1.0) -> Hop:
    """The link between devices of a host where `local` of them send at once. `faster` is how many times as fast as
    NCCL's ring something else uses links between peers."""
    name = re.sub("-(host|shared|bridge)$", "", site.link)
    link, way = link_named(name), site.link[len(name) :]
    if way == "-bridge" and local == 2:
        return Hop(link.latency, 4e10)
    if not way:
        return Hop(link.latency, link.rate * factor(f"link {name}") * faster)
    # without peer-to-peer NCCL passes all through the host's memory (its NCCL_SHM_DISABLE): a chunk is copied in, then
    # out, which leaves half of what PCIe 3.0 carries; cards of PCIe 4.0 were no faster. Every byte is written and read
    # there, by all devices at the same time
    rate = min(link.rate, 6e9) * factor("link host")
    rate = min(rate, 0.5e9 * site.memory * factor("host memory") / (2 * local))
    if way == "-shared":
        rate /= max(1.0, min(local, 4) / 2)
    return Hop(link.latency, rate)


def network_link(site: Site, factor: Factor) -> Hop:
    """The link between hosts."""
    link = link_named(site.network)
    return Hop(link.latency, link.rate * factor("network"))


def fitted(name: str) -> float:
    """A fitted factor on what several devices cost; 1 where nothing was fitted."""
    return math.exp(coefficients_of("several devices").get(name, 0.0))


def is_through_host(machine: Machine) -> bool:
    """Whether what its devices send each other passes through their host's memory."""
    return machine.link.startswith("pcie") and not all(device.peer for device in machine.devices)


def site_of(machine: Machine) -> Site:
    """Where the devices of a machine stand."""
    through = ("-shared" if machine.per_host > 4 else "-host") if is_through_host(machine) else ""
    return Site(machine.per_host, machine.link + through, machine.between)


def _divided(work: Work, images: float, count: int, scheme: Scheme, rate: float) -> float:
    """Dense layers by model: their activations travel instead of their gradients (Krizhevsky, 2014)."""
    linear = work.kind == KINDS.index("linear")
    dense = float((work.count * work.weights)[linear].sum())
    activations = float((work.count * (work.read + work.written))[linear].sum()) * images
    if scheme.kind == "one-weird-trick":
        ring = 2 * (count - 1) / count * (work.parameters - dense) * scheme.itemsize
        return (ring + 2 * activations * (count - 1) * scheme.itemsize) / rate
    # convolutions by model exchange all activations
    everything = float((work.count * work.written)[work.kind == KINDS.index("conv")].sum()) * images * 2
    part = 0.5 if scheme.kind == "hybrid" else 1.0
    gradients = work.parameters * scheme.itemsize if scheme.kind == "hybrid" else 0.0
    return float((part * everything * scheme.itemsize + gradients) / rate)


def _pipeline(one: Times, alone: float, count: int, scheme: Scheme, factor: Factor) -> Step:
    """GPipe: a bubble of (stages - 1) of (parts + stages - 1), all forward passes once more, stages not quite even."""
    again = float(one.forward.sum()) * factor("again") * 0.6

    def of(stages: int, parts: int) -> float:
        uneven = 1 + 0.12 * factor("uneven") * math.log2(stages)
        return (alone + again) * (parts + stages - 1) / (parts * stages) * uneven

    seconds = of(count, scheme.parts)
    return Step(seconds, of(2, 1) if scheme.relative else alone, 0.0, seconds - alone / count, 0.0, 0.0, one, 0, 0)
