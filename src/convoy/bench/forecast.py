"""Predictions for the configurations, before any of them is measured; and which plan `auto` is."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from convoy.bench.measurement import MeasurementTask, join
from convoy.bench.processes import Say
from convoy.bench.records import AUTO, COMMUNICATION, COMPUTE, INPUT, OPTIMIZER, Forecast, PlanPrediction
from convoy.bench.study import data_of, in_recipe
from convoy.comm.ranks import Ranks
from convoy.data import open_data
from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.planner import make_plan
from convoy.planner.cost.prediction import Scored
from convoy.planner.cost.store import ProfileStore
from convoy.plans.plan import Plan, plan_text
from convoy.training.build import build_model
from convoy.training.division import text as text_of
from convoy.training.precision import set_numerics
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.workloads import workload_of_recipe


def forecast(
    task: MeasurementTask, plans: Sequence[str], bound: Sequence[str], predict: bool, keep: bool, say: Say
) -> Forecast:
    """Predict all plans on the devices of a task's recipe, with the batch in even parts. All ranks call it.

    Devices that are not equally fast are predicted as such; shares are not, but those that the planner has for `auto`.
    For `auto` among the plans, and for each of the shares in `bound`, the planner first finds a plan, also where
    `predict` is false. `keep` uses times that were measured before, and stores new ones.
    """
    ranks, device = join(task)
    data = data_of(task.made, task.recipe)
    result = Forecast()
    rivals = [plan for text in plans if text != AUTO and (plan := Plan.parse(text)).mesh.num_devices == ranks.num]

    def choose(numbers: str = "") -> Session:
        parallel = task.recipe.parallel.model_copy(update={"plan": AUTO, **in_recipe(numbers)})
        recipe = task.recipe.model_copy(update={"parallel": parallel})
        session = set_up(recipe, device, say, ranks, data, keep, rivals=[] if numbers else rivals)
        result.notes.extend(f"shares {numbers}: {note}" if numbers else note for note in session.notes)
        return session

    if AUTO in plans:
        session = choose()
        result.auto, counts = plan_text(session.plan), session.division.counts
        even = microbatch_sizes(len(session.division.sizes), len(counts))
        if task.recipe.parallel.shares is None and counts != even:
            result.auto_shares = list(counts)
            result.notes.append(f"plan auto divides the batch by speed: {text_of(counts)} microbatches")
            if predict and session.scored is not None:
                result.predictions[AUTO] = _prediction(session.scored)
        del session
    for numbers in bound:
        try:
            result.bound[numbers] = plan_text(choose(numbers).plan)
        except ConvoyError as error:
            result.notes.append(f"auto, shares {numbers}: {error}")
    if not predict:
        return result
    set_numerics(task.recipe)
    data = data or open_data(task.recipe.data)
    model, _ = build_model(task.recipe, data)
    memory_format = torch.channels_last if task.recipe.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    shape = data.channels, data.image_size, data.image_size
    try:
        workload = workload_of_recipe(task.recipe, model.train(), shape, ranks.num, device, ranks.group)
        to_score: dict[str, Plan] = {}
        for text in dict.fromkeys(result.auto if text == AUTO and result.auto is not None else text for text in plans):
            try:
                plan = Plan.parse(text)
                workload.place(plan)
                to_score[text] = plan
            except ConvoyError as error:
                result.notes.append(f"{text}: {error}")
        planned = make_plan(
            replace(workload, by_speed=None, schedules=(task.recipe.parallel.schedule or "1f1b",)),
            ranks.num,
            Ranks.here() if ranks.num > 1 else Ranks(),
            store=ProfileStore() if keep else None,
            plans=list(to_score.values()),
            progress=say,
        )
        by_plan = {one.plan: one for one in planned.candidates}
        for text, plan in to_score.items():
            result.predictions[text] = _prediction(planned.serial if ranks.num == 1 else by_plan[plan])
        result.notes.extend(planned.notes)
        chosen_prediction = result.predictions.get(result.auto or "")
        for text, other in result.predictions.items():
            if chosen_prediction is not None and other.seconds < chosen_prediction.seconds and AUTO in plans:
                result.notes.append(f"{text} is predicted to be faster than {result.auto}, but did not win the race")
    except ConvoyError as error:
        result.notes.append(f"nothing is predicted: {error}")
    return result


def _prediction(scored: Scored) -> PlanPrediction:
    timeline = scored.timeline
    kinds = timeline.by_kind()
    parts = {
        INPUT: sum(
            span.end - span.start
            for span in timeline.spans
            if (span.task.rank, span.task.kind, span.task.name) == (timeline.busiest, "around", "input")
        ),
        COMMUNICATION: kinds["exposed"] + kinds["idle"],
        OPTIMIZER: kinds.get("update", 0.0),
    }
    compute = scored.seconds - sum(parts.values())
    return PlanPrediction(seconds=scored.seconds, parts={COMPUTE: compute, **parts}, memory=scored.memory.total)
