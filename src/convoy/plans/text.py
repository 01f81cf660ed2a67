"""Plans in one line: `sample=4`, `sample=2,filter=2`, `owt=4`, `serial`."""

import re
from collections.abc import Sequence

from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh
from convoy.plans.strategies import STRATEGIES, Layers, check_axes, show, strategy_error

_EXAMPLES = "write e.g. sample=4 or sample=2,filter=2, or name a YAML file"
_PART = re.compile(r"\s*([^=\s]*)\s*=\s*([^=\s]*)\s*")


def parse_text(text: str) -> tuple[Mesh, Layers]:
    """The mesh and layers of a plan in one line.

    Each part `strategy=size` is a mesh axis, outermost first, on which every layer has that strategy. An axis has the
    name of its strategy, numbered where a strategy comes again: `sample`, `sample2`.

    Raises:
        ConvoyError: it is no plan; the sentence quotes the part that is wrong.
    """
    if text.strip() == "serial":
        return Mesh((), ()), ()
    if not text.strip():
        raise ConvoyError(f"the plan is empty: {_EXAMPLES}")
    parts = [_part(part, text) for part in text.split(",")]
    strategies = [strategy for strategy, _ in parts]
    names = axis_names_of(strategies)
    sizes = tuple(size for _, size in parts)
    check_axes(names, sizes, lambda path: f"plan {show(text)!r}: ")
    return Mesh(names, sizes), (("*", dict(zip(names, strategies, strict=True))),)


def axis_names_of(strategies: Sequence[str]) -> tuple[str, ...]:
    """Names of the axes of a plan in one line."""
    names: list[str] = []
    for strategy in strategies:
        times = sum(other == strategy for other in strategies[: len(names)]) + 1
        names.append(strategy if times == 1 else f"{strategy}{times}")
    return tuple(names)


def to_text(mesh: Mesh, layers: Layers) -> str | None:
    """The one line that `parse_text` reads as this mesh and these layers; None where there is none."""
    if not mesh.names and not layers:
        return "serial"
    if len(layers) != 1 or layers[0][0] != "*":
        return None
    strategies = layers[0][1]
    ordered = [strategies.get(name, "") for name in mesh.names]
    if not ordered or axis_names_of(ordered) != mesh.names:
        return None
    return ",".join(f"{strategy}={size}" for strategy, size in zip(ordered, mesh.sizes, strict=True))


def _part(part: str, text: str) -> tuple[str, int]:
    where = f"plan {show(text)!r}"
    stripped = part.strip()
    if not stripped:
        raise ConvoyError(f"{where} has nothing between two commas or at an end: {_EXAMPLES}")
    if stripped in ("serial", "auto"):
        raise ConvoyError(f"{where}: {stripped} stands alone, without other parts; for one device write serial")
    if re.fullmatch("[0-9]+", stripped):
        raise ConvoyError(f"{where}: {stripped} needs a strategy: write sample={stripped} to divide the samples")
    if stripped in STRATEGIES:
        raise ConvoyError(f"{where}: {stripped} needs a number of devices: write {stripped}=2")
    if stripped.count("=") > 1 and "==" not in stripped:
        raise ConvoyError(f"{where}: put a comma between two parts, as in sample=2,filter=2")
    match = _PART.fullmatch(part)
    if not match:
        words = re.fullmatch(r"(\w+)(?: *: *| +|==)([0-9]+)", stripped)
        if words and words[1] in STRATEGIES:
            raise ConvoyError(f"{where}: write {words[1]}={words[2]} instead of {stripped}")
        raise ConvoyError(f"{where}: {show(stripped)} is no part of a plan: {_EXAMPLES}")
    strategy, size = match.groups()
    if strategy in ("serial", "auto"):
        raise ConvoyError(f"{where}: {strategy} takes no number: write {strategy} alone, or sample={size or 2}")
    if strategy not in STRATEGIES:
        raise ConvoyError(f"{where}: {strategy_error(strategy)}")
    if not re.fullmatch("[0-9]{1,9}", size) or int(size) < 1:
        raise ConvoyError(f"{where}: the size of {strategy} is {show(size)}: write a whole number from 1, e.g. 2")
    return strategy, int(size)
