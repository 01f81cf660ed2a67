"""What the planner predicts of the rows of a study before they are measured, and the plans that it chooses for them."""

from collections.abc import Sequence
from dataclasses import replace

from convoy.bench.measure import MeasurementTask, network_of
from convoy.bench.processes import Say
from convoy.bench.records import AUTO, Forecast, PlanPrediction
from convoy.bench.study import data_of, in_recipe
from convoy.comm.ranks import Ranks
from convoy.data import open_data
from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.planner.cost.prediction import Scored
from convoy.planner.planner import Question, make_plan
from convoy.planner.store import ProfileStore
from convoy.plans.plan import Plan, plan_text
from convoy.training.division import text as text_of
from convoy.training.precision import set_numerics
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.workloads import workload_of_recipe


def forecast(
    task: MeasurementTask, plans: Sequence[str], bound: Sequence[str], predict: bool, keep: bool, say: Say
) -> Forecast:
    """Predict all plans on the devices of a task's recipe, with the batch in even parts. All ranks call it.

    Devices that are not equally fast are predicted as such; shares are not, but those that the planner has for `auto`:
    plans are scored with even parts, so that `make_plan` is asked without shares.
    For `auto` among the plans, and for each of the shares in `bound`, the planner first finds a plan, also where
    `predict` is false. `keep` uses times that were measured before, and stores new ones.
    """
    ranks, device = task.join()
    recipe, result = task.recipe, Forecast()
    data = data_of(task.made, recipe) or open_data(recipe.data)
    texts = [text for text in plans if text != AUTO]
    rivals = [plan for plan in map(Plan.parse, texts) if plan.mesh.num_devices == ranks.num]

    def choose(shares: str = "") -> Session:
        parallel = recipe.parallel.model_copy(update={"plan": AUTO, **in_recipe(shares)})
        auto_recipe = recipe.model_copy(update={"parallel": parallel})
        session = set_up(auto_recipe, device, say, ranks, data, keep, rivals=[] if shares else rivals)
        result.notes.extend(f"shares {shares}: {note}" if shares else note for note in session.notes)
        return session

    if AUTO in plans:
        session = choose()
        result.auto, counts = plan_text(session.plan), session.division.counts
        texts = list(dict.fromkeys(result.auto if text == AUTO else text for text in plans))
        if recipe.parallel.shares is None and counts != microbatch_sizes(len(session.division.sizes), len(counts)):
            result.auto_shares = list(counts)
            result.notes.append(f"plan auto divides the batch by speed: {text_of(counts)} microbatches")
            if predict and session.scored is not None:
                result.predictions[AUTO] = _prediction(session.scored)
        del session
    for shares in bound:
        try:
            result.bound[shares] = plan_text(choose(shares).plan)
        except ConvoyError as error:
            result.notes.append(f"auto, shares {shares}: {error}")
    if not predict:
        return result
    try:
        set_numerics(recipe)
        model, _ = network_of(recipe, data, device)
        shape = data.channels, data.image_size, data.image_size
        workload = workload_of_recipe(recipe, model.train(), shape, ranks.num, device, ranks.group)
        scheduled = replace(workload, by_speed=None, schedules=(recipe.parallel.schedule or "1f1b",))
        placed: dict[str, Plan] = {}
        for text in texts:
            try:
                plan = Plan.parse(text)
                workload.place(plan)
                placed[text] = plan
            except ConvoyError as error:
                result.notes.append(f"{text}: {error}")
        store = ProfileStore() if keep else None
        question = Question(scheduled, ranks.num, store=store, plans=list(placed.values()))
        planned = make_plan(question, Ranks.here() if ranks.num > 1 else Ranks(), say)
        scored = {candidate.plan: candidate for candidate in planned.candidates}
        for text, plan in placed.items():
            result.predictions[text] = _prediction(planned.serial if ranks.num == 1 else scored[plan])
        result.notes.extend(planned.notes)
    except ConvoyError as error:
        result.notes.append(f"nothing is predicted: {error}")
    chosen = result.predictions.get(result.auto or "") if AUTO in plans else None
    for text, prediction in result.predictions.items():
        if chosen is not None and prediction.seconds < chosen.seconds:
            result.notes.append(f"{text} is predicted to be faster than {result.auto}, but did not win the race")
    return result


def _prediction(scored: Scored) -> PlanPrediction:
    return PlanPrediction(seconds=scored.seconds, memory=scored.memory.total)
