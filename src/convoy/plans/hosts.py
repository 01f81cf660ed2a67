"""Which axes of a plan lie inside hosts, and which across them."""

from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan

_ONCE_AN_UPDATE = ("sample", "replicate")
"""Strategies that need no communication in a layer: the ranks exchange gradients once for an update, if anything."""


def across(mesh: Mesh, per_host: int) -> tuple[str, ...]:
    """Names of the axes whose groups have ranks in several hosts.

    Args:
        mesh: ranks are numbered host by host.
        per_host: ranks of each host.
    """
    return tuple(
        mesh.names[axis]
        for axis in mesh.axes
        if any(len({rank // per_host for rank in ranks}) > 1 for ranks in mesh.groups((axis,)))
    )


def note_on_hosts(plan: Plan, per_host: int) -> list[str]:
    """A sentence, where another order of the axes would keep the layers' communication inside hosts.

    Args:
        plan: as it is to run.
        per_host: ranks of each host.
    """
    if plan.mesh.num_devices % per_host:
        return []
    busy = {
        axis: sorted({given[axis] for _, given in plan.layers if axis in given} - set(_ONCE_AN_UPDATE))
        for axis in plan.mesh.names
    }
    order = sorted(range(len(plan.mesh.names)), key=lambda axis: bool(busy[plan.mesh.names[axis]]))
    other = Mesh(tuple(plan.mesh.names[axis] for axis in order), tuple(plan.mesh.sizes[axis] for axis in order))
    slow, slow_otherwise = ([name for name in across(mesh, per_host) if busy[name]] for mesh in (plan.mesh, other))
    if len(slow_otherwise) >= len(slow):
        return []
    name = next(name for name in slow if name not in slow_otherwise)
    size = plan.mesh.sizes[plan.mesh.names.index(name)]
    return [
        f"axis {name} of {plan} ({', '.join(busy[name])} over {size}) lies across hosts of {per_host}, and its layers "
        f"communicate over the network: as {Plan(other, plan.layers)} it would lie inside them"
    ]
