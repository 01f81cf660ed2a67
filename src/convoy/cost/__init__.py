"""What a plan costs: seconds of layers and collectives, the timeline of a step, memory of a rank.

Nothing here runs a network: times that were measured come in as numbers.
"""

from convoy.cost.assumed import Assumed, Rate, interconnect
from convoy.cost.link import Curve, Link, Links
from convoy.cost.local import local_piece, piece
from convoy.cost.piece import Operand, Piece
from convoy.cost.times import LayerTimes, Table, Times

__all__ = [
    "Assumed",
    "Curve",
    "LayerTimes",
    "Link",
    "Links",
    "Operand",
    "Piece",
    "Rate",
    "Table",
    "Times",
    "interconnect",
    "local_piece",
    "piece",
]
