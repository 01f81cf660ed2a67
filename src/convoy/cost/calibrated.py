"""Times of pieces that were not measured, from those that were: a regression for each kind of layer, corrected by the
nearest neighbours.

How fast a layer runs depends on its kind and on its sizes, and changes slowly with them. So the regression gives the
way from one size to another, and the measured neighbours give the height.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from convoy.cost.neighbours import Neighbours
from convoy.cost.piece import VIEWS, Piece
from convoy.cost.regression import Regression, fit
from convoy.cost.roofline import Roofline
from convoy.cost.times import Times


class Calibrated:
    """Times that are exact where measured, and elsewhere follow from the measured pieces of the kind.

    Args:
        measured: what is known. Empty pieces and views calibrate nothing.
        roofline: of the device; by default made from what was measured.
    """

    def __init__(self, measured: Mapping[Piece, Times], roofline: Roofline | None = None) -> None:
        self.measured = dict(measured)
        self.roofline = roofline or fitted(measured)
        groups: dict[tuple[str, str], list[tuple[Piece, Times]]] = {}
        for piece, times in self.measured.items():
            if not piece.is_empty and piece.op not in VIEWS and times.forward > 0:
                groups.setdefault((piece.op, piece.function), []).append((piece, times))
        self._kinds = {kind: _kind(group, self.roofline) for kind, group in groups.items()}
        everything = [pair for group in groups.values() for pair in group]
        multiplying = [pair for pair in everything if pair[0].flops.forward > 0]
        moving = [pair for pair in everything if pair[0].flops.forward == 0]
        self._of_op = {op: self._middle([pair for pair in everything if pair[0].op == op]) for op, _ in groups}
        self._of_bound = {
            True: self._middle(multiplying or everything),
            False: self._middle(moving or everything),
        }
        self._found: dict[Piece, Times] = {}

    def __call__(self, piece: Piece, /) -> Times:
        """Seconds of a piece."""
        if piece in self.measured:
            return self.measured[piece]
        if piece not in self._found:
            self._found[piece] = self._predicted(piece)
        return self._found[piece]

    def _predicted(self, piece: Piece) -> Times:
        model = self.roofline(piece)
        forward, backward = self._of_op.get(piece.op, self._of_bound[piece.flops.forward > 0])
        found = [model.forward * forward, model.backward * backward]
        kind = self._kinds.get((piece.op, piece.function))
        if kind is not None:
            correction = kind.neighbours.correction(piece)
            for way, regression in enumerate(kind.regressions):
                if regression is not None:
                    found[way] = regression(piece) * correction[way]
        return Times(*found)

    def _middle(self, pairs: Sequence[tuple[Piece, Times]]) -> tuple[float, float]:
        """Measured over roofline, forward and backward."""
        models = [(self.roofline(piece), times) for piece, times in pairs]
        forward = [times.forward / model.forward for model, times in models if model.forward > 0]
        backward = [times.backward / model.backward for model, times in models if model.backward > 0]
        backward = [ratio for ratio in backward if ratio > 0]
        first = median(forward) if forward else 1.0
        return first, median(backward) if backward else first


@dataclass(frozen=True)
class _Kind:
    """What is known of an op and function."""

    regressions: tuple[Regression | None, Regression | None]
    neighbours: Neighbours


def _kind(group: Sequence[tuple[Piece, Times]], roofline: Roofline) -> _Kind:
    forward = fit([(piece, times.forward) for piece, times in group], 0, roofline)
    backward = fit([(piece, times.backward) for piece, times in group], 1, roofline)
    ratios = {
        piece: (_ratio(forward, piece, times.forward), _ratio(backward, piece, times.backward))
        for piece, times in group
    }
    return _Kind((forward, backward), Neighbours(ratios))


def _ratio(regression: Regression | None, piece: Piece, seconds: float) -> float:
    model = regression(piece) if regression is not None else 0.0
    return seconds / model if model > 0 else 0.0


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
