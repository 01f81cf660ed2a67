"""Which ranks of a step do the same: one of each sort is simulated for all."""

from collections.abc import Hashable, Iterable, Sequence

from convoy.plans.mesh import Axes, Mesh


def alike(mesh: Mesh, own: Sequence[Hashable], axes: Iterable[Axes]) -> list[int]:
    """For every rank the first one that does the same, and meets ranks that do the same as those it meets.

    Colours are refined until they are stable (Weisfeiler and Leman, 1968): ranks of one colour then have equal
    timelines, because they begin alike and everything they wait for is alike.

    Args:
        mesh: the devices.
        own: what each rank does by itself.
        axes: over which ranks meet.
    """
    groups = [list(mesh.groups(each)) for each in sorted(set(axes))]
    colours = _numbered(own)
    while True:
        met: list[list[tuple[int, ...]]] = [[] for _ in own]
        for kind in groups:
            for group in kind:
                together = tuple(sorted(colours[rank] for rank in group))
                for rank in group:
                    met[rank].append(together)
        finer = _numbered([(colour, *others) for colour, others in zip(colours, met, strict=True)])
        if len(set(finer)) == len(set(colours)):
            first: dict[int, int] = {}
            return [first.setdefault(colour, rank) for rank, colour in enumerate(finer)]
        colours = finer


def _numbered(values: Sequence[Hashable]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [known.setdefault(value, len(known)) for value in values]
