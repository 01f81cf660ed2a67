"""How long a collective takes over the ranks of a group, by how many bytes it is about.

A measured link is a curve through the points that were measured: there are regimes (a latency, a protocol for small
messages, caches that large ones fall out of), so that one latency and one rate do not describe it. Where nothing can
be measured, a `Rate` gives the α-β cost of the usual algorithms (Thakur, Rabenseifner and Gropp, 2005).
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, Protocol, get_args

from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes, Mesh

Kind = Literal["all_reduce", "exchange", "reduce_scatter", "gather"]
"""`all_reduce` is by bytes of the tensor that each rank has, the others by the bytes that the rank sends to others that
sends most: `exchange` gives activations in new tensors, `reduce_scatter` and `gather` are the two halves of adding a
gradient in place, the first with its additions."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes, straight between measured points and exact at them.

    Below the smallest point the time is that of the point: it is mostly latency. Above the largest the last slope goes
    on; where there is none upwards, the rate of the last point.

    Attributes:
        points: (bytes, seconds), ascending in bytes, each number of bytes once.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or any(seconds < 0 for _, seconds in self.points):
            raise ConvoyError(f"a curve needs points of ascending bytes and seconds from 0, but has {self.points}")

    @staticmethod
    def through(measured: Iterable[tuple[int, float]]) -> "Curve":
        """The curve through measured points in any order; the median of those of one size."""
        by_size: dict[int, list[float]] = {}
        for size, seconds in measured:
            by_size.setdefault(size, []).append(seconds)
        return Curve(tuple((size, median(by_size[size])) for size in sorted(by_size)))

    def __call__(self, num_bytes: float) -> float:
        """Seconds for so many bytes."""
        sizes = [size for size, _ in self.points]
        at = bisect_right(sizes, num_bytes)
        if at == 0:
            return self.points[0][1]
        size, seconds = self.points[at - 1]
        if at < len(self.points):
            next_size, next_seconds = self.points[at]
            return seconds + (next_seconds - seconds) * (num_bytes - size) / (next_size - size)
        return seconds + self._last_slope() * (num_bytes - size)

    def _last_slope(self) -> float:
        """Seconds for a byte beyond the last point."""
        size, seconds = self.points[-1]
        if len(self.points) > 1:
            before_size, before = self.points[-2]
            slope = (seconds - before) / (size - before_size)
            if slope > 0:
                return slope
        return seconds / size if size else 0.0


@dataclass(frozen=True)
class Link:
    """What a group of ranks exchanges through.

    Attributes:
        all_reduce, exchange, reduce_scatter, gather: seconds, while the ranks do nothing else; where the last two are
            not known they are those of an exchange.
        overlap: whether messages travel beside the computation; where not, gradients are added after it.
        cpu_share: the part of the time of a message that it takes from the computation, where they overlap: 0 for
            hardware that moves data by itself, 1 where moving them takes the core that computes.
    """

    all_reduce: Curve
    exchange: Curve
    overlap: bool = False
    cpu_share: float = 0.0
    reduce_scatter: Curve | None = None
    gather: Curve | None = None

    def seconds(self, kind: Kind, num_bytes: float) -> float:
        """Time of one collective."""
        return self._curve(kind)(num_bytes)

    def _curve(self, kind: Kind) -> Curve:
        match kind:
            case "all_reduce":
                return self.all_reduce
            case "reduce_scatter":
                return self.reduce_scatter or self.exchange
            case "gather":
                return self.gather or self.exchange
            case "exchange":
                return self.exchange

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        curves: dict[str, Curve | None] = {kind: getattr(self, kind) for kind in get_args(Kind)}
        points = {kind: [list(point) for point in curve.points] for kind, curve in curves.items() if curve}
        return {**points, "overlap": self.overlap, "cpu_share": self.cpu_share}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> "Link":
        """The link that `to_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        curves: dict[str, Curve] = {
            kind: Curve(tuple((int(size), float(seconds)) for size, seconds in given[kind]))
            for kind in get_args(Kind)
            if kind in given or kind in ("all_reduce", "exchange")
        }
        return Link(overlap=bool(given["overlap"]), cpu_share=float(given["cpu_share"]), **curves)


class AnyLink(Protocol):
    """A link for ranks that nobody has measured."""

    def __call__(self, ranks: Ranks, /) -> Link:
        """The link between these ranks."""


@dataclass(frozen=True)
class Links:
    """The links of all groups of a mesh, or of all meshes of the same ranks.

    Attributes:
        measured: by the ranks of the first group (that of rank 0), which say what groups there are; a measurement has
            all groups exchange at once, as they do in a step.
        otherwise: for groups that were not measured. Without it, the slowest of the measured links serves.
    """

    measured: Mapping[Ranks, Link] = field(default_factory=dict)
    otherwise: AnyLink | None = None

    def of(self, mesh: Mesh, axes: Axes) -> Link:
        """The link of the groups over some axes of a mesh.

        Raises:
            ConvoyError: nothing is known of any link.
        """
        ranks = first_group(mesh, axes)
        found = self.measured.get(ranks)
        if found is not None:
            return found
        if self.otherwise is not None:
            return self.otherwise(ranks)
        if not self.measured:
            raise ConvoyError(f"nothing is known of the link between ranks {list(ranks)}: measure it or assume a rate")
        return max(self.measured.values(), key=lambda link: link.all_reduce(1 << 22))

    def to_list(self) -> list[dict[str, Any]]:
        """The measured links, as JSON has them."""
        return [{"ranks": list(ranks), **link.to_dict()} for ranks, link in self.measured.items()]

    @staticmethod
    def from_list(given: Sequence[Mapping[str, Any]], otherwise: AnyLink | None = None) -> "Links":
        """The links that `to_list` wrote."""
        return Links({tuple(map(int, one["ranks"])): Link.from_dict(one) for one in given}, otherwise)


def first_group(mesh: Mesh, axes: Axes) -> Ranks:
    """The ranks of rank 0's group over some axes."""
    origin = (0,) * len(mesh.sizes)
    return tuple(mesh.rank(place) for place in mesh.group(origin, tuple(sorted(axes))))
