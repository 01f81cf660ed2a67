"""The measured pieces that are most like one that was not, and how far they are from what a model says of them."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.cost.piece import Piece

Ratios = tuple[float, float]
"""Measured over modelled, forward and backward; 0 where there is nothing to compare."""

_COUNT = 4
_WINDOW = 16
_UNLIKE = 3.0
"""How far apart, in factors of e, two pieces count beyond their sizes for each option in which they differ."""


@dataclass(frozen=True)
class _Known:
    work: float
    features: tuple[float, ...]
    options: frozenset[tuple[str, object]]
    gradients: tuple[bool, ...]
    ratios: Ratios


class Neighbours:
    """Measured pieces of one kind.

    Args:
        ratios: of each of them.
    """

    def __init__(self, ratios: Mapping[Piece, Ratios]) -> None:
        known = sorted((_known(piece, found) for piece, found in ratios.items()), key=lambda one: one.work)
        self._all = known
        self._alike: dict[frozenset[tuple[str, object]], list[_Known]] = {}
        for one in known:
            self._alike.setdefault(one.options, []).append(one)

    def correction(self, piece: Piece) -> Ratios:
        """What to multiply the model's times of a piece by: the mean of its neighbours' ratios, the nearer the more.

        Pieces with other options count only where too few have the same.
        """
        mine = _known(piece, (0.0, 0.0))
        alike = self._alike.get(mine.options, [])
        among = _around(alike if len(alike) >= _COUNT else self._all, mine.work)
        near = sorted(((_distance(mine, other), at) for at, other in enumerate(among)))[:_COUNT]
        weighted = [(1 / (0.01 + far * far), among[at].ratios) for far, at in near]
        forward, backward = (
            [(weight, ratios[way]) for weight, ratios in weighted if ratios[way] > 0] for way in (0, 1)
        )
        return _mean(forward), _mean(backward)


def _known(piece: Piece, ratios: Ratios) -> _Known:
    flops, moved = piece.flops.forward, piece.bytes.forward
    tensors = (*piece.inputs[:2], *piece.outputs[:1])
    sizes = (math.log(1 + size) for operand in tensors for size in operand.shape)
    features = (math.log(1 + flops), math.log(1 + moved), *sizes)
    options = frozenset(option for option in piece.options if option[0] != "padding")
    return _Known(sum(features[:2]), features, options, tuple(operand.gradient for operand in piece.inputs), ratios)


def _around(known: Sequence[_Known], work: float) -> Sequence[_Known]:
    """Those with about as much work."""
    at = bisect_left(known, work, key=lambda one: one.work)
    return known[max(0, at - _WINDOW) : at + _WINDOW]


def _distance(one: _Known, other: _Known) -> float:
    """Zero for the same sizes; a factor of e in all sizes is about one."""
    if len(one.features) != len(other.features):
        return 4 * _UNLIKE
    sizes = math.dist(one.features, other.features) / math.sqrt(2)
    unlike = max(len(one.options - other.options), len(other.options - one.options))
    return sizes + _UNLIKE * unlike + (one.gradients != other.gradients)


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    """The weighted geometric mean."""
    total = sum(weight for weight, _ in weighted)
    return math.exp(sum(weight * math.log(value) for weight, value in weighted) / total) if total else 1.0
