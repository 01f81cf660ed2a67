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
    """A strategy that layers must have.

    Attributes:
        pattern: over the names of modules.
        strategies: one for all axes of whatever mesh, or one for each; that of stages, where layers have none, is not
            among them.
    """

    pattern: str
    strategies: tuple[str, ...]

    def on(self, mesh: Mesh, op: str) -> tuple[str, ...] | None:
        """The strategy on a mesh, None where it has another number of axes."""
        axes = [axis for axis in mesh.axes if axis != mesh.stage_axis]
        given = self.strategies * len(axes) if len(self.strategies) == 1 else self.strategies
        if len(given) != len(axes):
            return None
        on_axes = dict(zip(axes, given, strict=True))
        return tuple(of_layer(on_axes.get(axis, "replicate"), op) for axis in mesh.axes)

    def __str__(self) -> str:
        return f"{self.pattern}={','.join(self.strategies)}"


def parse_fixes(fixes: Iterable["str | Fix"], layers: Mapping[str, str]) -> tuple[Fix, ...]:
    """Fixes as they were written; for a layer, the first one that matches counts.

    Args:
        fixes: such as `classifier.*=filter`.
        layers: the kinds of work by name of the layer.

    Raises:
        ConvoyError: one is none, or matches no layer.
    """
    found = tuple(fix if isinstance(fix, Fix) else parse_fix(fix) for fix in fixes)
    for fix in found:
        if not any(fnmatch.fnmatchcase(layer, fix.pattern) for layer in layers):
            shown = f"its layers are {', '.join(list(layers)[:_SHOWN])}{', …' if len(layers) > _SHOWN else ''}"
            hint = nearest(fix.pattern, list(layers)) or shown
            raise ConvoyError(f"the fix {fix} matches no layer of this network: {hint}")
    return found


def fix_of(layer: str, fixes: Sequence[Fix]) -> Fix | None:
    """The fix that decides about a layer."""
    return next((fix for fix in fixes if fnmatch.fnmatchcase(layer, fix.pattern)), None)


def parse_fix(text: str) -> Fix:
    """A fix as it was written.

    Raises:
        ConvoyError: it is none, whatever the network.
    """
    pattern, sign, strategies = text.partition("=")
    words = tuple(word.strip() for word in strategies.split(","))
    if not pattern.strip() or not sign or not all(words):
        raise ConvoyError(f"{brief(text)!r} fixes nothing: {_FORM}")
    for word in words:
        if word not in STRATEGIES:
            raise ConvoyError(f"the fix {brief(text)}: {strategy_error(word)}")
    return Fix(pattern.strip(), words)
