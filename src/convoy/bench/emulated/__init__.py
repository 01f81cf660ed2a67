"""Emulates a cluster on one Linux machine: devices with a share of a core each, hosts that only a link joins.

cluster = Cluster.read("four.yaml")
with emulate(cluster) as places:
    ...                                # in the process of a rank, before torch starts threads:
    places[rank].enter()
    os.environ |= places[rank].environment
"""

from convoy.bench.emulated.cluster import Cluster, ClusterDevice
from convoy.bench.emulated.emulation import EmulatedDevice, emulate

__all__ = ["Cluster", "ClusterDevice", "EmulatedDevice", "emulate"]
