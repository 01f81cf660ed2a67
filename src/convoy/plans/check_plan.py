"""Whether a network can be divided as a plan says, before anything is placed."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from convoy.errors import ConvoyError
from convoy.graph.graph import Graph
from convoy.plans.check import check_samples
from convoy.plans.layout import balanced
from convoy.plans.place import COMPUTE, sample_axes
from convoy.plans.plan import Plan
from convoy.plans.rules import RULES, Batch, Situation

_OF_THE_NETWORK = "its weights are used by the network itself, which only * matches"


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
    check_patterns(plan, [call.layer for call in graph.calls if call.op in COMPUTE], modules or ())
    axes = sample_axes(((call.layer, call.op) for call in graph.calls), plan)
    num_samples = graph.shape(graph.inputs[0])[0]
    check_samples(plan.mesh, axes, num_samples)
    batch = Batch(plan.mesh, axes, balanced(num_samples, plan.mesh.size(axes)))
    for call in graph.calls:
        if call.op in COMPUTE:
            RULES[call.op](Situation(graph, plan.mesh, batch, call, plan.strategy(call.layer, call.op), {}))


def check_patterns(
    plan: Plan, layers: Iterable[str], modules: Iterable[str] = (), borrowed: Mapping[str, str] | None = None
) -> None:
    """Refuse patterns that match no layer, and so would change nothing.

    Args:
        plan: the plan.
        layers: names of the modules with work to divide, "" for the network itself.
        modules: names of all modules; those that have no modules in them count as layers too, also where this mode
            does not call them.
        borrowed: modules whose parameters another layer computes with, and the name of that one, which counts.

    Raises:
        ConvoyError: the sentence names the pattern and the nearest that would match.
    """
    modules, layers = list(modules), list(layers)
    containers = {name.rpartition(".")[0] for name in modules if name}
    lent = {name: layer for name, layer in (borrowed or {}).items() if layer in layers and name not in layers}
    own = (name for name in modules if name not in containers and name not in lent)
    names = list(dict.fromkeys(["", *layers, *own]))
    for pattern, _ in plan.layers:
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            continue
        user = next((layer for name, layer in lent.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if user is not None:
            hint = f"its weights are those of layer {user}: write {user}" if user else _OF_THE_NETWORK
        else:
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
