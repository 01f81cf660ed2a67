"""Data parallelism of a network on a machine that is not at hand, in closed form: rings add gradients beside the
backward pass.

What that costs is counted by the bytes that pass each link (Thakur, Rabenseifner and Gropp, 2005; Patarasuk and Yuan,
2009); factors near 1 on these counts are fitted to published measurements (`coefficients.json`), with the older ways of
`benchmarks/measuring/published_schemes.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.hardware.catalog import CUDA, Device, Hop, Machine, link_named
from convoy.hardware.speed import Factor, Software, Times, Work, coefficients_of, times


@dataclass(frozen=True)
class Site:
    """Where devices stand."""

    per_host: int  # devices of a host
    link: str  # name of the link between devices of a host
    network: str = ""  # name of the link between hosts, `-N` at the end for N cards in each
    # `host`: all passes through the host's memory; `shared`: two devices share the way to it; `bridge`: pairs have a
    # link of their own beside it
    way: str = ""
    memory: float = 140.0  # GB/s of the host's memory, shared by all copies through it


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


def fitted(name: str) -> float:
    """A fitted factor on what several devices cost; 1 where nothing was fitted."""
    return math.exp(coefficients_of("several devices").get(name, 0.0))


def several(alone: Times, work: Work, precision: str, framework: str, count: int, site: Site) -> Step:
    """How long an update takes on each of `count` devices, by those of one of them `alone` with its images."""
    if count == 1:
        return Step(alone.total, alone.total, 0.0, 0.0, 0.0, 0.0, alone, 0.0, 0.0)
    messages = max(1.0, work.parameters * 4 / MESSAGE)
    inside, between = ring(work.parameters * 4, count, site, fitted, messages)
    exposed = beside(inside + between, alone, fitted) + starting(messages, fitted)
    late = lateness(alone.total, precision, framework, count, site, fitted)
    return Step(alone.total + exposed + late, alone.total, inside + between, exposed, 0.0, late, alone, inside, between)


MESSAGE = 32e6  # bytes of gradients that share one


def beside(exchange: float, alone: Times, factor: Factor) -> float:
    """What an update waits for of an exchange beside its backward pass."""
    busy = float(alone.backward.sum()) * alone.total / alone.device * (1 - 0.2)
    power = 1.0 + factor("beside")
    return float((busy**power + exchange**power) ** (1 / power) - busy + 0.05 * exchange)


def starting(messages: float, factor: Factor) -> float:
    """A message is a kernel on all devices that waits for the last of them, and holds up what they compute."""
    return 5e-5 * factor("message") * messages


def lateness(alone: float, precision: str, framework: str, count: int, site: Site, factor: Factor) -> float:
    """What keeping several devices in step takes."""
    local, hosts = min(count, site.per_host), -(-count // site.per_host)
    share = 0.01 * factor("slower") * factor(f"slower {framework}")
    share *= factor("slower halves") if precision == "fp16" else 1.0
    # of many hosts the slowest is as late as the largest of so many random delays: their logarithm's root. With the
    # logarithm, 2,048 V100 were to take 172 s where 74.7 were published; so it is 75
    doublings = math.log2(local) + 0.3 * factor("hosts") * math.log2(hosts) ** 0.5
    return float((alone * share + 1e-3 * factor("sync")) * doublings)


def ring(size: float, count: int, site: Site, factor: Factor, messages: float = 1.0) -> tuple[float, float]:
    """Seconds of an all-reduce of so many bytes, on the links of a host and between hosts."""
    local, hosts = min(count, site.per_host), -(-count // site.per_host)
    inside = between = 0.0
    if local > 1:
        link = inside_link(site, local, factor)
        inside = 2 * (local - 1) * (size / local / link.rate + link.latency * messages)
    if hosts > 1:
        network = network_link(site, factor)
        between = 2 * (hosts - 1) * (size / hosts / network.rate + network.latency * messages**0.5)
    return inside, between


def inside_link(site: Site, local: int, factor: Factor = fitted) -> Hop:
    """The link between devices of a host where `local` of them send at once."""
    link = link_named(site.link)
    if site.way == "bridge" and local == 2:
        return Hop(link.latency, 4e10)
    if not site.way:
        return Hop(link.latency, link.rate * factor(f"link {site.link}"))
    # without peer-to-peer NCCL passes all through the host's memory (its NCCL_SHM_DISABLE): a chunk is copied in, then
    # out, which leaves half of what PCIe 3.0 carries; cards of PCIe 4.0 were no faster. Every byte is written and read
    # there, by all devices at the same time
    rate = min(link.rate, 6e9) * factor("link host")
    rate = min(rate, 0.5e9 * site.memory * factor("host memory") / (2 * local))
    if site.way == "shared":
        rate /= max(1.0, min(local, 4) / 2)
    return Hop(link.latency, rate)


def network_link(site: Site, factor: Factor = fitted) -> Hop:
    """The link between hosts."""
    link = link_named(site.network)
    return Hop(link.latency, link.rate * factor("network"))


def site_of(machine: Machine) -> Site:
    """Where the devices of a machine stand."""
    link, peers = machine.slowest, all(device.peer for device in machine.devices)
    way = "" if peers or not link.startswith("pcie") else "shared" if machine.per_host > 4 else "host"
    return Site(machine.per_host, link, machine.between, way)


@dataclass(frozen=True)
class Change:
    """A change, and how many times as many images a second there would be with it."""

    text: str
    gain: float


def units(device: Device, precision: str) -> str:
    """What the device computes with: fp32 on devices that have it is TF32, as PyTorch's convolutions are."""
    if precision in ("bf16", "fp16"):
        return "fp16"
    return "tf32" if precision == "tf32" or device.tf32 else "fp32"


@dataclass(frozen=True)
class DataParallel:
    """A network on all devices of a machine, which have its samples in shares."""

    work: Work
    machine: Machine
    precision: str
    software: Software

    def step(self, shares: Sequence[int]) -> Step:
        """The step of the device that takes longest, where each has so many images."""
        pairs, site = set(zip(self.machine.devices, shares, strict=True)), site_of(self.machine)
        steps = []
        for device, images in pairs:
            alone, precision = self.alone(device, max(images, 1)), units(device, self.precision)
            steps.append(several(alone, self.work, precision, self.software.framework, len(shares), site))
        return max(steps, key=lambda step: step.seconds)

    def alone(self, device: Device, images: float) -> Times:
        """A step of one device by itself."""
        return times(self.work, images, device, units(device, self.precision), self.software)

    def shares(self, batch: int) -> tuple[int, ...]:
        """The images of each device by which all end at about the same time: as they are equal, even ones."""
        devices = self.machine.devices
        speed_of = {device: 1 / self.alone(device, batch / len(devices)).total for device in set(devices)}
        speeds = [speed_of[device] for device in devices]
        ends = [round(batch * sum(speeds[: number + 1]) / sum(speeds)) for number in range(len(devices))]
        return tuple(end - before for before, end in zip((0, *ends), ends, strict=False))

    @property
    def within(self) -> float:
        """The factor within which nine in ten predictions of like distance from the fit were."""
        coefficients, ranges = coefficients_of("one device"), coefficients_of("ranges")
        is_known = all(f"device {device.name}" in coefficients for device in self.machine.devices)
        several = "one device" if len(self.machine.devices) == 1 else "several devices"
        kind = f"{'known' if is_known else 'unknown'} device, known framework, {several}"
        return math.exp(ranges.get(kind, ranges.get("any", 0.5)))

    def holds_back(self, step: Step) -> str:
        """The resource without which a step would be fastest: a link by its name."""
        site = site_of(self.machine)
        link = "host memory" if site.way else site.link.partition("-")[0]
        spent = {
            "arithmetic": step.times.arithmetic,
            "memory bandwidth": step.times.memory + step.times.update,
            "launch": step.times.launch + step.times.fixed + step.times.waiting,
            "input": max(0.0, step.feed - step.alone) + 0.5 * step.feed * (step.feed > step.alone),
            "network" if step.between > step.inside else link: step.exposed,
            "synchronization": step.slower,
        }
        return max(spent, key=lambda name: spent[name])

    def curve(self, batch: int) -> tuple[tuple[int, float], ...]:
        """Images a second on 1, 2, 4, … of the devices, each with as many images; of equal ones also on twice as many,
        in the same host or in twice the hosts."""
        machine, count = self.machine, len(self.machine.devices)
        numbers, devices = {1 << power for power in range(count.bit_length())} | {count}, machine.devices * 2
        points = []
        for number in sorted(numbers | ({2 * count} if len(set(devices)) == 1 else set())):
            if number <= machine.per_host or number % machine.per_host == 0:
                inside = number if machine.hosts == 1 else min(number, machine.per_host)
                part = replace(self, machine=replace(machine, devices=devices[:number], per_host=inside))
                images = max(number, batch * number // count)
                points.append((number, images / part.step(part.shares(images)).seconds))
        return tuple(points)

    def changes(self, shares: Sequence[int], done: Step) -> tuple[Change, ...]:
        """What would make the step `done` shorter, the most helpful first."""
        software, rate = self.software, sum(shares) / done.seconds
        recorded = replace(software, recorded=True)
        ways = {"a compiler that fuses": replace(software, compiled=True)}
        if all(device.generation in CUDA for device in self.machine.devices):
            ways["updates recorded as CUDA graphs"] = recorded
            if not software.compiled:
                text = "as convoy train by default, updates recorded as CUDA graphs with Convoy's batch norm"
                ways[text] = replace(recorded, kernels=True)
        others = {text: replace(self, software=way) for text, way in ways.items()}
        if self.precision not in ("bf16", "fp16") and self.machine.devices[0].fp16:
            others = {"half precision": replace(self, precision="bf16"), **others}
        seconds_of = {text: other.step(shares).seconds for text, other in others.items()}
        seconds_of["links twice as fast"] = done.seconds - done.exposed / 2
        if done.feed > done.alone:
            seconds_of["input twice as fast"] = max(done.alone, done.feed / 2)
        gains = {text: done.seconds / seconds for text, seconds in seconds_of.items()}
        gains["twice the batch"] = 2 * sum(shares) / self.step([2 * share for share in shares]).seconds / rate
        return tuple(sorted((Change(text, gain) for text, gain in gains.items() if gain > 1.02), key=lambda c: -c.gain))
