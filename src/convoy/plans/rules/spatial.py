"""What the rules of layers with windows share: the rows of the output are divided, the input comes with its halo."""

from collections.abc import Mapping

from convoy.plans.layout import Layout, Split
from convoy.plans.rules.rule import Situation
from convoy.plans.windows import Window, halo_split, output_split


def slide(
    situation: Situation, given: Layout, windows: Mapping[int, Window | None]
) -> tuple[dict[int, Split], dict[int, Split], str]:
    """Follow the layout of the input: rows that are divided stay divided over the same axes.

    Args:
        situation: the call.
        given: layout of its input.
        windows: for each spatial dimension its window; None where the call has no regular one.

    Returns:
        The splits to ask the input for, those of the output, and a note on what has to be whole.
    """
    taken = {dim: split for dim, split in given.splits if dim not in windows}
    left = dict(taken)
    notes = []
    for dim, window in windows.items():
        split = given.split(dim)
        if split is None:
            continue
        if window is None:
            notes.append(f"dim {dim} is whole: its windows differ in size")
        elif window.output_size < len(split.parts):
            few = f"fewer output rows ({window.output_size}) than ranks ({len(split.parts)})"
            notes.append(f"dim {dim} is whole: {few}")
        else:
            left[dim] = output_split(window.output_size, situation.mesh, split.axes)
            taken[dim] = halo_split(window, left[dim])
    return taken, left, "; ".join(notes)


def spatial(num_dims: int, num_spatial: int) -> range:
    """The last dimensions of a tensor."""
    return range(num_dims - num_spatial, num_dims)
