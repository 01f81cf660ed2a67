"""`--plan auto`: the planner's best plans race for a few updates, and the fastest is kept."""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from convoy.cost.costs import Around
from convoy.cost.store import ProfileStore
from convoy.data import Batch, DataSet
from convoy.engine.steady import steady
from convoy.errors import ConvoyError, TooLargeError
from convoy.planning import Planned, Ranks, Scored, make_plan
from convoy.planning.remembered import remember
from convoy.planning.verdict import explained
from convoy.plans.explain import size
from convoy.plans.plan import Plan
from convoy.training.planning.device_memory import device_memory
from convoy.training.planning.input_rate import measure_input
from convoy.training.planning.workloads import measuring, workload_in_passes
from convoy.training.ranks.devices import Devices
from convoy.training.recipe import Recipe
from convoy.training.step import TrainingStep

CLEAR = 2 / 3
"""A plan that is predicted to need no more than this part of every other's time need not race."""
_ENOUGH, _MOST = 3, 8
"""Updates of a racer that must be near its fastest, and after how many it ends in any case."""

Shares = tuple[int, ...] | None
"""Microbatches of each part of the batch; None where they are as even as can be, or as the recipe says."""
MakeStep = Callable[[nn.Module, Plan, Devices, Shares], TrainingStep]
"""The update of a network under a plan, by some devices; it changes the network, and which samples this rank has."""


@dataclass(frozen=True)
class Chosen:
    """The plan that runs.

    Attributes:
        planned: what the planner predicted; None where it could not.
        notes: sentences about how it came to be.
    """

    plan: Plan
    planned: Planned | None
    notes: tuple[str, ...]

    @property
    def shares(self) -> Shares:
        """By which devices that are not equally fast end at the same time."""
        return self.planned.shares(self.plan) if self.planned is not None else None

    @property
    def one_device_s(self) -> float | None:
        """Seconds of an update on one device, as predicted."""
        return self.planned.serial.seconds if self.planned is not None else None

    @property
    def scored(self) -> Scored | None:
        """What was predicted of this plan."""
        candidates = self.planned.candidates if self.planned is not None else ()
        return next((one for one in candidates if one.plan == self.plan), None)


@dataclass(frozen=True)
class Choice:
    """What a plan is chosen for.

    Attributes:
        model: the plain network; it is left as it is.
        sizes: samples of each microbatch of an update.
        merge: microbatches that one device takes in a pass.
        profiles: of what was measured before; None keeps nothing.
        make_step: the update of a copy of it under a plan, by the devices that are given.
    """

    recipe: Recipe
    model: nn.Module
    data: DataSet
    sizes: tuple[int, ...]
    merge: int
    device: torch.device
    devices: Devices
    profiles: ProfileStore | None
    make_step: MakeStep
    progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def __call__(self) -> Chosen:
        """Plan, and race where the prediction is not clear. All ranks call it.

        Raises:
            TooLargeError: no plan fits into the memory of the devices.
        """
        plain = Plan.parse(f"sample={self.devices.num}")
        if self.recipe.reproducible:
            return Chosen(plain, None, (f"plan auto is {plain}: reproducible runs divide samples alone",))
        limit, source = device_memory(self.device, self.devices.ranks.on_host)
        limit = min(self.devices.gather(limit))
        self.progress("timing the input", 0, 1)
        ahead = measure_input(self.recipe, self.data, self.device, self.devices) or Around()
        try:
            planned = self._planned(limit, ahead)
        except TooLargeError:
            raise
        except ConvoyError as error:
            return Chosen(plain, None, (f"plan auto is {plain}: {error}",))
        plans = [scored.plan for scored in planned.candidates]
        racers = [plan for place, plan in enumerate(plans) if place < 2 or plan == plain]
        best = planned.best
        within = f"within {size(int(limit))} of memory a device, {source}"
        said = [f"plan auto: {best.plan} is predicted to be fastest, {_each(best.seconds)} ({within})"]
        others = [scored.seconds for scored in planned.candidates[1:]]
        winner = best.plan
        if others and best.seconds > CLEAR * min(others):
            took, failures = self._race(racers, planned, ahead)
            winner = min(took, key=lambda plan: took[plan])
            result = ", ".join(f"{plan} {_each(seconds)}" for plan, seconds in took.items())
            said.append(f"in a race over {_ENOUGH} to {_MOST} updates each: {result}")
            said += [f"{plan} left the race: {error}" for plan, error in failures.items()]
        chosen = Chosen(winner, planned, tuple(said))
        verdict = self.devices.first(lambda: explained(planned, chosen.scored).verdict.sentence)
        return replace(chosen, notes=(*said, f"{winner}: {verdict}", *planned.notes))

    def _planned(self, limit: float, ahead: Around) -> Planned:
        shape = self.data.channels, self.data.image_size, self.data.image_size
        workload = workload_in_passes(
            self.recipe, self.model, shape, self.sizes, self.merge, self.devices.num, self.device
        )
        ranks, store = self.devices.ranks, self.profiles
        planned = make_plan(
            workload, ranks.num, ranks, store=store, memory_limit=limit, input=ahead, progress=self.progress
        )
        if ranks.rank == 0 and store is not None:
            here = measuring(self.recipe, self.device, ranks.on_host)
            remember(store, here, ranks.num, self.recipe.optimizer.name, planned.costs)
        return planned

    def _race(
        self, plans: Sequence[Plan], planned: Planned, ahead: Around
    ) -> tuple[dict[Plan, float], dict[Plan, ConvoyError]]:
        """Seconds of an update under each plan, of the slowest rank, with what its input takes; and why others failed.

        Raises:
            ConvoyError: none of them can be run.
        """
        took: dict[Plan, float] = {}
        failures: dict[Plan, ConvoyError] = {}
        for number, plan in enumerate(plans):
            self.progress(f"racing {plan}", number, len(plans))
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                try:
                    raced = partial(self._raced, plan, planned.shares(plan), ahead)
                    took[plan] = self.devices.ranks.trying(f"racing {plan}", raced)
                except ConvoyError as error:
                    failures[plan] = error
        self.progress("racing", len(plans), len(plans))
        if not took:
            raise failures[plans[0]]
        return took, failures

    def _raced(self, plan: Plan, shares: Shares, ahead: Around, ranks: Ranks) -> float:
        here = replace(self, devices=Devices(ranks))
        step = self.make_step(copy.deepcopy(self.model), plan, here.devices, shares)
        samples = sum(len(piece.parts[step.rank]) for piece in step.passes)
        waits = max(ranks.gather(ahead.seconds(samples)))
        seconds = here._time(step)
        return max(seconds, waits) if ahead.beside else seconds + waits

    def _time(self, step: TrainingStep) -> float:
        data = self.data
        samples = sum(len(piece.parts[step.rank]) for piece in step.passes)
        images = torch.randint(0, 256, (samples, data.channels, data.image_size, data.image_size), dtype=torch.uint8)
        batch = Batch(images, torch.zeros(samples, dtype=torch.int64), torch.arange(samples))
        updates = itertools.count()

        def measure() -> float:
            self.devices.barrier()
            began = time.perf_counter()
            step(batch, next(updates))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return max(self.devices.gather(time.perf_counter() - began))  # all know the same, and end together

        return statistics.median(steady(measure, lambda seconds: seconds, enough=_ENOUGH, most=_MOST))


def _each(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms an update"
