"""How `convoy plan --on` answers: predictions for machines that are not at hand."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from convoy.cli.options import command_of
from convoy.cli.plan_answer import network, show
from convoy.cli.requests import PlanRequest
from convoy.errors import ConvoyError
from convoy.hardware.catalog import Machine
from convoy.hardware.speed import OURS
from convoy.planner.machines import PRECISIONS, Prediction, predict, usual_precision
from convoy.planner.workload import Workload, workload_of
from convoy.plans.place import COMPUTE
from convoy.plans.plan import Plan
from convoy.report.plan_page import machines_page
from convoy.training.recipe import Recipe
from convoy.training.workloads import schedules_of
from convoy.units import plural, table

IMAGENET = 1_281_167  # images of an epoch where nobody says


def run(request: PlanRequest, recipe: Recipe) -> int:
    """Predict, print and write the result; the exit status."""
    workload = cache(partial(_workload, request, recipe))
    predictions = [_predicted(request, recipe, machine, workload) for machine in request.machines]
    images, what = _training(request, recipe)
    name = recipe.model.name
    head = f"{name}, batch {recipe.batch}: predicted, not measured, as eager PyTorch runs it\n\n"
    files = {
        "out": lambda: f"# {command_of(request.arguments)}\n{predictions[0].plan.to_yaml()}",
        "html": lambda: machines_page(name, predictions, images, request.prices, what, command_of(request.arguments)),
    }
    prices: Sequence[float | None] = request.prices or [None] * len(predictions)
    show(
        request,
        files,
        lambda: [prediction.document(images, price) for prediction, price in zip(predictions, prices, strict=True)],
        lambda: head + "\n".join([*_lines(predictions, images, prices, what, len(request.plans)), ""]),
    )
    return 0


def _predicted(
    request: PlanRequest, recipe: Recipe, machine: Machine, workload: Callable[[str, int], Workload]
) -> Prediction:
    """The prediction for one machine, with microbatches so small that each device has one; in the recipe's precision,
    else in bf16 on devices that have it, as in training."""
    precision = str(recipe.precision) if recipe.precision in PRECISIONS else usual_precision(machine)
    usual = min(recipe.batch, recipe.microbatch or -(-recipe.batch // (recipe.microbatches or 1)))
    size = min(usual, recipe.batch // len(machine.devices)) if recipe.batch_norm == "microbatch" else 0
    lowered = PRECISIONS[precision] is not None  # where channels lie innermost unless somebody says otherwise
    channels_last = lowered if recipe.channels_last is None else recipe.channels_last
    net = workload(precision, size)
    prediction = predict(
        net,
        machine,
        precision,
        fixes=request.fix,
        plans=request.plans,
        memory_limit=recipe.parallel.memory_bytes,
        images_per_second=request.images_per_second,
        software=replace(OURS, channels_last=channels_last, compiled=recipe.compile),
    )
    if size == usual or recipe.batch_norm != "microbatch" or all(call.op != "batch_norm" for call in net.graph.calls):
        return prediction
    note = f"batch norm takes its statistics over {size} samples, so that each device has a microbatch: training does "
    note += f"so with --microbatches {-(-recipe.batch // size)}"
    return replace(prediction, notes=(*prediction.notes, note))


def _workload(request: PlanRequest, recipe: Recipe, precision: str, microbatch: int) -> Workload:
    """The network at the batch of an update; its weights are not made where it allows that."""
    try:
        with torch.device("meta"):
            model, shape, _ = network(request, recipe, torch.device("meta"))
    except ConvoyError:
        raise
    except Exception:  # a network of the user's that computes with its weights as it is made
        model, shape, _ = network(request, recipe, torch.device("cpu"))
    workload = workload_of(
        model,
        torch.empty(1, *shape),
        recipe.batch,
        name=recipe.model.name,
        batch_norm=recipe.batch_norm,
        microbatch=microbatch,
        precision=PRECISIONS[precision],
    )
    return replace(workload, schedules=schedules_of(recipe))


def _training(request: PlanRequest, recipe: Recipe) -> tuple[float, str]:
    """Images of the whole training, and the training in words."""
    images = request.images or IMAGENET
    epochs = recipe.epochs
    if epochs.unit == "ba":
        return epochs.value * recipe.batch, f"{epochs.value:,.0f} updates of {recipe.batch} images"
    return epochs.value * images, f"{epochs.value:g} epochs of {images:,} images"


def _lines(
    predictions: Sequence[Prediction], images: float, prices: Sequence[float | None], what: str, num_plans: int
) -> Iterator[str]:
    """A table of the machines, and what is to be said of each. `images` are those of the whole training, `what` is that
    in words; `prices` are of an hour of one device of each machine, None where they are not known."""
    rows = [prediction.row(images, price) for prediction, price in zip(predictions, prices, strict=True)]
    yield from table([*rows[0]], [[*row.values()] for row in rows], [*rows[0]][2:])
    yield f"days{' and price, in the currency of --price,' if prices[0] is not None else ''} of {what}"
    for prediction in predictions:
        yield ""
        yield f"{prediction.machine.label}: held back by {prediction.held_back_by}"
        if num_plans > 1 and prediction.planned is not None:
            for scored in prediction.planned.candidates:
                rate = prediction.best * prediction.planned.best.seconds / scored.seconds
                yield f"  plan {scored.plan}: {rate:,.0f} images/s"
        if len(prediction.machine.devices) > 1:
            yield from _plan_lines(prediction, "the plan" if num_plans == 1 else "fastest plan")
        for change in prediction.changes[:4]:
            yield f"  {change.text}: {change.gain:.2f} × as fast"
        for note in prediction.notes:
            yield f"  note: {note}"


def _plan_lines(prediction: Prediction, what: str) -> Iterator[str]:
    """The fastest plan, and how it divides layers with weights where it is neither data parallelism nor stages."""
    plan, planned = prediction.plan, prediction.planned
    if plan == Plan.by_samples(len(prediction.machine.devices)) or planned is None:
        yield f"  {what}: data parallelism"
        return
    passes = f" in {planned.best.passes} passes" if planned.best.passes > 1 else ""
    if planned.best.staging is not None:
        passes += f", schedule {planned.best.staging.schedule}"
    rate = f"the {prediction.images_per_s:,.0f} images/s of data parallelism"
    yield f"  {what}: {plan}{passes}, {prediction.gain:.2f} times {rate}"
    if plan.num_stages > 1:
        return
    groups: dict[str, list[str]] = {}
    for call in planned.workload.graph.calls:
        if call.op in COMPUTE:
            strategies = dict.fromkeys(plan.strategy(call.layer, call.op))
            groups.setdefault(" and ".join(strategies), []).append(call.layer)
    for strategy, names in groups.items():
        yield f"    {plural(len(names), 'layer')} ({names[0]}{' …' * (len(names) > 1)}): {strategy}"
