"""A network as a list of calls with shapes, work and bytes; knows nothing of devices."""

from convoy.graph.capture import capture
from convoy.graph.errors import CaptureError
from convoy.graph.graph import Call, Graph, Ref, Value
from convoy.graph.normalise import OPS

__all__ = ["OPS", "Call", "CaptureError", "Graph", "Ref", "Value", "capture"]
