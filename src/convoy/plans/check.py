"""Whether a layer can be divided as a plan says; if not, the sentence names the layer, the axis and the way out."""

from collections.abc import Sequence

from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh


def axis_names(mesh: Mesh, axes: Sequence[int]) -> str:
    """How a sentence names axes: `filter`, or `node·gpu` for two over which one dimension is divided."""
    return "·".join(mesh.names[axis] for axis in axes)


def check_filter(where: str, axes: str, count: int, channels: int, groups: int = 1) -> None:
    """Refuse more ranks than output channels, or than groups: a group of channels stays on one rank.

    Args:
        where: how the sentence names the layer, `layer 'features.0'`.
        axes: names of the mesh axes, as `axis_names` gives them.
        count: ranks over these axes.
        channels: output channels or features of the whole layer.
        groups: of the convolution.

    Raises:
        ConvoyError: some rank would have nothing to do.
    """
    _check_groups(where, axes, count, groups)
    if count > channels:
        raise ConvoyError(_too_few(where, axes, count, channels, "output channel"))


def check_channel(where: str, axes: str, count: int, channels: int, groups: int = 1) -> None:
    """Refuse more ranks than input channels, or than groups.

    A grouped convolution is divided between its groups, so that `channel` is there what `filter` is.

    Args:
        where: how the sentence names the layer, `layer 'features.0'`.
        axes: names of the mesh axes, as `axis_names` gives them.
        count: ranks over these axes.
        channels: input channels or features of the whole layer.
        groups: of the convolution.

    Raises:
        ConvoyError: some rank would have nothing to do.
    """
    _check_groups(where, axes, count, groups)
    if count > channels:
        raise ConvoyError(_too_few(where, axes, count, channels, "input channel"))


def check_rows(where: str, axes: str, count: int, rows: int, dim_name: str) -> None:
    """Refuse more ranks than rows or columns of a layer's output.

    Args:
        where: how the sentence names the layer, `layer 'features.0'`.
        axes: names of the mesh axes, as `axis_names` gives them.
        count: ranks over these axes.
        rows: size of the divided dimension of the output.
        dim_name: `height` or `width`.

    Raises:
        ConvoyError: some rank would have nothing to do.
    """
    if count > rows:
        thing = "output row" if dim_name == "height" else "output column"
        raise ConvoyError(_too_few(where, axes, count, rows, thing, "give it larger images"))


def check_devices(mesh: Mesh, num_devices: int) -> None:
    """Refuse a mesh that has not as many ranks as there are devices.

    Raises:
        ConvoyError: the numbers differ.
    """
    if mesh.num_devices != num_devices:
        needs = f"the plan's mesh {mesh} needs {_several(mesh.num_devices, 'device')}"
        raise ConvoyError(
            f"{needs}, but there {'is' if num_devices == 1 else 'are'} {num_devices}: start it with "
            f"--devices {mesh.num_devices} (a script: torchrun --nproc-per-node {mesh.num_devices}), or change the "
            f"plan's sizes so that their product is {num_devices}"
        )


def _check_groups(where: str, axes: str, count: int, groups: int) -> None:
    if 1 < groups < count:
        raise ConvoyError(
            f"{where} is a convolution in {groups} groups, which cannot be divided over the {count} ranks of "
            f"{_axis(axes)} because each group stays on one rank: make the axis at most {groups}, or give this layer "
            f"sample or replicate on it in a YAML plan"
        )


def _too_few(where: str, axes: str, count: int, number: int, thing: str, other: str = "") -> str:
    ways = [f"make the axis at most {number}"] if number > 1 else []
    ways += [other] if other else []
    ways += ["give this layer sample or replicate on it in a YAML plan"]
    only = "only " if number else ""
    return (
        f"{where} has {only}{_several(number, thing)} for the {count} ranks of {_axis(axes)}: "
        f"{', '.join(ways[:-1])}{', or ' if len(ways) > 1 else ''}{ways[-1]}"
    )


def _axis(names: str) -> str:
    return f"axes {names}" if "·" in names else f"axis {names}"


def _several(number: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"
