"""Operations: how each is recognized, divided over devices and run, what it costs and keeps for the backward pass."""

from convoy.ops.operation import Operation
from convoy.ops.registry import OPERATIONS, capture, place, work

__all__ = ["OPERATIONS", "Operation", "capture", "place", "work"]
