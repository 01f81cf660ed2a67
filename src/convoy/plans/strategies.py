"""The strategies, plans in one line (`sample=4`, `owt=4`, `serial`), and what is right for a mesh."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convoy.errors import ConvoyError
from convoy.plans.mesh import STAGE, Mesh
from convoy.terminal import brief

# patterns over module names, each with a strategy for the mesh axes that it names
Layers = tuple[tuple[str, Mapping[str, str]], ...]

Place = Callable[[tuple[str, ...]], str]  # where a part of a plan stands, as the beginning of a sentence about it


@dataclass(frozen=True)
class Strategy:
    """All that is said of a strategy, wherever it is read, checked or drawn."""

    letter: str  # stands for it in drawings
    effect: str  # on a layer, for a legend
    unit: str  # what each rank needs at least one of; empty where nothing is too small for it
    aliases: str  # words for it that people may know
    exchanges: bool = True  # whether ranks send each other activations for it in every pass


# What an axis does with a layer
STRATEGIES = {
    "sample": Strategy("S", "divides the batch", "", "data batch dp ddp samples images n", exchanges=False),
    "filter": Strategy(
        "F",
        "divides its outputs' channels",
        "output channel",
        "model tensor tp mp filters output out_channels column f k",
    ),
    "channel": Strategy("C", "divides its inputs' channels", "input channel", "channels input in_channels row c"),
    "height": Strategy("H", "divides the rows", "output row", "spatial rows h"),
    "width": Strategy("W", "divides the columns", "output column", "columns cols w"),
    "replicate": Strategy("R", "whole on every device", "", "none whole replicated full copy serial", exchanges=False),
    "owt": Strategy("", "sample for convolutions, filter for linear layers", "", "weird one-weird-trick krizhevsky"),
}

WORDS = (*STRATEGIES, STAGE)  # the words for an axis of a plan in one line

_STAGE_ALIASES = "stages pipeline pipelining pipelined pipe pp gpipe pipedream submodel submodels"


def of_layer(strategy: str, op: str) -> str:
    """The strategy that a kind of layer has: `owt`, one weird trick (Krizhevsky, 2014), stands for two others."""
    return strategy if strategy != "owt" else "filter" if op == "linear" else "sample"


_LARGEST = 1_000_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def strategy_error(word: Any, words: Sequence[str] = tuple(STRATEGIES)) -> str:
    """The sentence about a word that should be one of the strategies in `words`."""
    text = show(word)
    lowered = text.lower()
    matches = [name for name, strategy in STRATEGIES.items() if lowered in strategy.aliases.split()]
    if lowered == STAGE or lowered in _STAGE_ALIASES.split():
        if STAGE not in words:
            return (
                f"{text} is no strategy of a layer: to divide the network, give the plan an axis {STAGE}, as in stage=2"
            )
        matches = [STAGE]
    matches = matches or difflib.get_close_matches(lowered, words, 1)
    *first, last = words
    hint = f"did you mean {matches[0]}?" if matches else f"it must be {', '.join(first)} or {last}"
    return f"{text} is no strategy: {hint}"


def show(value: Any) -> str:
    """A value in a sentence, shortened."""
    text = "empty" if value is None or value == "" else str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return brief(text)


def check_axes(names: Sequence[Any], sizes: Sequence[Any], at: Place) -> None:
    """Refuse impossible axes of a mesh; `at` says where the path ("mesh", name) stands."""
    if len(names) != len(sizes):
        raise ConvoyError(f"{at(('mesh',))}the mesh has {len(names)} names and {len(sizes)} sizes: give each axis both")
    for name, size in zip(names, sizes, strict=True):
        where = at(("mesh", str(name)))
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConvoyError(
                f"{where}{show(name)!r} is no name for a mesh axis: use a letter, then letters, digits, - and _"
            )
        if list(names).count(name) > 1:
            raise ConvoyError(f"{where}the mesh has two axes {name}: give each a name of its own")
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _LARGEST:
            quoted = " in quotes" if isinstance(size, str) and size.isdigit() else ""
            raise ConvoyError(
                f"{where}the size of axis {name} is {show(size)}{quoted}: write a whole number from 1, e.g. 2"
            )


def check_layers(layers: Sequence[tuple[Any, Any]], mesh: Mesh, at: Place) -> None:
    """Refuse patterns and strategies that cannot be on a mesh; `at` says where the paths ("layers", pattern) and
    ("layers", pattern, axis) stand."""
    patterns: list[str] = []
    for pattern, strategies in layers:
        where = at(("layers", str(pattern)))
        if not isinstance(pattern, str) or not pattern.strip():
            raise ConvoyError(f"{where}a pattern must be text, e.g. features.* or * for every layer")
        if not isinstance(strategies, Mapping):
            example = ", ".join(f"{name}: sample" for name in mesh.names if name != STAGE) or "sample: sample"
            has = "nothing" if strategies is None else show(strategies)
            raise ConvoyError(f"{where}{pattern} has {has}, but needs a strategy for each axis: write {{{example}}}")
        for axis, strategy in strategies.items():
            _check_strategy(pattern, axis, strategy, mesh, at(("layers", pattern, str(axis))))
        for first in patterns:
            if first == pattern:
                raise ConvoyError(
                    f"{where}the pattern {pattern} is there twice: the first match wins, so leave one out"
                )
            if not set("?[") & set(first) and fnmatch.fnmatchcase(pattern, first):
                raise ConvoyError(
                    f"{where}{pattern} comes after {first}, which matches the same layers first: put {pattern} above it"
                )
        patterns.append(pattern)


def _check_strategy(pattern: str, axis: Any, strategy: Any, mesh: Mesh, where: str) -> None:
    if axis not in mesh.names:
        matches = difflib.get_close_matches(str(axis), mesh.names, 1)
        axes = ", ".join(mesh.names)
        hint = f"did you mean {matches[0]}?" if matches else f"the mesh has {axes or 'no axes'}"
        raise ConvoyError(f"{where}{pattern} names an axis {show(axis)} that is not in the mesh: {hint}")
    if axis == STAGE:
        raise ConvoyError(
            f"{where}{pattern} has {show(strategy)} on axis {STAGE}, which divides the network and no layer: leave it "
            "out here, and list the layers at which stages begin under the key stages"
        )
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ConvoyError(f"{where}{pattern} on axis {axis}: {strategy_error(strategy)}")


def check_stages(stages: Any, mesh: Mesh, at: Place) -> tuple[str, ...]:
    """The layers at which stages begin, one for each stage of the mesh, or none, from a list for every stage, or for
    all but the first, which begins with the network itself, "". A ConvoyError where they cannot be on this mesh says by
    `at` where the path ("stages",) stands."""
    where = at(("stages",))
    if not isinstance(stages, list | tuple):
        kind = "a mapping" if isinstance(stages, Mapping) else "empty" if stages is None else f"the word {show(stages)}"
        raise ConvoyError(f"{where}stages is {kind}, but must be a list of layers: write e.g. stages: [conv1, layer3]")
    if not stages:
        return ()
    if mesh.stage_axis is None:
        example = f"mesh: {{{STAGE}: {max(2, len(stages))}}}"
        raise ConvoyError(f"{where}stages needs an axis {STAGE} in the mesh: write e.g. {example}")
    size = mesh.sizes[mesh.stage_axis]
    if len(stages) not in (size, size - 1):
        or_fewer = f", or {size - 1} without the first" if size > 1 else ""
        raise ConvoyError(
            f"{where}stages names {len(stages)} layer{'s'[: len(stages) > 1]}, but axis {STAGE} has size {size}: name "
            f"the layer at which each stage begins, {size} of them{or_fewer}"
        )
    names = tuple(str(name) if isinstance(name, int) and not isinstance(name, bool) else name for name in stages)
    for place, name in enumerate(names):
        is_first = place == 0 and len(names) == size
        if not isinstance(name, str) or set("*?[…") & set(name) or not (name.strip() or is_first):
            raise ConvoyError(
                f"{where}a stage begins at {show(name)}, which is no layer's name: write that of a module, e.g. layer3"
            )
        if name in names[:place]:
            raise ConvoyError(f"{where}two stages begin at {name}: name another layer for one of them")
    return names if len(names) == size else ("", *names)


_EXAMPLES = "write e.g. sample=4 or sample=2,filter=2, or name a YAML file"
_PART = re.compile(r"\s*([^=\s]*)\s*=\s*([^=\s]*)\s*")


def parse_text(text: str) -> tuple[Mesh, Layers]:
    """The mesh and layers of a plan in one line; a ConvoyError quotes a part that is wrong.

    Each part `strategy=size` is a mesh axis, outermost first, on which every layer has that strategy. An axis has the
    name of its strategy, numbered where a strategy comes again: `sample`, `sample2`. `stage=size` is the axis on which
    the network is divided, and layers have no strategy.
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
    if strategies.count(STAGE) > 1:
        raise ConvoyError(f"plan {show(text)!r}: it has two axes {STAGE}: write one, with the number of all stages")
    of_layers = {name: strategy for name, strategy in zip(names, strategies, strict=True) if strategy != STAGE}
    return Mesh(names, sizes), (("*", of_layers),) if of_layers else ()


def axis_names_of(strategies: Sequence[str]) -> tuple[str, ...]:
    """Names of the axes of a plan in one line."""
    names: list[str] = []
    for strategy in strategies:
        times = sum(other == strategy for other in strategies[: len(names)]) + 1
        names.append(strategy if times == 1 else f"{strategy}{times}")
    return tuple(names)


def to_text(mesh: Mesh, layers: Layers) -> str | None:
    """The one line that `parse_text` reads as this mesh and these layers; None where there is none."""
    by_pattern = dict(layers)
    if set(by_pattern) != ({"*"} if set(mesh.names) - {STAGE} else set()):
        return None
    strategies = {STAGE: STAGE, **by_pattern.get("*", {})}
    words = [strategies.get(name, "") for name in mesh.names]
    if axis_names_of(words) != mesh.names:
        return None
    return ",".join(f"{strategy}={size}" for strategy, size in zip(words, mesh.sizes, strict=True)) or "serial"


def _part(part: str, text: str) -> tuple[str, int]:
    where = f"plan {show(text)!r}"
    item = part.strip()
    if not item:
        raise ConvoyError(f"{where} has nothing between two commas or at an end: {_EXAMPLES}")
    if item in ("serial", "auto"):
        raise ConvoyError(f"{where}: {item} stands alone, without other parts; for one device write serial")
    if re.fullmatch("[0-9]+", item):
        raise ConvoyError(f"{where}: {item} needs a strategy: write sample={item} to divide the samples")
    if item in WORDS:
        raise ConvoyError(f"{where}: {item} needs a number of devices: write {item}=2")
    if item.count("=") > 1 and "==" not in item:
        raise ConvoyError(f"{where}: put a comma between two parts, as in sample=2,filter=2")
    match = _PART.fullmatch(part)
    if not match:
        words = re.fullmatch(r"(\w+)(?: *: *| +|==)([0-9]+)", item)
        if words and words[1] in WORDS:
            raise ConvoyError(f"{where}: write {words[1]}={words[2]} instead of {item}")
        raise ConvoyError(f"{where}: {show(item)} is no part of a plan: {_EXAMPLES}")
    strategy, size = match.groups()
    if strategy in ("serial", "auto"):
        raise ConvoyError(f"{where}: {strategy} takes no number: write {strategy} alone, or sample={size or 2}")
    if strategy not in WORDS:
        raise ConvoyError(f"{where}: {strategy_error(strategy, WORDS)}")
    if not re.fullmatch("[0-9]{1,9}", size) or int(size) < 1:
        raise ConvoyError(f"{where}: the size of {strategy} is {show(size)}: write a whole number from 1, e.g. 2")
    return strategy, int(size)
