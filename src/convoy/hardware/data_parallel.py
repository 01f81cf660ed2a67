"""Data parallelism of a network on a machine that is not at hand, in closed form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.hardware.catalog import Device, Machine
from convoy.hardware.exchange import Site, Step, is_through_host, several, site_of
from convoy.hardware.speed import Software, Work, coefficients_of, times


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
        steps = [self._of(device, max(images, 1), len(shares), site) for device, images in pairs]
        return max(steps, key=lambda step: step.seconds)

    def alone(self, device: Device, images: float) -> float:
        """Seconds of a step of one device by itself."""
        return self._of(device, images, 1, site_of(Machine("", (device,), 1, device.host))).seconds

    def _of(self, device: Device, images: float, count: int, site: Site) -> Step:
        precision = units(device, self.precision)
        alone = times(self.work, images, device, precision, self.software)
        return several(alone, self.work, precision, self.software.framework, count, site)

    def shares(self, batch: int) -> tuple[int, ...]:
        """The images of each device by which all end at about the same time: as they are equal, even ones."""
        devices = self.machine.devices
        speed_of = {device: 1 / self.alone(device, batch / len(devices)) for device in set(devices)}
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
        link = "host memory" if is_through_host(self.machine) else self.machine.link.partition("-")[0]
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
        others = {
            "a compiler that fuses": replace(self, software=replace(software, compiled=True)),
            "updates recorded as CUDA graphs": replace(self, software=recorded),
        }
        if not software.compiled:
            text = "as convoy train by default, updates recorded as CUDA graphs with Convoy's batch norm"
            others[text] = replace(self, software=replace(recorded, kernels=True))
        if self.precision not in ("bf16", "fp16") and self.machine.devices[0].fp16:
            others = {"half precision": replace(self, precision="bf16"), **others}
        seconds_of = {text: other.step(shares).seconds for text, other in others.items()}
        seconds_of["links twice as fast"] = done.seconds - done.exposed / 2
        if done.feed > done.alone:
            seconds_of["input twice as fast"] = max(done.alone, done.feed / 2)
        gains = {text: done.seconds / seconds for text, seconds in seconds_of.items()}
        gains["twice the batch"] = 2 * sum(shares) / self.step([2 * share for share in shares]).seconds / rate
        return tuple(sorted((Change(text, gain) for text, gain in gains.items() if gain > 1.02), key=lambda c: -c.gain))
