"""Collectives of CPU tensors between ranks of one host, through memory that all of them map.

Gloo sends every byte through the network stack, also on one host: on a device of one core that costs as much time as
some layers take. Here a rank copies what it has into the shared memory, and the others read it from there.
"""

from convoy.engine.shared_memory.channel import Channel
from convoy.engine.shared_memory.meeting import meet

__all__ = ["Channel", "meet"]
