"""The plan: a mesh of devices, for every layer a strategy on each of its axes, and where stages begin.

It is written in one line (`sample=2,filter=2`), as YAML or as a mapping. Each form is read as the same three fields,
which are checked once, where a `Plan` is made; where a file is wrong, its line is looked up then.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convoy.documents import dump, line_of, parse
from convoy.errors import ConvoyError
from convoy.files import expanded, read_text
from convoy.plans.mesh import STAGE, Mesh
from convoy.terminal import brief, did_you_mean


@dataclass(frozen=True)
class Strategy:
    """All that is said of a strategy, wherever it is read, checked or drawn."""

    letter: str  # stands for it in drawings
    effect: str  # on a layer, for a legend
    unit: str  # what each rank needs at least one of; empty where nothing is too small for it
    aliases: str  # words for it that people may know
    exchanges: bool = True  # whether ranks send each other activations for it in every pass


# What an axis does with a layer. The search has an order of its own (`AXIS_STRATEGIES`), since the first of two equally
# fast plans wins.
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

_STAGE_ALIASES = "stage stages pipeline pipelining pipelined pipe pp gpipe pipedream submodel submodels"
_MEANINGS = {alias: word for word, strategy in STRATEGIES.items() for alias in strategy.aliases.split()}
_MEANINGS |= dict.fromkeys(_STAGE_ALIASES.split(), STAGE)


def of_layer(strategy: str, op: str) -> str:
    """The strategy that a kind of layer has: `owt`, one weird trick (Krizhevsky, 2014), stands for two others."""
    return strategy if strategy != "owt" else "filter" if op == "linear" else "sample"


def strategy_error(word: Any, words: Sequence[str] = tuple(STRATEGIES)) -> str:
    """The sentence about a word that should be one of the strategies in `words`."""
    text = show(word)
    meaning = _MEANINGS.get(text.lower())
    if meaning == STAGE and STAGE not in words:
        return f"{text} is no strategy of a layer: to divide the network, give the plan an axis {STAGE}, as in stage=2"
    otherwise = f"it must be {', '.join(words[:-1])} or {words[-1]}"
    return f"{text} is no strategy{did_you_mean(meaning or text, words, otherwise=otherwise)}"


def show(value: Any) -> str:
    """A value in a sentence, shortened."""
    text = "empty" if value is None or value == "" else str(value).lower() if isinstance(value, bool) else str(value)
    return brief(" ".join(text.split()))


# patterns over module names, each with a strategy for the mesh axes that it names
Layers = tuple[tuple[str, Mapping[str, str]], ...]

_KEYS = ("mesh", "layers", "stages")
_FORM = "write e.g. `mesh: {sample: 2}` and below it `layers:` with lines such as `features.*: {sample: sample}`"
_LARGEST = 1_000_000
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_PART = re.compile(r"([^\s=]+)\s*=\s*([^\s=]*)")


class _WrongError(ConvoyError):
    """A sentence about a part of a plan, and the keys that lead to it."""

    def __init__(self, sentence: str, *path: Any) -> None:
        super().__init__(f"the plan: {sentence}")
        self.sentence, self.path = sentence, path


@dataclass(frozen=True)
class Plan:
    """Which dimension of each layer's work is divided over each mesh axis.

    >>> plan = convoy.Plan.parse("sample=2,filter=2")
    >>> plan.mesh.sizes, plan.strategy("features.0", "conv")
    ((2, 2), ('sample', 'filter'))
    >>> mesh = convoy.Mesh(("node", "gpu"), (2, 2))
    >>> plan = convoy.Plan(mesh, (("features.*", {"node": "sample", "gpu": "filter"}),))
    >>> str(plan)
    'node=2 × gpu=2: features.* node:sample,gpu:filter'
    >>> convoy.Plan.parse(plan.to_yaml()) == plan
    True
    >>> plan = convoy.Plan(convoy.Mesh(("stage", "sample"), (2, 2)), (("*", {"sample": "sample"}),), ("layer3",))
    >>> print(plan.to_yaml(), end="")  # two submodels; the second begins at layer3
    mesh: {stage: 2, sample: 2}
    layers:
      '*': {sample: sample}
    stages: [layer3]

    Attributes:
        mesh: the devices.
        layers: glob patterns over the names of modules with the strategies of the layers they match, by name of the
            axis, as pairs or as a mapping; the first pattern that matches wins. On an axis that is not named there, and
            for a layer that nothing matches, the strategy is `replicate`. On the axis `stage` it always is.
        stages: names of the layers at which the stages begin, one for each place on the axis `stage`, or all but the
            first. A module with others in it stands for the first of them, and so the first name may be "", the
            network. Empty for cuts of equal work.

    Raises:
        ConvoyError: names, sizes, patterns, strategies or stages that cannot be.
    """

    mesh: Mesh
    layers: Layers = field(default=(), hash=False)
    stages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given: Any = self.layers  # or a mapping
        layers = tuple(given.items() if isinstance(given, Mapping) else given)
        for sentence, *path in _problems(self.mesh, layers, self.stages):
            raise _WrongError(sentence, *path)
        object.__setattr__(self, "layers", tuple((pattern, dict(strategies)) for pattern, strategies in layers))
        names = tuple(map(str, self.stages))
        object.__setattr__(self, "stages", names if len(names) in (0, self.num_stages) else ("", *names))

    @staticmethod
    def parse(plan: "str | Path | Mapping[str, Any] | Plan", num_devices: int | None = None) -> "Plan":
        """A plan from text, YAML, a mapping, or a plan.

        Args:
            plan: a line such as `sample=2,filter=2`, `stage=2`, `owt=4` or `serial`; the path of a YAML file; YAML text
                of more than one line; a mapping with the keys `mesh`, `layers` and `stages`; or a plan.
            num_devices: number of devices, for `auto`.

        Raises:
            ConvoyError: it is not a plan.
        """
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, Mapping):
            return _of_mapping(plan)
        if not isinstance(plan, str | Path):
            raise ConvoyError(
                f"a plan is text, a YAML file or a mapping, but this is {show(plan)}: write e.g. sample=2"
            )
        text, source = str(plan).strip(), "the plan"
        is_document = "\n" in text or text.startswith("{")
        if isinstance(plan, Path) or (not is_document and _is_path(text)):
            path = plan if isinstance(plan, Path) else expanded(text)
            if path.is_dir():
                raise ConvoyError(f"{path} is a folder: name the plan file itself, for a run {path / 'plan.yaml'}")
            plan, source, is_document = read_text(path, "plan", ", or write e.g. sample=2"), str(path), True
        if is_document:
            document = parse(plan, source)
            return _explained(source, plan, lambda: _of_mapping(document))
        if text == "auto" and num_devices != 1:
            raise ConvoyError(
                "auto stands for what the planner finds: pass what convoy.plan(model, …) returns, or a plan such as "
                f"sample={num_devices or 2} or owt={num_devices or 2}"
            )
        return Plan(Mesh((), ())) if text in ("serial", "auto") else _of_line(plan)

    @staticmethod
    def by_samples(num_devices: int) -> "Plan":
        """Every layer by samples on one axis, `sample=4`; on one device `serial`."""
        return Plan.parse(f"sample={num_devices}" if num_devices > 1 else "serial")

    def strategy(self, layer: str, op: str) -> tuple[str, ...]:
        """A layer's strategy on each axis of the mesh.

        `owt` is not among them: it is `filter` for linear layers and `sample` for all others.

        Args:
            layer: name of the module.
            op: kind of the call, one of `convoy.graph`'s.
        """
        pattern = self.pattern(layer)
        strategies = dict(self.layers)[pattern] if pattern is not None else {}
        return tuple(of_layer(strategies.get(name, "replicate"), op) for name in self.mesh.names)

    def pattern(self, layer: str) -> str | None:
        """The pattern that decides about a layer, or None where nothing matches it."""
        return next((pattern for pattern, _ in self.layers if fnmatch.fnmatchcase(layer, pattern)), None)

    @property
    def parts(self) -> int:
        """The number of shares into which it divides the samples of a network that has layers for all patterns.

        An axis divides samples where some layer does so on it (`sample`, `owt`).
        """
        by_samples = {axis for axis in self.mesh.names if strategies_on(self, axis) & {"sample", "owt"}}
        return self.mesh.size(tuple(axis for axis in self.mesh.axes if self.mesh.names[axis] in by_samples))

    @property
    def num_stages(self) -> int:
        """Submodels into which it divides the network; 1 without an axis `stage`."""
        axis = self.mesh.stage_axis
        return 1 if axis is None else self.mesh.sizes[axis]

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `parse` reads as this plan."""
        mesh = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        document = {"mesh": mesh, "layers": {pattern: dict(strategies) for pattern, strategies in self.layers}}
        if self.stages:
            document["stages"] = list(self.stages if self.stages[0] else self.stages[1:])
        return document

    def to_yaml(self) -> str:
        """The YAML text that `parse` reads as this plan."""
        return dump(self.to_dict(), in_lines=True)

    def __str__(self) -> str:
        """The plan in one line: the text that `parse` reads, if there is one, otherwise for people only."""
        text = _line(self.mesh, self.layers)
        if text is None:
            layers = (
                f"{pattern} {','.join(f'{axis}:{strategy}' for axis, strategy in strategies.items()) or 'replicate'}"
                for pattern, strategies in self.layers
            )
            text = f"{self.mesh}: {'; '.join(layers) or 'every layer replicate'}"
        return f"{text}; stages begin at {', '.join(self.stages[not self.stages[0] :])}" if self.stages else text


def strategies_on(plan: Plan, axis: str) -> set[str]:
    """The strategies that some pattern names on an axis."""
    return {strategies[axis] for _, strategies in plan.layers if axis in strategies}


def plan_text(plan: Plan) -> str:
    """A plan as text that `Plan.parse` reads: in one line where it has one, else as YAML."""
    return (None if plan.stages else _line(plan.mesh, plan.layers)) or plan.to_yaml()


def axis_names_of(strategies: Sequence[str]) -> tuple[str, ...]:
    """Names of the axes of a plan in one line: those of their strategies, numbered where one comes again."""
    names: list[str] = []
    for strategy in strategies:
        times = strategies[: len(names)].count(strategy) + 1
        names.append(strategy if times == 1 or strategy == STAGE else f"{strategy}{times}")
    return tuple(names)


def _line(mesh: Mesh, layers: Layers) -> str | None:
    """The one line that is read as this mesh and these layers; None where there is none."""
    by_pattern = dict(layers)
    if set(by_pattern) != ({"*"} if set(mesh.names) - {STAGE} else set()):
        return None
    strategies = {STAGE: STAGE, **by_pattern.get("*", {})}
    words = [strategies.get(name, "") for name in mesh.names]
    if axis_names_of(words) != mesh.names:
        return None
    return ",".join(f"{strategy}={size}" for strategy, size in zip(words, mesh.sizes, strict=True)) or "serial"


def _of_line(text: str) -> Plan:
    """The plan of one line: each part `strategy=size` is a mesh axis, outermost first, on which every layer has that
    strategy. `stage=size` is the axis on which the network is divided, and layers have no strategy."""
    strategies, sizes = list[str](), list[Any]()
    for part in map(str.strip, text.split(",")):
        match = _PART.fullmatch(part)
        if match is None:
            word, number = ("".join(re.findall(form, part)[:1]) for form in (r"^\w+", "[0-9]{1,9}$"))
            raise ConvoyError(
                f"plan {show(text)!r}: {show(part)} is no part of a plan: write "
                f"{word if word in WORDS else 'sample'}={number or 2}, with a comma between two parts, as in "
                "sample=2,filter=2, or name a YAML file"
            )
        strategy, size = match.groups()
        layer, _, of_one = strategy.rpartition(":")
        if layer and of_one in STRATEGIES:
            raise ConvoyError(
                f"plan {show(text)!r}: in one line all layers have the same strategies: for {show(layer)} write YAML, "
                f"`mesh: {{gpu: 2}}` and below it `layers:` with `{show(layer)}: {{gpu: {of_one}}}` and "
                "`'*': {gpu: sample}` (convoy plan NET lists the layers)"
            )
        if strategy not in WORDS:
            raise ConvoyError(f"plan {show(text)!r}: {strategy_error(strategy, WORDS)}")
        strategies.append(strategy)
        sizes.append(int(size) if re.fullmatch("[0-9]{1,9}", size) else size)
    names = axis_names_of(strategies)
    of_layers = {name: strategy for name, strategy in zip(names, strategies, strict=True) if strategy != STAGE}
    layers: Layers = (("*", of_layers),) if of_layers else ()
    return _explained(f"plan {show(text)!r}", "", lambda: Plan(Mesh(names, tuple(sizes)), layers))


def _explained(source: str, text: str, make: Callable[[], Plan]) -> Plan:
    """A plan, whose errors name its source, and the line of the text."""
    try:
        return make()
    except _WrongError as error:
        line = line_of(text, error.path)
        raise ConvoyError(f"{source}{f', line {line}' if line else ''}: {error.sentence}") from error


def _of_mapping(document: Any) -> Plan:
    if not isinstance(document, Mapping):
        raise _WrongError(f"a plan has the keys mesh and layers, but this is {_kind(document)}: {_FORM}")
    for key in document:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS, otherwise="a plan has the keys mesh and layers")
            raise _WrongError(f"the key {show(key)} is unknown{hint}", str(key))

    def section(key: str, example: str) -> Mapping[Any, Any]:
        value = document.get(key)
        if not isinstance(value, Mapping):
            kind = _kind(value) if key in document else "missing"
            raise _WrongError(f"{key} is {kind}, but must be a mapping: write e.g. `{key}: {example}`", key)
        return value

    mesh = section("mesh", "{sample: 2}")
    axis = next((name for name in mesh if name != STAGE), "sample")
    only_stages = "layers" not in document and list(mesh) == [STAGE]
    layers = {} if only_stages else section("layers", f"{{'*': {{{axis}: sample}}}}")
    return Plan(Mesh(tuple(mesh), tuple(mesh.values())), tuple(layers.items()), document.get("stages", ()))


def _kind(value: Any) -> str:
    kinds = {type(None): "empty", list: "a list", tuple: "a list", dict: "a mapping"}
    return kinds.get(type(value), f"the word {show(value)}")


def _problems(mesh: Mesh, layers: Sequence[Any], stages: Any) -> Iterator[tuple[Any, ...]]:
    """What is wrong with a plan, in the order in which it is written: sentences, each with the keys that lead there."""
    if len(mesh.names) != len(mesh.sizes):
        yield f"the mesh has {len(mesh.names)} names and {len(mesh.sizes)} sizes: give each axis both", "mesh"
    axes: list[tuple[Any, Any]] = list(zip(mesh.names, mesh.sizes, strict=True))
    for name, size in axes:
        path = "mesh", str(name)
        if not isinstance(name, str) or not _AXIS.fullmatch(name):
            yield f"{show(name)!r} is no name for a mesh axis: use a letter, then letters, digits, - and _", *path
        if mesh.names.count(name) > 1:
            instead = ", with the number of all stages" if name == STAGE else ", or give each a name of its own"
            yield f"the mesh has two axes {name}: write one{instead}", *path
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _LARGEST:
            quoted = " in quotes" if str(size).isdigit() and isinstance(size, str) and len(size) < 7 else ""
            number = f"a whole number from 1 to {_LARGEST:,}, e.g. 2"
            yield f"the size of axis {name} is {show(size)}{quoted}: write {number}", *path
    patterns: list[str] = []
    for row in layers:
        if not isinstance(row, list | tuple) or len(row) != 2:
            yield f"layers has {show(row)}, but must be pairs of a pattern and its strategies, or a mapping", "layers"
        pattern, strategies = row
        path = "layers", str(pattern)
        if not isinstance(pattern, str) or not pattern.strip():
            yield "a pattern must be text, e.g. features.* or * for every layer", *path
        if not isinstance(strategies, Mapping):
            example = ", ".join(f"{name}: sample" for name in mesh.names if name != STAGE) or "sample: sample"
            has = "nothing" if strategies is None else show(strategies)
            yield f"{pattern} has {has}, but needs a strategy for each axis: write {{{example}}}", *path
        for axis, strategy in strategies.items():
            if problem := _wrong_strategy(axis, strategy, mesh):
                yield f"{pattern} {problem}", *path, str(axis)
        if pattern in patterns:
            yield f"the pattern {pattern} is there twice: leave one out", *path
        for first in patterns:
            if not set("?[") & set(first) and fnmatch.fnmatchcase(pattern, first):
                yield (
                    f"{pattern} comes after {first}, which matches the same layers first: put {pattern} above it",
                    *path,
                )
        patterns.append(pattern)
    yield from ((sentence, "stages") for sentence in _wrong_stages(stages, mesh))


def _wrong_strategy(axis: Any, strategy: Any, mesh: Mesh) -> str:
    """What is wrong with a layer's strategy on an axis; empty where nothing is."""
    if axis not in mesh.names:
        hint = did_you_mean(str(axis), mesh.names, otherwise=f"the mesh has {', '.join(mesh.names) or 'no axes'}")
        return f"names an axis {show(axis)} that is not in the mesh{hint}"
    if axis == STAGE:
        return (
            f"has {show(strategy)} on axis {STAGE}, which divides the network and no layer: leave it out here, and "
            "list the layers at which stages begin under the key stages"
        )
    is_known = isinstance(strategy, str) and strategy in STRATEGIES
    return "" if is_known else f"on axis {axis}: {strategy_error(strategy)}"


def _wrong_stages(stages: Any, mesh: Mesh) -> Iterator[str]:
    """What is wrong with a list of the layers at which stages begin: every stage, or all but the first."""
    if not isinstance(stages, list | tuple):
        yield f"stages is {_kind(stages)}, but must be a list of layers: write e.g. stages: [conv1, layer3]"
    if not stages:
        return
    if mesh.stage_axis is None:
        yield f"stages needs an axis {STAGE} in the mesh: write e.g. mesh: {{{STAGE}: {max(2, len(stages))}}}"
    size = mesh.sizes[mesh.stage_axis or 0]
    if len(stages) not in (size, size - 1):
        or_fewer = f", or {size - 1} without the first" if size > 1 else ""
        yield (
            f"stages names {len(stages)} layer{'s'[: len(stages) > 1]}, but axis {STAGE} has size {size}: name the "
            f"layer at which each stage begins, {size} of them{or_fewer}"
        )
    for place, name in enumerate(stages):
        is_number = isinstance(name, int) and not isinstance(name, bool)
        may_be_empty = place == 0 and len(stages) == size
        if not is_number and (
            not isinstance(name, str) or set("*?[…") & set(name) or not (name.strip() or may_be_empty)
        ):
            yield f"a stage begins at {show(name)}, which is no layer's name: write that of a module, e.g. layer3"
        if str(name) in map(str, stages[:place]):
            yield f"two stages begin at {name}: name another layer for one of them"


def _is_path(text: str) -> bool:
    if text.lower().endswith((".yaml", ".yml", ".json")):
        return True
    if not text or "=" in text or text in ("serial", "auto", *WORDS):
        return False
    try:
        return "/" in text or Path(text).exists()
    except (OSError, ValueError):
        return False
