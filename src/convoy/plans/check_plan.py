"""Whether a network can be divided as a plan says, before anything is placed."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

from convoy.errors import ConvoyError
from convoy.graph.graph import Graph
from convoy.plans.check import check_samples
from convoy.plans.layout import balanced
from convoy.plans.place import sample_axes
from convoy.plans.plan import Plan
from convoy.plans.rules import RULES, Batch, Situation


def check_plan(plan: Plan, graph: Graph, modules: Iterable[str] | None = None) -> None:
    """Refuse a plan that a network cannot have.

    Args:
        plan: the plan.
        graph: the network, captured at its whole batch.
        modules: names of all its modules, for patterns of layers that this graph does not call.

    Raises:
        ConvoyError: a pattern matches nothing, there are fewer samples than ranks to divide them over, or a
            convolution or linear layer cannot be divided; the sentence names the layer, the axis and the way out.
    """
    check_patterns(plan, [call.layer for call in graph.calls], modules or ())
    axes = sample_axes(((call.layer, call.op) for call in graph.calls), plan)
    num_samples = graph.shape(graph.inputs[0])[0]
    check_samples(plan.mesh, axes, num_samples)
    batch = Batch(plan.mesh, axes, balanced(num_samples, plan.mesh.size(axes)))
    for call in graph.calls:
        if call.op in ("conv", "linear"):
            RULES[call.op](Situation(graph, plan.mesh, batch, call, plan.strategy(call.layer, call.op), {}))


def check_patterns(plan: Plan, layers: Iterable[str], modules: Iterable[str] = ()) -> None:
    """Refuse patterns that match no layer.

    Args:
        plan: the plan.
        layers: names of the modules that make calls, "" for the network itself.
        modules: names of all modules; those that have no modules in them count as layers too.

    Raises:
        ConvoyError: the sentence names the pattern and the nearest that would match.
    """
    modules = list(modules)
    containers = {name.rpartition(".")[0] for name in modules}
    names = list(dict.fromkeys(["", *layers, *(name for name in modules if name not in containers)]))
    for pattern, _ in plan.layers:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            hint = _nearest(pattern, names)
            raise ConvoyError(f"the plan's pattern {pattern} matches no layer of this network: {hint}")


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """What may have been meant."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"did you mean {pattern}.*?"
    possible = {name for name in names if name}
    for name in names:
        parts = name.split(".")
        possible |= {".".join(parts[:length]) + ".*" for length in range(1, len(parts))}
    close = difflib.get_close_matches(pattern, sorted(possible), 1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"its layers are {_some(names)}"


def _some(names: Iterable[str]) -> str:
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names if name))
    return ", ".join(tops[:6]) + (", …" if len(tops) > 6 else "")
