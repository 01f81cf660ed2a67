"""Links between devices that one does not have: a latency and a rate, by themselves or of a known interconnect."""

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

from convoy.cost.link import Curve, Link, Links, Ranks
from convoy.errors import ConvoyError

_SIZES = tuple(1 << power for power in range(10, 31, 2))


@dataclass(frozen=True)
class Rate:
    """One hop between two devices.

    Attributes:
        latency: seconds of a message without content.
        bytes_per_s: in one direction.
    """

    latency: float
    bytes_per_s: float

    @staticmethod
    def gbit(gbit_per_s: float, latency: float = 5e-5) -> "Rate":
        """A network of so many Gbit/s, of which nine tenths carry data."""
        return Rate(latency, 0.9 * gbit_per_s * 1e9 / 8)

    def link(self, ranks: int, overlap: bool, cpu_share: float) -> Link:
        """Between so many ranks: a ring adds a tensor in 2(k-1) hops of an n/k-th (Patarasuk and Yuan, 2009); in an
        exchange a rank sends to the k-1 others one after another.
        """
        hops = ranks - 1
        all_reduce = [2 * hops * (self.latency + size / max(1, ranks) / self.bytes_per_s) for size in (0, *_SIZES)]
        exchange = [hops * self.latency + size / self.bytes_per_s for size in (0, *_SIZES)]
        curves = [Curve(tuple(zip((0, *_SIZES), seconds, strict=True))) for seconds in (all_reduce, exchange)]
        return Link(curves[0], curves[1], overlap, cpu_share)


@dataclass(frozen=True)
class Assumed:
    """Links of hosts with the same number of devices each, numbered host by host.

    Attributes:
        between: between devices of different hosts.
        inside: between devices of one host; as `between` where it is None.
        per_host: devices of a host.
        overlap, cpu_share: as in `Link`.
    """

    between: Rate
    inside: Rate | None = None
    per_host: int = 1
    overlap: bool = True
    cpu_share: float = 0.0

    def __call__(self, ranks: Ranks, /) -> Link:
        """The link between these ranks: the slowest part of the way decides."""
        one_host = len({rank // self.per_host for rank in ranks}) == 1
        rate = self.inside if one_host and self.inside is not None else self.between
        return rate.link(len(ranks), self.overlap, self.cpu_share)

    def links(self) -> Links:
        """As the links of any mesh."""
        return Links(otherwise=self)


@dataclass(frozen=True)
class Interconnect:
    """A row of the catalogue.

    Attributes:
        name: as the user writes it.
        rate: fitted to published measurements, or of the standard where `fitted` is not.
        source: where the numbers come from.
    """

    name: str
    rate: Rate
    fitted: bool
    source: str


@cache
def catalogue() -> dict[str, Interconnect]:
    """Known interconnects, by name."""
    text = resources.files("convoy.cost").joinpath("interconnects.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        row["name"]: Interconnect(
            row["name"],
            Rate(float(row["latency_us"]) * 1e-6, float(row["gbytes_per_s"]) * 1e9),
            row["fitted"] == "yes",
            row["source"],
        )
        for row in rows
    }


def interconnect(name: str) -> Interconnect:
    """A known interconnect.

    Raises:
        ConvoyError: nobody knows it.
    """
    known = catalogue()
    if name not in known:
        raise ConvoyError(f"{name!r} is no known interconnect: it must be one of {', '.join(known)}")
    return known[name]
