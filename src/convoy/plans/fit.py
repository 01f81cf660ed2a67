"""Whether a plan, or what a person has decided of one, fits a network and a number of devices: its patterns, its sizes,
its axes on the hosts.

A refusal names the layer, the axis and the way out.
"""

import difflib
import fnmatch
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh
from convoy.plans.plan import STRATEGIES, Plan, axis_names_of, of_layer, strategies_on, strategy_error
from convoy.terminal import brief, did_you_mean
from convoy.units import plural

_OF_THE_NETWORK = "its weights are used by the network itself, which only * matches"


def check_patterns(
    plan: Plan, layers: Iterable[str], modules: Iterable[str] = (), borrowed: Mapping[str, str] | None = None
) -> None:
    """Refuse patterns that match no layer, and so would change nothing, and stages that begin at none: by a ConvoyError
    that names the nearest that there are.

    `layers` are modules with work to divide, "" for the network itself; of all `modules` those that have no modules in
    them count as layers too, also where this mode does not call them. `borrowed` are modules whose parameters another
    layer computes with, and the name of that one, which counts.
    """
    modules, layers = list(modules), list(layers)
    containers = {name.rpartition(".")[0] for name in modules if name}
    users = {name: layer for name, layer in (borrowed or {}).items() if layer in layers and name not in layers}
    names = ["", *layers, *(name for name in modules if name not in containers and name not in users)]
    for pattern in (pattern for pattern, _ in plan.layers if not _matching(pattern, names)):
        hint = _no_layer(pattern, names)
        for user in (users[name] for name in _matching(pattern, users)[:1]):
            hint = f"its weights are those of layer {user}: write {user}" if user else _OF_THE_NETWORK
        raise ConvoyError(f"the plan's pattern {pattern} matches no layer of this network: {hint}")
    all_names = [name for name in dict.fromkeys([*names, *modules]) if name]
    for name in plan.stages:
        if name and not any(layer == name or layer.startswith(f"{name}.") for layer in all_names):
            leaves = [layer for layer in dict.fromkeys(names) if layer and layer not in containers]
            from convoy.plans.stages import where_to_begin  # which needs torch

            hint = did_you_mean(name, all_names, otherwise=where_to_begin(name, leaves))
            raise ConvoyError(f"stages: the network has no layer {name}{hint}")


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _no_layer(pattern: str, names: Sequence[str]) -> str:
    """What a pattern that matches none of the layers may mean, or some layers that there are."""
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names if name))
    more = ", … (convoy plan NET lists all)" if len(tops) > 6 else ""
    return nearest(pattern, names) or f"its layers are {', '.join(tops[:6])}{more}"


def nearest(pattern: str, names: Sequence[str]) -> str:
    """A question about what was meant by a pattern that matches none of some modules; empty without an answer."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"did you mean {pattern}.*?"
    patterns = {name for name in names if name}
    for name in names:
        parts = name.split(".")
        patterns |= {".".join(parts[:length]) + ".*" for length in range(1, len(parts))}
    matches = difflib.get_close_matches(pattern, sorted(patterns), 1, cutoff=0.5)
    return f"did you mean {matches[0]}?" if matches else ""


def axis_names(mesh: Mesh, axes: Sequence[int]) -> str:
    """Axes in a sentence: `filter`, or `node·gpu` for two over which one dimension is divided."""
    return "·".join(mesh.names[axis] for axis in axes)


def check_size(where: str, axes: str, count: int, strategy: str, size: int, groups: int = 1) -> None:
    """Refuse to divide a dimension of `size`, or the `groups` of a convolution, over more than `size` ranks, of which
    some would have nothing to do. A group of channels stays on one rank, so that `channel` divides a grouped
    convolution as `filter` does. The sentence names the layer by `where`, as `layer 'features.0'`, and the axes as
    `axis_names` gives them."""
    if 1 < groups < count:
        raise ConvoyError(
            f"{where} is a convolution in {groups} groups, which cannot be divided over the {count} ranks of "
            f"{_axis(axes)} because each group stays on one rank: make the axis at most {groups}, or give this layer "
            f"sample or replicate on it in a YAML plan"
        )
    if count > size:
        ways = [f"make the axis at most {size}"] if size > 1 else []
        ways += ["give it larger images"] if strategy in ("height", "width") else []
        ways += ["give this layer sample or replicate on it in a YAML plan"]
        only = "only " if size else ""
        raise ConvoyError(
            f"{where} has {only}{plural(size, STRATEGIES[strategy].unit)} for the {count} ranks of {_axis(axes)}: "
            f"{', '.join(ways[:-1])}{', or ' if len(ways) > 1 else ''}{ways[-1]}"
        )


def check_devices(mesh: Mesh, num_devices: int) -> None:
    """Refuse a mesh of another number of ranks than there are devices."""
    if mesh.num_devices != num_devices:
        number, have = mesh.num_devices, f"{'is' if num_devices == 1 else 'are'} {num_devices}"
        raise ConvoyError(
            f"the plan's mesh {mesh} needs {plural(number, 'device')}, but there {have}: start a script by torchrun "
            f"--nproc-per-node {number} (convoy with --devices {number}), or change the plan's sizes so that their "
            f"product is {num_devices}"
        )


def _axis(names: str) -> str:
    return f"axes {names}" if "·" in names else f"axis {names}"


def fit(plan: Plan, num_devices: int) -> tuple[Plan, int, int]:
    """The plan with the sizes of its axes changed so that it is for `num_devices`, and the devices of a model group,
    which compute the same samples together, before and now.

    Axes on which layers are divided by samples, and by nothing else, take up the difference: `sample=4,filter=2` is
    `sample=3,filter=2` on six devices. Where that does not come out even the model groups become smaller, as little as
    can be, and rather by a stage than in the strategies of layers: `sample=2,filter=4` is `sample=2,filter=3` on six,
    `stage=4,filter=2` is `stage=2,filter=2` on four. Stages that are named stay where they are while their number does,
    and are cut to equal work after. The only axis of a plan has all devices, whatever it divides; but stages are
    computed by samples where they can be, `stage=2,sample=2` for `stage=2` on four.
    """
    mesh = plan.mesh
    by_samples = [strategies_on(plan, name) - {"replicate"} == {"sample"} for name in mesh.names]
    if len(mesh.sizes) == 1 and (mesh.stage_axis is None or num_devices % mesh.num_devices):
        group = (1, 1) if by_samples[0] else (mesh.num_devices, num_devices)
        return _resized(plan, (num_devices,)), *group
    other_axes = [axis for axis in mesh.axes if not by_samples[axis]]
    group_before = mesh.size(tuple(other_axes))
    new_sizes = dict(zip(other_axes, _model_group(mesh, other_axes, num_devices), strict=True))
    group_after = math.prod(new_sizes.values())
    num_groups = num_devices // group_after
    if not any(by_samples) and num_groups > 1:
        position = 1 if mesh.stage_axis == 0 else 0
        names, sizes = list(mesh.names), list(new_sizes.values())
        name = next(name for name in axis_names_of(["sample"] * (len(names) + 1)) if name not in names)
        names.insert(position, name)
        sizes.insert(position, num_groups)
        layers = tuple((pattern, {name: "sample", **strategies}) for pattern, strategies in plan.layers or (("*", {}),))
        stages = _resized(plan, tuple(new_sizes.values())).stages
        return Plan(Mesh(tuple(names), tuple(sizes)), layers, stages), group_before, group_after
    for axis in reversed([axis for axis in mesh.axes if by_samples[axis]]):
        new_sizes[axis] = math.gcd(mesh.sizes[axis], num_groups)
        num_groups //= new_sizes[axis]
    if any(by_samples):
        new_sizes[by_samples.index(True)] *= num_groups
    return _resized(plan, tuple(new_sizes[axis] for axis in mesh.axes)), group_before, group_after


def _model_group(mesh: Mesh, axes: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Sizes for these axes, none larger than it is, whose product divides the number of devices and is the largest."""
    choices = itertools.product(*(range(1, mesh.sizes[axis] + 1) for axis in axes))

    def worth(sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        of_layers = tuple(size for axis, size in zip(axes, sizes, strict=True) if axis != mesh.stage_axis)
        return math.prod(sizes), of_layers

    return max((sizes for sizes in choices if num_devices % math.prod(sizes) == 0), key=worth)


def _resized(plan: Plan, sizes: tuple[int, ...]) -> Plan:
    """The plan on a mesh of other sizes; other numbers of stages begin elsewhere."""
    axis = plan.mesh.stage_axis
    same_stages = axis is not None and sizes[axis] == plan.mesh.sizes[axis]
    return Plan(Mesh(plan.mesh.names, sizes), plan.layers, plan.stages if same_stages else ())


def across(mesh: Mesh, per_host: int) -> tuple[str, ...]:
    """Names of the axes whose groups have ranks in several hosts, where ranks are numbered host by host."""
    hosts_of = {axis: [{rank // per_host for rank in ranks} for ranks in mesh.groups((axis,))] for axis in mesh.axes}
    return tuple(mesh.names[axis] for axis, hosts in hosts_of.items() if any(len(group) > 1 for group in hosts))


def note_on_hosts(plan: Plan, per_host: int) -> list[str]:
    """A sentence, where another order of the axes would keep communication inside hosts of `per_host` ranks. Stages are
    the axis to lie across hosts, as they send each other only what crosses a cut; then come axes on which samples are
    divided, which add up gradients, and inside hosts those on which layers communicate."""
    mesh = plan.mesh
    if mesh.num_devices % per_host:
        return []
    kinds = {
        axis: sorted(strategy for strategy in strategies_on(plan, axis) if STRATEGIES[strategy].exchanges)
        for axis in mesh.names
    }
    order = sorted(mesh.axes, key=lambda axis: (bool(kinds[mesh.names[axis]]), axis != mesh.stage_axis))
    reordered = Mesh(tuple(mesh.names[axis] for axis in order), tuple(mesh.sizes[axis] for axis in order))
    across_now, across_then = across(mesh, per_host), across(reordered, per_host)
    new_plan = Plan(reordered, plan.layers, plan.stages)
    slow_now, slow_then = ([name for name in names if kinds[name]] for names in (across_now, across_then))
    if len(slow_then) < len(slow_now):
        name = next(name for name in slow_now if name not in slow_then)
        over = f"({', '.join(kinds[name])} over {mesh.sizes[mesh.names.index(name)]}) "
        what = f"its layers communicate over the network: as {new_plan} it would lie inside them"
        return [f"axis {name} of {plan} {over}lies across hosts of {per_host}, and {what}"]
    sample_axes = [name for name in across_now if name not in across_then and "sample" in strategies_on(plan, name)]
    if mesh.stage_axis is None or not sample_axes:
        return []
    what = "gradients are added up over the network: stages, which send only what crosses a cut, would lie across them"
    return [f"axis {sample_axes[0]} of {plan} lies across hosts of {per_host}, and {what} as {new_plan}"]


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
        if not _matching(fix.pattern, layers):
            raise ConvoyError(f"the fix {fix} matches no layer of this network: {_no_layer(fix.pattern, list(layers))}")
    return all_fixes


def fix_of(layer: str, fixes: Sequence[Fix]) -> Fix | None:
    """The fix that decides about a layer."""
    return next((fix for fix in fixes if _matching(fix.pattern, [layer])), None)


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
