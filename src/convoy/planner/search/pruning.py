"""Strategies that are left out before a wide network is searched, as every plan with them takes too long: by proof.

First by what the layers cost at least: a plan costs at least the sum of what its layers cost by themselves, each with
the strategy that is cheapest for it. Then by tables of whole plans that are nowhere above the true ones: what a plan
would cost if every tensor lay at once where it is wanted. Where such a sum with a certain strategy of a layer is more
than some plan costs in all, no best plan has this strategy there.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph
from convoy.planner.search.elimination import Elimination, Table, TooWideError
from convoy.planner.search.fewest import restricted
from convoy.planner.search.layers import Groups, in_common, is_on_vectors
from convoy.planner.search.placing import Choice, Shared
from convoy.planner.search.prices import NOWHERE, Prices, Strategy, is_choosing, used_axes
from convoy.planner.search.problem import Sent, assigned, build
from convoy.plans.mesh import Axes
from convoy.plans.place import COMPUTE, Batch


def least_of_layers(
    prices: Prices, batch: Batch, allowed: Mapping[str, Sequence[Strategy]]
) -> dict[str, dict[Strategy, float]]:
    """For every layer and strategy, seconds that a plan spends there at least: on its calls and its parameters."""
    first = {name: call.name for call in reversed(prices.graph.calls) for name in call.inputs}
    least: dict[str, dict[Strategy, float]] = {layer: dict.fromkeys(options, 0.0) for layer, options in allowed.items()}
    asked: dict[tuple[object, ...], float] = {}
    for call in prices.graph.calls:
        if not is_choosing(call):
            continue
        is_first = tuple(first[name] == call.name for name in call.inputs)
        for strategy, seconds in least[call.layer].items():
            key = (prices.kind(call), strategy, is_first)
            if key not in asked:
                asked[key] = _least(prices, batch, call, strategy, is_first)
            least[call.layer][strategy] = seconds + asked[key]
    return least


def _least(prices: Prices, batch: Batch, call: Call, strategy: Strategy, is_first: Sequence[bool]) -> float:
    """Seconds of one call whose input is divided evenly; nothing where its rule would follow the input."""
    if call.op != "conv" and not is_on_vectors(call, prices.graph, batch):
        return 0.0
    answer = prices.answer(call, batch, strategy, [NOWHERE] * len(call.inputs))
    if isinstance(answer, ConvoyError):
        return float("inf")
    seconds = answer.seconds
    for name, want, is_own in zip(call.inputs, answer.wants, is_first, strict=True):
        value = prices.graph.values[name]
        if value.origin == "parameter" and is_own:
            seconds += prices.parameter(value, want)[0]
    return seconds


def possible(
    least: Mapping[str, Mapping[Strategy, float]],
    allowed: Mapping[str, Sequence[Strategy]],
    groups: Groups,
    enough: float,
) -> dict[str, Sequence[Strategy]]:
    """What each layer may have in a plan that costs at most `enough` seconds, by the least seconds of every layer and
    strategy. Layers of a group have one strategy together."""
    sums: list[dict[Strategy, float]] = []
    for group in groups:
        common = [s for s in allowed[group[0]] if all(s in allowed[layer] for layer in group[1:])]
        sums.append({s: sum(least[layer][s] for layer in group) for s in common})
    total = sum(min(costs.values(), default=0.0) for costs in sums)
    by_layer: dict[str, Sequence[Strategy]] = {}
    for group, costs in zip(groups, sums, strict=True):
        rest = total - min(costs.values(), default=0.0)
        by_layer |= dict.fromkeys(group, kept(list(costs), [rest + seconds for seconds in costs.values()], enough))
    return by_layer


def relaxed(tables: Iterable[Table], most: int) -> list[Table]:
    """Tables whose sum is nowhere more than that of the given ones, none with more entries than `most`. A larger one
    that only forbids becomes one for each pair of its last variable, the result of a join, with another; one of seconds
    becomes its minima over all but two variables."""
    tables_kept: list[Table] = []
    for table in tables:
        count = table.numbers.ndim
        if table.numbers.size <= most:
            tables_kept.append(table)
        elif np.isinf(table.numbers).any() and not np.where(np.isinf(table.numbers), 0.0, table.numbers).any():
            for axis in range(count - 1):
                gone = tuple(other for other in range(count - 1) if other != axis)
                tables_kept.append(Table((table.scope[axis], table.scope[-1]), table.numbers.min(axis=gone)))
        else:
            tables_kept.append(_pair(table))
    return tables_kept


def _pair(table: Table) -> Table:
    """The minima of a table over all but its first variable and another one, that which says most."""
    best, most = None, -1.0
    for pair in ((0, axis) for axis in range(1, table.numbers.ndim)):  # what is first decides most in a join
        numbers = table.numbers.min(axis=tuple(axis for axis in range(table.numbers.ndim) if axis not in pair))
        mean = float(np.minimum(numbers, 1e9).mean())
        if mean > most:
            best, most = Table((table.scope[pair[0]], table.scope[pair[1]]), numbers), mean
    assert best is not None
    return best


def kept(strategies: Sequence[Strategy], bounds: Sequence[float], enough: float) -> list[Strategy]:
    """Those with a bound of at most so many seconds; the two with the lowest in any case, so that there is a choice."""
    second = sorted(bounds)[:2][-1] if bounds else 0.0
    return [s for s, bound in zip(strategies, bounds, strict=True) if bound <= max(enough * (1 + 1e-9), second)]


# Where a mesh is too wide to be searched in full, plans are left out that take this much longer than one known
INTERESTING = 1.1

_RELAXED = 50_000


class UninterestingError(Exception):
    """No plan takes as little as `enough` seconds."""


@dataclass(frozen=True)
class Floor:
    """What plans take at least that divide the samples over fewer axes, from the tables of those that use more of them.
    The two differ only in where the network's inputs lie and its outputs have to be, and in what layers may have."""

    graph: Graph
    batch: Batch  # where the tables hold
    choices: Sequence[Choice]  # there; what is left out takes more than `most` seconds
    tables: Sequence[Table]  # seconds, inputs and outputs aside
    sizes: Mapping[int, int]  # number of states of every variable
    most: float  # seconds, beyond which nothing is known
    limit: int  # the most entries of a table

    def of(self, batch: Batch) -> float:
        """Seconds for another batch over some of the axes; 0 where nothing is known."""
        if not self._holds(batch):
            return 0.0
        left_out = set(self.batch.axes) - set(batch.axes)
        states_of = {v: list(range(size)) for v, size in self.sizes.items()}
        for v, choice in enumerate(self.choices):
            states_of[v] = [n for n, s in enumerate(choice.strategies) if all(s[axis] != "sample" for axis in left_out)]
            if not states_of[v]:  # all that the layer may have there was left out
                return self.most
        sizes = {v: len(states) for v, states in states_of.items()}
        return min(self.most, Elimination(restricted(self.tables, states_of), sizes, self.limit).least)

    def _holds(self, batch: Batch) -> bool:
        """Whether each rank has as many samples, and where inputs lie matters to no more than sending them. Which
        samples a rank has is a matter of their order, and no cost knows of it."""
        inputs = set(self.graph.inputs)
        if any(call.op != "conv" for call in self.graph.calls if inputs.intersection(call.inputs)):
            return False
        axes = [sub for count in range(1, len(batch.axes) + 1) for sub in itertools.combinations(batch.axes, count)]
        return set(batch.axes) <= set(self.batch.axes) and all(
            _part_sizes(self.batch, a) == _part_sizes(batch, a) for a in axes
        )


def _part_sizes(batch: Batch, axes: Axes) -> list[int]:
    split = batch.split(axes)
    return [len(part) for part in split.parts] if split else []


def remaining(
    shared: Shared,
    batch: Batch,
    allowed: Mapping[str, Sequence[Strategy]],
    outputs: Sequence[str],
    groups: Groups,
    enough: float,
    tolerance: float,
    limit: int,
    price: Callable[[Mapping[str, Strategy]], float],
) -> tuple[Mapping[str, Sequence[Strategy]], Floor | None]:
    """The strategies of every layer that may be in a best plan on one mesh, for one way to divide the samples, and what
    plans take at least that divide them over fewer axes (None where that was too much to ask).

    Plans of more than `enough` seconds are of no interest, and an UninterestingError says that all take more; plans
    that take longer than the fastest by the share `tolerance` are kept. `limit` is the most entries of a table, `price`
    gives the seconds of one plan.
    """
    graph, least_known = shared.prices.graph, enough
    if not np.isfinite(enough):
        least_known = price(
            {layer: min(options, key=partial(_plainness, batch.axes)) for layer, options in allowed.items()}
        )
    most = least_known * INTERESTING
    strategies = possible(least_of_layers(shared.prices, batch, allowed), allowed, groups, most)
    choices = [Choice(group, in_common(group, strategies)) for group in groups]
    # where many layers have one strategy together, the work alone says much, and asking what is sent takes long
    tied = any(len(group) > 1 for group in groups)
    rounds: Sequence[Sent] = ("nothing",) if tied else ("nothing", "at least") if enough < np.inf else ("at least",)
    try:
        for sent in rounds:
            problem = build(shared, batch, choices, outputs, sent=sent)
            inner = relaxed(problem.seconds, _RELAXED)
            elimination = Elimination([*inner, *relaxed(problem.ends, _RELAXED)], problem.sizes, limit)
            if elimination.least > enough:
                raise UninterestingError(elimination.least)
    except TooWideError:
        return strategies, None
    floor = Floor(graph, batch, choices, inner, problem.sizes, most, limit)
    layers = assigned(choices, elimination.assignment())
    ops = {call.layer: call.op for call in graph.calls if call.op in COMPUTE}
    if used_axes({layer: s for layer, s in layers.items() if layer in ops}, ops) == batch.axes:
        least_known = min(least_known, price(layers))
    bounds = elimination.min_marginals()
    for v, choice in enumerate(choices):
        near = kept(choice.strategies, list(bounds[v]), least_known * (1 + tolerance))
        strategies |= dict.fromkeys(choice.layers, near)
    return strategies, floor


def _plainness(axes: Axes, strategy: Strategy) -> tuple[int, int, int]:
    """Least for samples on all axes that may divide them, and filters, or else rows, on the others."""
    rest = [choice for axis, choice in enumerate(strategy) if axis not in axes]
    return (
        sum(strategy[axis] != "sample" for axis in axes),
        sum(choice not in ("filter", "height") for choice in rest),
        sum(choice == "height" for choice in rest),
    )
