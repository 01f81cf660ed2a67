"""What a search answers: plans with their costs, and for each layer of the best one the next best strategy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.search.solve import Solution, next_best
from convoy.search.space import Strategy


@dataclass(frozen=True)
class Candidate:
    """A plan and what it is predicted to cost.

    Attributes:
        seconds: the sum of its costs.
        redistributions: how often it brings a tensor from one layout to another.
        measure: what says how much memory it takes.
    """

    plan: Plan
    seconds: float
    redistributions: int
    measure: Callable[[Plan], float] = field(repr=False, compare=False)

    @cached_property
    def memory(self) -> float:
        """Bytes on the rank that needs most; counted when first asked for."""
        return self.measure(self.plan)


@dataclass(frozen=True)
class NextBest:
    """What a layer would cost with its second best strategy, all other layers chosen anew for that, on the same mesh.

    Attributes:
        layers: mostly one; those that have one strategy together where they are tied.
        strategy: what the best plan gives them, one for each axis of `SearchResult.mesh`.
        other: the second best, None where they can have no other.
        seconds: of the whole plan with `other`; infinite where there is none. It can be less than those of the best
            plan, by the search's tolerance at most, which then sends less.
    """

    layers: tuple[str, ...]
    strategy: Strategy
    other: Strategy | None
    seconds: float


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        candidates: different plans, the one to have first and then by their seconds: the best of a mesh and of a way
            to divide the samples each, and plain `sample` where it can be.
        exact: whether no plan on the meshes that were searched costs less than `least`, and none within the tolerance
            has fewer redistributions than the first candidate.
        notes: sentences about what was left out or tied, empty where `exact`.
        searched: the meshes.
        least: seconds of the fastest plan.
        solution: the tables of the search that gave the best plan.
    """

    candidates: tuple[Candidate, ...]
    exact: bool
    notes: tuple[str, ...]
    searched: tuple[Mesh, ...]
    least: float
    solution: Solution = field(repr=False, compare=False)

    @property
    def best(self) -> Candidate:
        """The first candidate."""
        return self.candidates[0]

    @cached_property
    def next_best(self) -> tuple[NextBest, ...]:
        """For the best plan, layer by layer in the network's order; worked out when first asked for."""
        found = []
        for v, numbers in next_best(self.solution).items():
            choice = self.solution.problem.choices[v]
            own = self.solution.layers[choice.layers[0]]
            others = [(float(n), s) for n, s in zip(numbers, choice.strategies, strict=True) if s != own]
            seconds, other = min(others, default=(float("inf"), None), key=lambda pair: pair[0])
            found.append(NextBest(choice.layers, own, other if seconds < float("inf") else None, seconds))
        return tuple(found)
