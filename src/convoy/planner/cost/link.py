"""How long a collective takes over the ranks of a group, by its bytes: measured, assumed, or by the name of a link.

A measured link is a curve through the points that were measured: there are regimes (a latency, a protocol for small
messages, caches that large ones fall out of), so that one latency and one rate do not describe it. Where nothing can
be measured, `ring` gives the α-β cost of the usual algorithms (Thakur, Rabenseifner and Gropp, 2005).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
from pydantic import TypeAdapter

from convoy.errors import ConvoyError
from convoy.hardware.catalog import Hop, link_named, links
from convoy.plans.mesh import Axes, Mesh

# `all_reduce` is by bytes of the tensor that each rank has, `exchange`, which gives activations in new tensors, by the
# bytes that the rank sends to others that sends most
Collective = Literal["all_reduce", "exchange"]
KINDS: tuple[Collective, ...] = get_args(Collective)

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """A collective of all groups over some axes."""

    axes: Axes
    kind: Collective
    bytes: tuple[int, ...]  # of each rank, as `Link.seconds` counts them for the kind


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes, straight between measured points and exact at them. Below the smallest point the time is that
    of the point: it is mostly latency. Above the largest the last slope goes on; where there is none upwards, the rate
    of the last point."""

    points: tuple[tuple[int, float], ...]  # (bytes, seconds), ascending in bytes, each number of bytes once

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or any(seconds < 0 for _, seconds in self.points):
            raise ConvoyError(f"a curve needs points of ascending bytes and seconds from 0, but has {self.points}")

    @staticmethod
    def line(latency: float, per_byte: float) -> "Curve":
        """Seconds of no bytes, and of each."""
        return Curve(((0, latency), (1 << 30, latency + (1 << 30) * per_byte)))

    @staticmethod
    def through(measured: Iterable[tuple[int, float]]) -> "Curve":
        """The curve through measured points in any order; the median of those of one size."""
        by_size: dict[int, list[float]] = {}
        for size, seconds in measured:
            by_size.setdefault(size, []).append(seconds)
        return Curve(tuple((size, median(by_size[size])) for size in sorted(by_size)))

    def __call__(self, num_bytes: float) -> float:
        size, seconds = self.points[-1]
        if num_bytes <= size:
            return float(np.interp(num_bytes, [point[0] for point in self.points], [point[1] for point in self.points]))
        before_size, before = self.points[-2] if len(self.points) > 1 else (0, seconds)
        slope = (seconds - before) / (size - before_size) if seconds > before else seconds / max(size, 1)
        return seconds + (slope if size else 0.0) * (num_bytes - size)


@dataclass(frozen=True)
class Link:
    """Seconds of the collectives of a group of ranks, while these do nothing else."""

    all_reduce: Curve
    exchange: Curve
    overlap: bool = False  # messages travel beside the computation; otherwise gradients are added after it
    # The part of a message's time that it takes from the computation, where they overlap: 0 for hardware that moves
    # data by itself, 1 where moving them takes the core that computes. NCCL's kernels run on some of a GPU's
    # processors, which others then lack.
    cpu_share: float = 0.0
    host: float = 0.0  # for the host to issue a collective; 0 where it is the device

    def faster(self, factor: float) -> "Link":
        """One that carries every message in 1/`factor` of the time."""
        points = {kind: getattr(self, kind).points for kind in KINDS}
        curves: dict[str, Any] = {kind: Curve(tuple((n, s / factor) for n, s in points[kind])) for kind in KINDS}
        return replace(self, **curves)

    def seconds(self, kind: Collective, num_bytes: float) -> float:
        return (self.all_reduce if kind == "all_reduce" else self.exchange)(num_bytes)


_LINK = TypeAdapter(Link)


@dataclass(frozen=True)
class Links:
    """The links of all groups of a mesh, or of all meshes of the same ranks."""

    # By the ranks of the first group (that of rank 0), which say what groups there are; a measurement has all groups
    # exchange at once, as they do in a step
    measured: Mapping[Ranks, Link] = field(default_factory=dict)
    # for groups that were not measured; without it, the slowest of the measured links serves
    otherwise: Callable[[Ranks], Link] | None = None

    def faster(self, factor: float) -> "Links":
        """Links that carry every message in 1/`factor` of the time."""
        otherwise = self.otherwise
        return Links(
            {ranks: link.faster(factor) for ranks, link in self.measured.items()},
            None if otherwise is None else lambda ranks: otherwise(ranks).faster(factor),
        )

    def of(self, mesh: Mesh, axes: Axes) -> Link:
        """The link of the groups over some axes of a mesh; a ConvoyError where nothing is known of any link."""
        return self._first_known(first_group(mesh, axes))

    def between(self, mesh: Mesh, axis: int, source: int, target: int) -> Link:
        """The link between ranks at two places on an axis, the same on all others; a ConvoyError where none is known.
        Where just these were not measured, those as far apart at the beginning of the axis serve; then all along it."""
        first, last = sorted((source, target))
        pairs = (
            tuple(mesh.rank([place if a == axis else 0 for a in mesh.axes]) for place in places)
            for places in ((first, last), (0, last - first))
        )
        return self._first_known(*pairs, first_group(mesh, (axis,)))

    def _first_known(self, *groups: Ranks) -> Link:
        for ranks in groups:
            if ranks in self.measured:
                return self.measured[ranks]
        if self.otherwise is not None:
            return self.otherwise(groups[0])
        if not self.measured:
            raise ConvoyError(
                f"nothing is known of the link between ranks {list(groups[0])}: measure it or assume a rate"
            )
        return max(self.measured.values(), key=lambda link: link.all_reduce(1 << 22))

    def to_list(self) -> list[dict[str, Any]]:
        return [
            {"ranks": ranks, **asdict(link), **{kind: getattr(link, kind).points for kind in KINDS}}
            for ranks, link in self.measured.items()
        ]

    @staticmethod
    def from_list(rows: Sequence[Mapping[str, Any]]) -> "Links":
        """The links that `to_list` wrote; a KeyError, TypeError or ValueError where it is none."""
        of_rows = [{**row, **{kind: {"points": row[kind]} for kind in KINDS}} for row in rows]
        return Links({tuple(map(int, row["ranks"])): _LINK.validate_python(row) for row in of_rows})


def first_group(mesh: Mesh, axes: Axes) -> Ranks:
    """The ranks of rank 0's group over some axes."""
    origin = (0,) * len(mesh.sizes)
    return tuple(mesh.rank(place) for place in mesh.group(origin, tuple(sorted(axes))))


def ring(hop: Hop, ranks: int, overlap: bool, cpu_share: float) -> Link:
    """The link between so many ranks: a ring adds a tensor in 2(k-1) hops of an n/k-th (Patarasuk and Yuan, 2009); in
    an exchange a rank sends to the k-1 others one after another."""
    hops = ranks - 1
    all_reduce = Curve.line(2 * hops * hop.latency, 2 * hops / max(1, ranks) / hop.rate)
    return Link(all_reduce, Curve.line(hops * hop.latency, 1 / hop.rate), overlap, cpu_share)


def assumed(
    between: Hop, inside: Hop | None = None, per_host: int = 1, *, overlap: bool = True, cpu_share: float = 0.0
) -> Links:
    """Links of hosts with the same number of devices each, numbered host by host; inside of one it is as between them
    unless another hop is named."""

    def link(ranks: Ranks, /) -> Link:
        one_host = len({rank // per_host for rank in ranks}) == 1
        return ring(inside if one_host and inside is not None else between, len(ranks), overlap, cpu_share)

    return Links(otherwise=link)


def links_named(text: str, on_cpu: bool) -> tuple[Links, str]:
    """Links between devices that are not at hand, and a note on them; a ConvoyError where nobody knows such a link.

    `10gbit`, or `10gbit,8xnvlink4` for hosts of 8 devices that nvlink4 joins. On CPUs moving messages takes cycles from
    what computes: as much as between two processes of one host at the rate at which gloo fills a core (`loopback` in
    the catalog), less in proportion.
    """
    across, comma, within = text.partition(",")
    match = re.fullmatch(r"\s*([1-9][0-9]*)\s*x\s*(.+)", within)
    between = link_named(across)
    if comma and match is None:
        raise ConvoyError(
            f"{text!r} is no link: write e.g. 10gbit,8xnvlink4 for hosts of 8 devices with nvlink4 inside"
        )
    note = (
        f"the links are assumed: {text}, {between.rate / 1e9:.3g} GB/s after {between.latency * 1e6:.3g} µs "
        f"({between.source})"
    )
    inside, per_host = (link_named(match[2]), int(match[1])) if match is not None else (None, 1)
    if inside is not None:
        note += f"; inside hosts of {per_host} devices {inside.rate / 1e9:.3g} GB/s ({inside.source})"
    share = min(1.0, between.rate / links()["loopback"].rate) if on_cpu else 0.0
    return assumed(between, inside, per_host, cpu_share=share), note
