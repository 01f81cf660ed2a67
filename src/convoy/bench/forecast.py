"""What is predicted of the configurations, before any of them is measured; and which plan `auto` is."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from convoy.bench.configuration import AUTO
from convoy.bench.measurement import COMMUNICATION, COMPUTE, INPUT, OPTIMIZER, MeasurementTask, join
from convoy.bench.processes import Say
from convoy.bench.study import data_of, in_recipe
from convoy.comm.ranks import Ranks
from convoy.data import open_data
from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.planner import make_plan
from convoy.planner.cost.step import Scored
from convoy.planner.cost.store import ProfileStore
from convoy.plans.plan import Plan, plan_text
from convoy.training.build import build_model
from convoy.training.division import text as text_of
from convoy.training.precision import set_numerics
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.workloads import workload_of_recipe


@dataclass(frozen=True)
class PlanPrediction:
    """Of a plan.

    Attributes:
        seconds: of an update.
        parts: the same by what they go to.
        memory: bytes on the rank that needs most.
    """

    seconds: float
    parts: dict[str, float]
    memory: int


@dataclass(frozen=True)
class Forecast:
    """Of all plans on some devices.

    Attributes:
        auto: the plan that the trainer would take, where that was asked; None where not.
        auto_shares: microbatches of each part of the batch that it would take with it; None where they are even.
        bound: the plans that it would take with shares that are numbers, by these.
        predictions: by the text of the plan; those that cannot be are left out. That of `auto_shares` is of `auto`.
        notes: sentences on how they came to be.
    """

    auto: str | None = None
    auto_shares: tuple[int, ...] | None = None
    bound: dict[str, str] = field(default_factory=dict)
    predictions: dict[str, PlanPrediction] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def forecast(
    task: MeasurementTask, plans: Sequence[str], bound: Sequence[str], predict: bool, keep: bool, say: Say
) -> Forecast:
    """Predict all plans on the devices of a task, with the batch in even parts. All ranks call it.

    Devices that are not equally fast are predicted as such. Shares are not, but those that the planner has for `auto`.

    Args:
        task: its recipe has the devices; its plan does not matter.
        plans: texts of plans for so many; `auto` is found first.
        bound: shares, as numbers, for which a plan is to be found.
        predict: whether predictions are wanted, beside the plan of `auto`.
        keep: whether measured times are kept for the next time, and those that are kept are used.
        say: is told of long work.
    """
    ranks, device = join(task)
    data = data_of(task.made, task.recipe)
    notes: list[str] = []
    auto, shares = None, None
    found: dict[str, PlanPrediction] = {}

    def choose(numbers: str = "") -> Session:
        parallel = task.recipe.parallel.model_copy(update={"plan": AUTO, **in_recipe(numbers)})
        recipe = task.recipe.model_copy(update={"parallel": parallel})
        session = set_up(recipe, device, say, ranks, data, keep)
        notes.extend(f"shares {numbers}: {note}" if numbers else note for note in session.notes)
        return session

    if AUTO in plans:
        session = choose()
        auto, counts = plan_text(session.plan), session.division.counts
        even = microbatch_sizes(len(session.division.sizes), len(counts))
        if task.recipe.parallel.shares is None and counts != even:
            shares = counts
            notes.append(f"plan auto divides the batch by speed: {text_of(counts)} microbatches")
            if predict and session.scored is not None:
                found[AUTO] = _prediction(session.scored)
        del session
    bound_to = {}
    for numbers in bound:
        try:
            bound_to[numbers] = plan_text(choose(numbers).plan)
        except ConvoyError as error:
            notes.append(f"auto, shares {numbers}: {error}")
    if not predict:
        return Forecast(auto, shares, bound_to, {}, tuple(notes))
    set_numerics(task.recipe)
    data = data or open_data(task.recipe.data)
    model, _ = build_model(task.recipe, data)
    memory_format = torch.channels_last if task.recipe.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    shape = data.channels, data.image_size, data.image_size
    try:
        workload = workload_of_recipe(task.recipe, model.train(), shape, ranks.num, device)
        wanted: dict[str, Plan] = {}
        for text in dict.fromkeys(auto if text == AUTO and auto is not None else text for text in plans):
            try:
                workload.place(Plan.parse(text))
                wanted[text] = Plan.parse(text)
            except ConvoyError as error:
                notes.append(f"{text}: {error}")
        ranks = Ranks.here() if ranks.num > 1 else Ranks()
        planned = make_plan(
            replace(workload, by_speed=None),
            ranks.num,
            ranks,
            store=ProfileStore() if keep else None,
            plans=list(wanted.values()),
            progress=say,
        )
        by_plan = {one.plan: one for one in planned.candidates}
        for text, plan in wanted.items():
            found[text] = _prediction(planned.serial if ranks.num == 1 else by_plan[plan])
        notes += planned.notes
    except ConvoyError as error:
        notes.append(f"nothing is predicted: {error}")
    return Forecast(auto, shares, bound_to, found, tuple(notes))


def _prediction(scored: Scored) -> PlanPrediction:
    kinds: dict[str, Any] = scored.timeline.by_kind()
    timeline = scored.timeline
    before = sum(
        span.end - span.start
        for span in timeline.spans
        if span.task.rank == timeline.busiest and span.task.kind == "around" and span.task.name == "input"
    )
    parts = {
        INPUT: before,
        COMMUNICATION: kinds["exposed"] + kinds["idle"],
        OPTIMIZER: kinds.get("update", 0.0),
    }
    return PlanPrediction(scored.seconds, {COMPUTE: scored.seconds - sum(parts.values()), **parts}, scored.memory.total)
