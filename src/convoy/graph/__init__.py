"""A network as a list of calls with shapes, work and bytes; knows nothing of devices."""

from convoy.graph.graph import Call, Graph, Ref, Value

__all__ = ["Call", "Graph", "Ref", "Value"]
