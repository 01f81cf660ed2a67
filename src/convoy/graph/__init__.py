"""A network as a list of calls with shapes, work and bytes; knows nothing of devices."""

from convoy.graph.capture import capture
from convoy.graph.graph import Call, CaptureError, Graph, Ref, Value
from convoy.graph.normalize import OPS

__all__ = ["OPS", "Call", "CaptureError", "Graph", "Ref", "Value", "capture"]
