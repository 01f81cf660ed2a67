"""What a person has decided already: `classifier.*=filter`."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from convoy.errors import ConvoyError
from convoy.plans.fit import nearest
from convoy.plans.mesh import Mesh
from convoy.plans.strategies import STRATEGIES, of_layer, strategy_error
from convoy.terminal import brief

_SHOWN = 12
_FORM = "write a pattern and a strategy, e.g. 'classifier.*=filter', or one strategy for each axis, 'fc=sample,filter'"


@dataclass(frozen=True)
class Fix:
    """A strategy that layers must have."""

    pattern: str  # over the names of modules
    # one for all axes of whatever mesh, or one for each but that of stages, where layers have none
    strategies: tuple[str, ...]

    def on(self, mesh: Mesh, op: str) -> tuple[str, ...] | None:
        """The strategy on a mesh, None where it has another number of axes."""
        axes = [axis for axis in mesh.axes if axis != mesh.stage_axis]
        strategies = self.strategies * len(axes) if len(self.strategies) == 1 else self.strategies
        if len(strategies) != len(axes):
            return None
        on_axes = dict(zip(axes, strategies, strict=True))
        return tuple(of_layer(on_axes.get(axis, "replicate"), op) for axis in mesh.axes)

    def __str__(self) -> str:
        return f"{self.pattern}={','.join(self.strategies)}"


def parse_fixes(fixes: Iterable["str | Fix"], layers: Mapping[str, str]) -> tuple[Fix, ...]:
    """The fixes of texts such as `classifier.*=filter`, of which the first that matches a layer counts; `layers` are
    kinds of work by the layers' names. A ConvoyError where a text is no fix, or matches no layer."""
    all_fixes = tuple(fix if isinstance(fix, Fix) else parse_fix(fix) for fix in fixes)
    for fix in all_fixes:
        if not any(fnmatch.fnmatchcase(layer, fix.pattern) for layer in layers):
            listing = f"its layers are {', '.join(list(layers)[:_SHOWN])}{', …' if len(layers) > _SHOWN else ''}"
            hint = nearest(fix.pattern, list(layers)) or listing
            raise ConvoyError(f"the fix {fix} matches no layer of this network: {hint}")
    return all_fixes


def fix_of(layer: str, fixes: Sequence[Fix]) -> Fix | None:
    """The fix that decides about a layer."""
    return next((fix for fix in fixes if fnmatch.fnmatchcase(layer, fix.pattern)), None)


def parse_fix(text: str) -> Fix:
    """The fix of a text; a ConvoyError where it is none, whatever the network."""
    pattern, sign, strategies = text.partition("=")
    words = tuple(word.strip() for word in strategies.split(","))
    if not pattern.strip() or not sign or not all(words):
        raise ConvoyError(f"{brief(text)!r} fixes nothing: {_FORM}")
    for word in words:
        if word not in STRATEGIES:
            raise ConvoyError(f"the fix {brief(text)}: {strategy_error(word)}")
    return Fix(pattern.strip(), words)
