"""The devices as a grid with named axes."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, TypeVar

T = TypeVar("T")
Axes = tuple[int, ...]
Coordinates = tuple[int, ...]

# The name of the axis that divides the network itself: a submodel, which is a stage, for each place on it. It is an
# axis and no strategy: a strategy says what is done with a layer, a stage is a set of layers. So `stage=2,sample=4`
# reads as other plans do, checks, hosts and sizes need nothing new, and no layer can ask for `stage`.
STAGE = "stage"


@dataclass(frozen=True)
class Mesh:
    """Names and sizes of the axes, outermost first; ranks are numbered in row-major order.

    Inside the library an axis is given by its position, which the names map to.

    >>> mesh = convoy.Mesh(("node", "gpu"), (2, 4))
    >>> mesh.num_devices, mesh.coordinates(5)
    (8, (1, 1))
    >>> mesh.groups((1,))  # ranks that differ on the axis gpu only
    [[0, 1, 2, 3], [4, 5, 6, 7]]

    Attributes:
        names: of the axes.
        sizes: number of devices along each.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes: Iterable[Any] = self.sizes  # a list or numpy's integers may be given; what is no size, a plan refuses
        whole = (int(n) if not isinstance(n, bool) and isinstance(n, Integral) else n for n in sizes)
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "sizes", tuple(whole))

    @cached_property
    def num_devices(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def axes(self) -> range:
        """Positions of all axes."""
        return range(len(self.sizes))

    @cached_property
    def stage_axis(self) -> int | None:
        """Position of the axis named `stage`, on which the network is divided and no layer is; None without one."""
        return self.names.index(STAGE) if STAGE in self.names else None

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a rank, one for each axis."""
        place = []
        for size in reversed(self.sizes):
            rank, remainder = divmod(rank, size)
            place.append(remainder)
        return tuple(reversed(place))

    def beside_stages(self, values: Sequence[T]) -> tuple[T, ...]:
        """Of a value for every axis, those of all but the stage axis."""
        return tuple(value for axis, value in enumerate(values) if axis != self.stage_axis)

    def stage_of(self, rank: int) -> int:
        """The stage that a rank runs; 0 where there are none."""
        return self.coordinates(rank)[self.stage_axis] if self.stage_axis is not None else 0

    def rank(self, coordinates: Sequence[int]) -> int:
        """The rank at these coordinates."""
        return self.index(coordinates, tuple(self.axes))

    def size(self, axes: Axes) -> int:
        """Number of ranks in a group over these axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, coordinates: Sequence[int], axes: Axes) -> int:
        """Position of a rank in its group over `axes` (ascending)."""
        position = 0
        for axis in axes:
            position = position * self.sizes[axis] + coordinates[axis]
        return position

    def group(self, coordinates: Sequence[int], axes: Axes) -> list[Coordinates]:
        """Coordinates of all ranks that differ from this one on `axes` only, in the order of `index`."""
        choices = [range(size) if axis in axes else (coordinates[axis],) for axis, size in enumerate(self.sizes)]
        return list(itertools.product(*choices))

    def groups(self, axes: Axes) -> list[list[int]]:
        """Ranks of every group over `axes`, the groups in order of their first rank."""
        by_places: dict[tuple[Coordinates, ...], list[int]] = {}
        for rank in range(self.num_devices):
            places = self.group(self.coordinates(rank), axes)
            by_places.setdefault(tuple(places), [self.rank(place) for place in places])
        return list(by_places.values())

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True)) or "one device"


def ranks_of(mesh: Mesh, stage: int) -> tuple[int, ...]:
    """The ranks that run a stage; all of them where there are none."""
    return tuple(rank for rank in range(mesh.num_devices) if mesh.stage_of(rank) == stage)
