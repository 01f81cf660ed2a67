"""What is known of the links between the devices that a plan is for."""

import itertools
from collections.abc import Sequence

import torch

from convoy.cost.link import Curve, Link, Links, first_group
from convoy.engine.groups import Groups
from convoy.engine.link_probe import SIZES, measure_links
from convoy.plans.mesh import Axes, Mesh


def measured_links(meshes: Sequence[Mesh], largest: int, device: torch.device) -> tuple[Links, float]:
    """Measure the groups of all meshes on the ranks that have joined; all ranks call it.

    Args:
        meshes: whose groups exchange.
        largest: bytes of the largest tensor that will be sent; much larger ones are not tried.
        device: where the tensors are.

    Returns:
        The links, and the seconds that the engine takes for a redistribution in one direction, beside the collective.
    """
    sizes = [size for size in SIZES if size <= 4 * largest]
    found: dict[tuple[int, ...], Link] = {}
    overhead = 0.0
    for mesh in meshes:
        missing: dict[Axes, tuple[int, ...]] = {}
        for axes in _subsets(mesh):
            ranks = first_group(mesh, axes)
            if len(ranks) > 1 and ranks not in found and ranks not in missing.values():
                missing[axes] = ranks
        if not missing:
            continue
        for axes, times in measure_links(Groups(mesh), missing, device, sizes).items():
            overhead = max(overhead, times.overhead)
            found[missing[axes]] = Link(
                Curve.through(times.all_reduce),
                Curve.through(times.exchange),
                times.overlap,
                times.cpu_share,
                Curve.through(times.reduce_scatter),
                Curve.through(times.gather),
            )
    return Links(found), overhead


def _subsets(mesh: Mesh) -> list[Axes]:
    axes = tuple(mesh.axes)
    return [chosen for count in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, count)]
