"""The devices of an emulated cluster, and what may be said of them and of the links of their hosts."""

import math
import re
from dataclasses import dataclass

from convoy.errors import ConvoyError

_SLOWEST = 0.01
MOST = 250
"""Devices of a cluster."""
_RATE = re.compile(r"(\d+(?:\.\d+)?)[kmg]bit")


@dataclass(frozen=True)
class Device:
    """One of a cluster.

    Attributes:
        speed: the share of a core that it has, up to 1.
        host: the name of the host that it is in.
    """

    speed: float
    host: str


def alike(count: int, speed: float, hosts: int | None) -> tuple[Device, ...]:
    """Devices of one speed, consecutive ones in each of some hosts, or each in one of its own.

    Raises:
        ConvoyError: there are no devices, or more hosts than devices.
    """
    if not 1 <= count <= MOST:
        raise ConvoyError(f"a cluster of {count} devices is not emulated: write a count from 1 to {MOST}")
    hosts = count if hosts is None else hosts
    if not 1 <= hosts <= count:
        raise ConvoyError(f"{count} devices cannot be in {hosts} hosts: write from 1 to {count} hosts")
    return tuple(Device(speed, f"host{number * hosts // count}") for number in range(count))


def check_speed(speed: object, what: str) -> float:
    """Refuse a share of a core that cannot be.

    Raises:
        ConvoyError: it is no number, or none from 0.01 to 1.
    """
    number = isinstance(speed, int | float) and not isinstance(speed, bool)
    if not number or not math.isfinite(speed) or not _SLOWEST <= speed <= 1:  # type: ignore[operator,arg-type]
        raise ConvoyError(
            f"the speed of {what} is {speed!r}: write the share of a core that it has, from {_SLOWEST} to 1"
        )
    return float(speed)  # type: ignore[arg-type]


def check_rate(rate: object) -> None:
    """Refuse what `tc` would not take, or would take for something else.

    Raises:
        ConvoyError: it is such.
    """
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if match is None or float(match[1]) == 0:
        raise ConvoyError(f"the rate of a link is {rate!r}: write e.g. 1gbit or 300mbit")
