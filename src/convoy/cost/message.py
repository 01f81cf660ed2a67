"""Something that ranks exchange, by what each of them has of it."""

from dataclasses import dataclass

from convoy.cost.link import Kind
from convoy.plans.mesh import Axes


@dataclass(frozen=True)
class Message:
    """A collective of all groups over some axes.

    Attributes:
        bytes: for each rank, as `Link.seconds` counts them for the kind.
    """

    axes: Axes
    kind: Kind
    bytes: tuple[int, ...]
