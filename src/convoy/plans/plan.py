"""The plan: a mesh of devices and, for every layer, a strategy on each of its axes."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.plans.document import dump_yaml, parse_document, parse_yaml, read_file
from convoy.plans.mesh import Mesh
from convoy.plans.strategies import STRATEGIES, Layers, check_axes, check_layers, show
from convoy.plans.text import parse_text, to_text


@dataclass(frozen=True)
class Plan:
    """Which dimension of each layer's work is divided over each mesh axis.

    `Plan(Mesh(("node", "gpu"), (2, 2)), (("features.*", {"node": "sample", "gpu": "filter"}),))`, or `Plan.parse`.

    Attributes:
        mesh: the devices.
        layers: glob patterns over the names of modules with the strategies of the layers they match, by name of the
            axis; the first pattern that matches wins. On an axis that is not named there, and for a layer that
            nothing matches, the strategy is `replicate`.

    Raises:
        ConvoyError: names, sizes, patterns or strategies that cannot be.
    """

    mesh: Mesh
    layers: Layers = field(default=(), hash=False)

    def __post_init__(self) -> None:
        check_axes(self.mesh.names, self.mesh.sizes, lambda path: "the plan: ")
        check_layers(self.layers, self.mesh, lambda path: "the plan: ")
        object.__setattr__(self, "layers", tuple((pattern, dict(given)) for pattern, given in self.layers))

    @staticmethod
    def parse(plan: "str | Path | Mapping[str, Any] | Plan", num_devices: int | None = None) -> "Plan":
        """A plan from any of its forms.

        Args:
            plan: a line such as `sample=2,filter=2`, `owt=4` or `serial`; the path of a YAML file; YAML text of more
                than one line; a mapping with the keys `mesh` and `layers`; or a plan.
            num_devices: how many there are, for `auto`.

        Raises:
            ConvoyError: it is no plan.
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
        if "\n" in plan.strip() or plan.lstrip().startswith("{"):
            return Plan(*parse_yaml(plan))
        if _is_path(plan):
            return Plan(*read_file(expanded(plan.strip())))
        return Plan(*parse_text(plan))

    def strategy(self, layer: str, op: str) -> tuple[str, ...]:
        """A layer's strategy on each axis of the mesh.

        `owt` is not among them: it is `filter` for linear layers and `sample` for all others.

        Args:
            layer: name of the module.
            op: kind of the call, one of `convoy.graph`'s.
        """
        pattern = self.pattern(layer)
        given = dict(self.layers)[pattern] if pattern is not None else {}
        one_weird_trick = "filter" if op == "linear" else "sample"
        found = (given.get(name, "replicate") for name in self.mesh.names)
        return tuple(one_weird_trick if strategy == "owt" else strategy for strategy in found)

    def pattern(self, layer: str) -> str | None:
        """The pattern that decides about a layer, or None where nothing matches it."""
        return next((pattern for pattern, _ in self.layers if fnmatch.fnmatchcase(layer, pattern)), None)

    @property
    def parts(self) -> int:
        """Into how many parts it divides the samples of a network that has layers for all patterns.

        An axis divides samples where some layer does so on it (`sample`, `owt`).
        """
        named = {name for _, given in self.layers for name, strategy in given.items() if strategy in ("sample", "owt")}
        return self.mesh.size(tuple(axis for axis in self.mesh.axes if self.mesh.names[axis] in named))

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `parse` reads as this plan."""
        mesh = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        return {"mesh": mesh, "layers": {pattern: dict(given) for pattern, given in self.layers}}

    def to_yaml(self) -> str:
        """The YAML text that `parse` reads as this plan."""
        return dump_yaml(self.to_dict())

    def __str__(self) -> str:
        """The plan in one line: the text that `parse` reads where it has one, otherwise for people only."""
        text = to_text(self.mesh, self.layers)
        if text is not None:
            return text
        layers = (
            f"{pattern} {','.join(f'{axis}:{strategy}' for axis, strategy in given.items()) or 'replicate'}"
            for pattern, given in self.layers
        )
        return f"{self.mesh}: {'; '.join(layers) or 'every layer replicate'}"


def plan_text(plan: Plan) -> str:
    """A plan as text that `Plan.parse` reads: in one line where it has one, else as YAML."""
    try:
        return str(plan) if Plan.parse(str(plan)) == plan else plan.to_yaml()
    except ConvoyError:
        return plan.to_yaml()


def _auto(num_devices: int | None) -> Plan:
    if num_devices == 1:
        return Plan(*parse_text("serial"))
    example = num_devices or 2
    raise ConvoyError(
        "auto stands for what the planner finds: pass what convoy.plan(model, …) returns, or a plan such as "
        f"sample={example} or owt={example}"
    )


def _is_path(text: str) -> bool:
    text = text.strip()
    if text.lower().endswith((".yaml", ".yml", ".json")):
        return True
    if not text or "=" in text or text in ("serial", *STRATEGIES):
        return False
    try:
        return "/" in text or Path(text).exists()
    except (OSError, ValueError):
        return False
