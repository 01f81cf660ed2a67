"""The plan: a mesh of devices, for every layer a strategy on each of its axes, and where stages begin; and its YAML."""

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from convoy.errors import ConvoyError
from convoy.files import expanded, read_text
from convoy.plans.mesh import STAGE, Mesh
from convoy.plans.strategies import (
    WORDS,
    Layers,
    Place,
    check_axes,
    check_layers,
    check_stages,
    of_layer,
    parse_text,
    show,
    to_text,
)

_FORM = "write e.g. `mesh: {sample: 2}` and below it `layers:` with lines such as `features.*: {sample: sample}`"
_KEYS = ("mesh", "layers", "stages")
_DEPTH = 4

Parts = tuple[Mesh, Layers, tuple[str, ...]]  # the fields of a plan


def read_file(path: Path) -> Parts:
    """The fields of the plan in a YAML file; a ConvoyError with the file and the line where it is no plan or cannot be
    read."""
    if path.is_dir():
        raise ConvoyError(f"{path} is a folder: name the plan file itself, for a run {path / 'plan.yaml'}")
    return parse_yaml(read_text(path, "plan", ", or write e.g. sample=2"), str(path))


def parse_yaml(text: str, source: str = "the plan") -> Parts:
    """The fields of the plan in a YAML text; a ConvoyError with its `source` and the line where it is no plan."""
    lines: dict[tuple[str, ...], int] = {}
    try:
        node = yaml.compose(text, yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        hint = "put a pattern that begins with * in quotes: '*'" if "alias" in (error.context or "") else _FORM
        raise ConvoyError(f"{source}{line}: this is no YAML ({error.problem}): {hint}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConvoyError(f"{source}: this is no YAML ({str(error).partition(chr(10))[0]}): {_FORM}") from error
    document = None if node is None else _value(node, (), lines, source)

    def at(path: tuple[str, ...]) -> str:
        while path and path not in lines:
            path = path[:-1]
        return f"{source}, line {lines[path]}: " if path else f"{source}: "

    return parse_document(document, at)


def parse_document(document: Any, at: Place = lambda path: "the plan: ") -> Parts:
    """The fields of a plan from a mapping with the keys `mesh`, `layers` and, where it has an axis `stage`, `stages`. A
    ConvoyError where it is no plan says by `at` where the wrong part stands."""
    if not isinstance(document, Mapping):
        raise ConvoyError(f"{at(())}a plan has the keys mesh and layers, but this is {_kind(document)}: {_FORM}")
    for key in document:
        if key not in _KEYS:
            matches = difflib.get_close_matches(str(key), _KEYS, 1)
            hint = f"did you mean {matches[0]}?" if matches else "a plan has the keys mesh and layers"
            raise ConvoyError(f"{at((str(key),))}the key {show(key)} is unknown: {hint}")
    mesh = _mesh(document, at)
    stages = check_stages(document.get("stages", ()), mesh, at)
    first = next((name for name in mesh.names if name != STAGE), "sample")
    if "layers" not in document and mesh.names != (STAGE,):
        raise ConvoyError(
            f"{at(())}layers is missing: write for each pattern of layer names a strategy on each axis, "
            f"e.g. `layers: {{'*': {{{first}: sample}}}}`"
        )
    layers = document.get("layers", {})
    if not isinstance(layers, Mapping):
        raise ConvoyError(
            f"{at(('layers',))}layers is {_kind(layers)}, but must be a mapping of patterns: "
            f"write lines such as `features.*: {{{first}: sample}}` below it"
        )
    check_layers(list(layers.items()), mesh, at)
    return mesh, tuple((pattern, dict(strategies)) for pattern, strategies in layers.items()), stages


def dump_yaml(document: dict[str, Any]) -> str:
    """A plan's mapping as YAML, one pattern a line, in its own order."""
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10_000)


def _mesh(document: Mapping[Any, Any], at: Place) -> Mesh:
    if "mesh" not in document:
        raise ConvoyError(f"{at(())}mesh is missing: write the axes and their sizes, e.g. `mesh: {{sample: 2}}`")
    mesh = document["mesh"]
    if not isinstance(mesh, Mapping):
        raise ConvoyError(
            f"{at(('mesh',))}mesh is {_kind(mesh)}, but must have a size for each axis: write e.g. {{sample: 2}}"
        )
    check_axes(list(mesh), list(mesh.values()), at)
    return Mesh(tuple(mesh), tuple(mesh.values()))


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, list | tuple):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else f"the word {show(value)}"


def _value(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int], source: str) -> Any:
    """The content of a node, with the line of every key noted; nothing deeper than a plan goes."""
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if len(path) >= _DEPTH:
        return "…"
    if not isinstance(node, yaml.MappingNode):
        return [_scalar(child) if isinstance(child, yaml.ScalarNode) else "…" for child in node.value]
    mapping: dict[str, Any] = {}
    for key, value in node.value:
        line = f"{source}, line {key.start_mark.line + 1}: "
        if not isinstance(key, yaml.ScalarNode):
            raise ConvoyError(f"{line}a key must be a plain word")
        if key.value in mapping:
            raise ConvoyError(f"{line}the key {show(key.value)} is there twice: leave one out")
        lines[*path, key.value] = key.start_mark.line + 1
        mapping[key.value] = _value(value, (*path, key.value), lines, source)
    return mapping


def _scalar(node: yaml.ScalarNode) -> Any:
    """A word; a number or nothing where one is written without quotes."""
    text: str = node.value
    if node.style is None and text in ("", "~", "null"):
        return None
    if node.style is None and text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return text


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
            axis; the first pattern that matches wins. On an axis that is not named there, and for a layer that
            nothing matches, the strategy is `replicate`. On the axis `stage` it always is.
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
        check_axes(self.mesh.names, self.mesh.sizes, lambda path: "the plan: ")
        check_layers(self.layers, self.mesh, lambda path: "the plan: ")
        object.__setattr__(self, "layers", tuple((pattern, dict(given)) for pattern, given in self.layers))
        object.__setattr__(self, "stages", check_stages(self.stages, self.mesh, lambda path: "the plan: "))

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
            return Plan(*parse_document(plan))
        if isinstance(plan, Path):
            return Plan(*read_file(plan))
        if not isinstance(plan, str):
            raise ConvoyError(
                f"a plan is text, a YAML file or a mapping, but this is {show(plan)}: write e.g. sample=2"
            )
        if plan.strip() == "auto":
            return _auto(num_devices)
        return Plan(*read_file(expanded(plan.strip()))) if _is_path(plan) else _of_text(plan)

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
        sample_axes = {
            name
            for _, strategies in self.layers
            for name, strategy in strategies.items()
            if strategy in ("sample", "owt")
        }
        return self.mesh.size(tuple(axis for axis in self.mesh.axes if self.mesh.names[axis] in sample_axes))

    @property
    def num_stages(self) -> int:
        """Submodels into which it divides the network; 1 without an axis `stage`."""
        axis = self.mesh.stage_axis
        return 1 if axis is None else self.mesh.sizes[axis]

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `parse` reads as this plan."""
        mesh = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        document = {"mesh": mesh, "layers": {pattern: dict(given) for pattern, given in self.layers}}
        if self.stages:
            document["stages"] = list(self.stages if self.stages[0] else self.stages[1:])
        return document

    def to_yaml(self) -> str:
        """The YAML text that `parse` reads as this plan."""
        return dump_yaml(self.to_dict())

    def __str__(self) -> str:
        """The plan in one line: the text that `parse` reads, if there is one, otherwise for people only."""
        text = to_text(self.mesh, self.layers)
        if text is None:
            layers = (
                f"{pattern} {','.join(f'{axis}:{strategy}' for axis, strategy in given.items()) or 'replicate'}"
                for pattern, given in self.layers
            )
            text = f"{self.mesh}: {'; '.join(layers) or 'every layer replicate'}"
        return f"{text}; stages begin at {', '.join(self.stages[not self.stages[0] :])}" if self.stages else text


def plan_text(plan: Plan) -> str:
    """A plan as text that `Plan.parse` reads: in one line where it has one, else as YAML."""
    return (None if plan.stages else to_text(plan.mesh, plan.layers)) or plan.to_yaml()


@cache
def _of_text(text: str) -> Plan:
    """The plan in one line or in YAML text, cached as a recipe holds its plan as text and is asked for it again and
    again."""
    is_yaml = "\n" in text.strip() or text.lstrip().startswith("{")
    return Plan(*parse_yaml(text)) if is_yaml else Plan(*parse_text(text))


def _auto(num_devices: int | None) -> Plan:
    if num_devices == 1:
        return _of_text("serial")
    example = num_devices or 2
    raise ConvoyError(
        "auto stands for what the planner finds: pass what convoy.plan(model, …) returns, or a plan such as "
        f"sample={example} or owt={example}"
    )


def _is_path(text: str) -> bool:
    text = text.strip()
    if "\n" in text or text.startswith("{"):
        return False
    if text.lower().endswith((".yaml", ".yml", ".json")):
        return True
    if not text or "=" in text or text in ("serial", *WORDS):
        return False
    try:
        return "/" in text or Path(text).exists()
    except (OSError, ValueError):
        return False
