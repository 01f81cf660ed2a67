"""A network as a list of calls with shapes; knows nothing of devices."""

from convoy.graph.graph import Call, CaptureError, Graph, Ref, Value

__all__ = ["Call", "CaptureError", "Graph", "Ref", "Value"]
