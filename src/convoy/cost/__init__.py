"""What a plan costs: seconds of layers and collectives, the timeline of a step, memory of a rank.

Nothing here runs a network: times that were measured come in as numbers.
"""

from convoy.cost.additive import Additive
from convoy.cost.assumed import Assumed, Rate, interconnect
from convoy.cost.calibrated import Calibrated
from convoy.cost.costs import Around, Costs
from convoy.cost.device import Device, this_device
from convoy.cost.link import Curve, Link, Links
from convoy.cost.local import local_piece, piece
from convoy.cost.memory import RankMemory, rank_memory
from convoy.cost.piece import Operand, Piece
from convoy.cost.roofline import Roofline
from convoy.cost.step import predict, step_tasks
from convoy.cost.store import ProfileStore
from convoy.cost.timeline import Timeline, simulate
from convoy.cost.times import LayerTimes, Table, Times
from convoy.cost.trace import Event, events, trace, write_trace
from convoy.cost.update import Update

__all__ = [
    "Additive",
    "Around",
    "Assumed",
    "Calibrated",
    "Costs",
    "Curve",
    "Device",
    "Event",
    "LayerTimes",
    "Link",
    "Links",
    "Operand",
    "Piece",
    "ProfileStore",
    "RankMemory",
    "Rate",
    "Roofline",
    "Table",
    "Timeline",
    "Times",
    "Update",
    "events",
    "interconnect",
    "local_piece",
    "piece",
    "predict",
    "rank_memory",
    "simulate",
    "step_tasks",
    "this_device",
    "trace",
    "write_trace",
]
