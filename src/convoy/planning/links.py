"""What is known of the links between the devices that a plan is for."""

import itertools
from collections.abc import Sequence

from convoy.cost.link import Curve, Link, Links, first_group
from convoy.engine.groups import Groups
from convoy.engine.link_probe import SIZES, measure_links
from convoy.plans.mesh import Axes, Mesh


def measured_links(meshes: Sequence[Mesh], largest: int) -> Links:
    """Measure the groups of all meshes on the ranks that have joined; all ranks call it.

    Args:
        meshes: whose groups exchange.
        largest: bytes of the largest tensor that will be sent; much larger ones are not tried.
    """
    sizes = [size for size in SIZES if size <= 4 * largest]
    found: dict[tuple[int, ...], Link] = {}
    for mesh in meshes:
        missing: dict[Axes, tuple[int, ...]] = {}
        for axes in _subsets(mesh):
            ranks = first_group(mesh, axes)
            if len(ranks) > 1 and ranks not in found and ranks not in missing.values():
                missing[axes] = ranks
        if not missing:
            continue
        for axes, times in measure_links(Groups(mesh), missing, sizes).items():
            all_reduce = Curve.through(times.all_reduce)
            exchange = Curve.through((size, seconds + times.overhead) for size, seconds in times.exchange)
            found[missing[axes]] = Link(all_reduce, exchange, times.overlap, times.cpu_share)
    return Links(found)


def _subsets(mesh: Mesh) -> list[Axes]:
    axes = tuple(mesh.axes)
    return [chosen for count in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, count)]
