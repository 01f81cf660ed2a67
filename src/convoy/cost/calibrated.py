"""Times of pieces that were not measured, from those that were: a roofline, corrected by its nearest neighbours.

How far a layer stays below the roofline depends on its kind and on its sizes, and changes slowly with them. So the
roofline gives the way from one size to another, and the measured neighbours give the height.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from convoy.cost.piece import VIEWS, Both, Piece
from convoy.cost.roofline import Roofline
from convoy.cost.times import Times

_NEIGHBOURS = 4
_OTHER_KIND = 3.0
"""How far apart, in factors of e, two pieces count beyond their sizes for each option in which they differ."""

Features = tuple[float, ...]


@dataclass(frozen=True)
class _Known:
    piece: Piece
    features: Features
    forward: float
    backward: float


class Calibrated:
    """Times that are exact where measured, and elsewhere those of the nearest measured pieces of the kind, scaled.

    Args:
        measured: what is known. Empty pieces and views calibrate nothing.
        roofline: of the device; `fitted` makes one from what was measured.
    """

    def __init__(self, measured: Mapping[Piece, Times], roofline: Roofline | None = None) -> None:
        self.measured = dict(measured)
        self.roofline = roofline or fitted(measured)
        self._by_kind: dict[tuple[str, str], list[_Known]] = {}
        for piece, times in self.measured.items():
            model = self.roofline(piece)
            if model.forward > 0 and times.forward > 0:
                back = times.backward / model.backward if model.backward > 0 and times.backward > 0 else 0.0
                known = _Known(piece, _features(piece), times.forward / model.forward, back)
                self._by_kind.setdefault((piece.op, piece.function), []).append(known)
        self._found: dict[Piece, Times] = {}
        everything = [known for group in self._by_kind.values() for known in group]
        self._of_op = {op: _middle([one for one in everything if one.piece.op == op]) for op, _ in self._by_kind}
        self._of_bound = {
            arithmetic: _middle(
                [one for one in everything if (one.piece.flops.forward > 0) == arithmetic] or everything
            )
            for arithmetic in (False, True)
        }

    def __call__(self, piece: Piece, /) -> Times:
        """Seconds of a piece."""
        if piece in self.measured:
            return self.measured[piece]
        if piece not in self._found:
            model = self.roofline(piece)
            forward, backward = self._factors(piece)
            self._found[piece] = Times(model.forward * forward, model.backward * backward)
        return self._found[piece]

    def _factors(self, piece: Piece) -> tuple[float, float]:
        """Measured over roofline, forward and backward."""
        known = self._by_kind.get((piece.op, piece.function), [])
        if not known:
            return self._of_op.get(piece.op, self._of_bound[piece.flops.forward > 0])
        mine = _features(piece)
        near = sorted((_distance(piece, mine, other), at) for at, other in enumerate(known))[:_NEIGHBOURS]
        weights = [(1 / (0.01 + distance * distance), known[at]) for distance, at in near]
        forward = _mean([(weight, other.forward) for weight, other in weights])
        backward = _mean([(weight, other.backward) for weight, other in weights if other.backward > 0])
        return forward, backward if backward > 0 else forward


def fitted(measured: Mapping[Piece, Times]) -> Roofline:
    """A roofline from measured pieces: the ceilings that nine tenths of the large ones stay below.

    Where there is nothing to fit to, that of a slow core, so that ratios between pieces still say something.
    """
    arithmetic, memory, least = [], [], []
    for piece, times in measured.items():
        if piece.is_empty or piece.op in VIEWS or times.forward <= 0:
            continue
        flops, moved = piece.flops.forward, piece.bytes.forward
        if flops > 1e7:
            arithmetic.append(flops / times.forward)
        elif moved > 1e5 and not flops:
            memory.append(moved / times.forward)
        least.append(times.forward)
    overhead = min(least, default=0.0) / 2
    return Roofline(_upper(arithmetic, 5e10), _upper(memory, 1e10), min(overhead, 1e-5))


def _upper(values: Iterable[float], otherwise: float) -> float:
    found = sorted(values)
    return found[int(0.9 * (len(found) - 1))] if found else otherwise


def _features(piece: Piece) -> Features:
    """Logarithms of what the efficiency of a kernel depends on, two tensors' sizes by dimension."""
    flops, moved = Both(*piece.flops), Both(*piece.bytes)
    tensors = (piece.inputs[:2], piece.outputs[:1])
    sizes = [math.log(1 + size) for group in tensors for operand in group for size in operand.shape]
    return (math.log(1 + flops.forward), math.log(1 + moved.forward), *sizes)


def _distance(piece: Piece, features: Features, other: _Known) -> float:
    """Zero for the same sizes; a factor of e in all sizes is about one."""
    if len(features) != len(other.features):
        return 4 * _OTHER_KIND
    sizes = math.sqrt(sum((a - b) ** 2 for a, b in zip(features, other.features, strict=True)) / 2)
    mine, theirs = dict(piece.options), dict(other.piece.options)
    unlike = sum(mine.get(name) != theirs.get(name) for name in {*mine, *theirs} if name != "padding")
    gradients = [operand.gradient for operand in piece.inputs] != [o.gradient for o in other.piece.inputs]
    return sizes + _OTHER_KIND * unlike + gradients


def _mean(weighted: list[tuple[float, float]]) -> float:
    """The weighted geometric mean."""
    total = sum(weight for weight, _ in weighted)
    return math.exp(sum(weight * math.log(value) for weight, value in weighted) / total) if total else 0.0


def _middle(known: list[_Known]) -> tuple[float, float]:
    forward = median([one.forward for one in known]) if known else 1.0
    backward = [one.backward for one in known if one.backward > 0]
    return forward, median(backward) if backward else forward
