"""How `convoy plan` answers: on this device, or as one of as many as the plan is for, where this machine has them; and
with `--on` by predictions for machines that are not at hand."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import click
import torch
from torch import nn

from convoy import models, resources
from convoy.cli.on_devices import on_devices
from convoy.cli.options import command_of, written
from convoy.cli.requests import PlanRequest
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import keep_freed_memory
from convoy.errors import ConvoyError
from convoy.files import finite
from convoy.hardware.catalog import Machine
from convoy.hardware.speed import OURS
from convoy.planner.cost.costs import HostCost
from convoy.planner.cost.step import Staging
from convoy.planner.explanation import Explanation, explanation_text
from convoy.planner.interface import race
from convoy.planner.machines import Prediction, predict, usual_precision
from convoy.planner.planner import Planned, Question, make_plan
from convoy.planner.store import ProfileStore
from convoy.planner.workload import PRECISIONS, Workload, workload_of
from convoy.plans.fit import check_patterns
from convoy.plans.place import COMPUTE, sample_axes
from convoy.plans.plan import Plan
from convoy.plans.timeline import trace
from convoy.progress import ConsoleReporter
from convoy.recipe.recipe import Recipe
from convoy.report.plan_page import machines_page, plan_page
from convoy.terminal import Console
from convoy.training import choose_device
from convoy.training.build import choose_trained, divisible_sizes, make_lazy
from convoy.training.division import divide
from convoy.training.precision import set_numerics, settle
from convoy.training.workloads import schedules_of, workload_of_recipe
from convoy.units import plural, table

IMAGENET = 1_281_167  # images of an epoch where nobody says
ASSUMED_SIZE = 224  # pixels of an image's sides where neither the request nor the network says


def run(request: PlanRequest, recipe: Recipe) -> int:
    """Plan, print and write the result; the exit status."""
    number, per_device = request.num_devices, recipe.parallel.cores_per_device

    def work(ranks: Ranks, device: torch.device) -> int:
        return _answer(request, recipe, max(number, ranks.num), ranks, device)

    def to_start() -> int:
        on_gpu, per_core = choose_device(request.device).type == "cuda", per_device or 1
        there = torch.cuda.device_count() if on_gpu else len(resources.own_cores()) // per_core
        return number if request.link is None and number <= there else 1

    asked = number if request.devices is not None or request.score else None
    return on_devices(request.arguments, asked, request.device, work, to_start, per_device)


def _network(
    request: PlanRequest, recipe: Recipe, device: torch.device
) -> tuple[nn.Module, tuple[int, int, int], list[str]]:
    """The network with fresh weights, the shape of its images, and notes on that and on layers that are frozen."""
    name, settings = recipe.model.name, dict(recipe.model.options)
    usual = models.describe(name).input_shape
    size, notes = recipe.data.image_size or (usual[1] if usual is not None else None), []
    if size is None:
        size = ASSUMED_SIZE
        notes.append(
            f"the size of the images for {name} is not known: {ASSUMED_SIZE}×{ASSUMED_SIZE} pixels are assumed, unless "
            "--image-size says otherwise"
        )
    if models.accepts(name, "image_size"):
        settings.setdefault("image_size", size)
    torch.manual_seed(recipe.seed)
    model = models.create(name, num_classes=request.classes, in_channels=recipe.data.channels, **settings)
    channels = recipe.data.channels or (usual[0] if usual is not None else models.image_channels(model))
    make_lazy(model, (channels, size, size))
    notes += choose_trained(model, recipe)
    return model.to(device).train(), (channels, size, size), notes


def _check_plans(request: PlanRequest, recipe: Recipe, model: nn.Module, workload: Workload) -> None:
    """Refuse plans to be scored that the network or the batch cannot have, by their names."""
    calls = [(call.layer, call.op) for call in workload.graph.calls]
    layers = [layer for layer, op in calls if op in COMPUTE]
    sizes, _ = divisible_sizes(recipe, model, request.num_devices)
    for plan in request.plans:
        check_patterns(plan, layers, [name for name, _ in model.named_modules()])
        try:
            if recipe.batch_norm == "microbatch":
                divide(sizes, plan.mesh.size(sample_axes(calls, plan)))
            staged = workload.through(plan.num_stages, parts=plan.parts)
            staged.place(plan)
            Staging.of(plan, staged.graph, staged.outputs, staged.samples_of_passes)
        except ConvoyError as error:
            raise ConvoyError(f"--score {plan}: {error}") from error


def _answer(request: PlanRequest, recipe: Recipe, devices: int, ranks: Ranks, device: torch.device) -> int:
    """Plan for `devices` on this rank, and on the first one print and write the result; the exit status. All ranks call
    it."""
    if devices > 1:
        keep_freed_memory(device)  # as it will be in training
    set_numerics(recipe)
    model, shape, notes_on_size = _network(request, recipe, device)
    settled = settle(recipe, device, ranks)
    recipe = settled.recipe
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    for note in notes_on_size if ranks.rank == 0 else ():
        click.echo(note, err=True)
    notes = [*notes_on_size, *settled.notes]
    workload = workload_of_recipe(recipe, model, shape, devices, device, ranks.group)
    _check_plans(request, recipe, model, workload)
    sizes, cut_note = divisible_sizes(recipe, model, devices)
    first = [cut_note] if cut_note is not None else []
    pieces = len(sizes)
    if recipe.batch_norm == "microbatch" and pieces < devices:
        first = [
            f"the batch is {pieces} microbatch{'' if pieces == 1 else 'es'}, which stay whole, so no plan divides the "
            f"samples over {devices} devices: --microbatches {devices} would let it"
        ]
    if devices > ranks.num:
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        else:
            name = f"{torch.get_num_threads()} core{'s' if torch.get_num_threads() > 1 else ''} of this machine"
        notes.append(f"each device is taken to be as this one: {name}")
    input_cost = None
    if request.images_per_second is not None:  # beside the computation on a GPU, from the same cores on a CPU
        input_cost = HostCost(per_sample=1 / request.images_per_second, beside=device.type == "cuda")
    question = Question(
        workload,
        devices,
        link=request.link,
        store=None if request.no_store else ProfileStore(),
        fixes=request.fix,
        memory_limit=recipe.parallel.memory_bytes,
        plans=request.plans,
        input=input_cost,
        notes=[*first, *notes],
    )
    console = Console(stderr=True, highlight=False, quiet=ranks.rank > 0)
    with ConsoleReporter(console) as reporter:
        racing = None if request.plans else partial(race, model, recipe.recompute)
        planned = make_plan(question, ranks, reporter.prepare, racing)
    if ranks.rank == 0:
        _show_plan(request, planned, first, notes_on_size)
    return 0


def _show_plan(request: PlanRequest, planned: Planned, first: Sequence[str], assumed: Sequence[str]) -> None:
    answer, command = Explanation(planned), command_of(request.arguments)
    origin = "# " + command.replace("\n", " ") + "\n"
    origin += f"# predicted: {1e3 * answer.scored.seconds:.4g} ms an update, "
    origin += f"{planned.speedup:.3g} times as fast as one device\n"
    origin += "".join(f"# {note}\n" for note in assumed)
    files = {
        "out": lambda: origin + answer.scored.plan.to_yaml(),
        "html": lambda: plan_page(answer, command),
        "trace": lambda: json.dumps(trace(predicted=answer.scored.timeline), allow_nan=False),
    }
    _show(request, files, answer.document, lambda: explanation_text(answer, first))


def _show(
    request: PlanRequest,
    files: Mapping[str, Callable[[], str]],
    document: Callable[[], object],
    text: Callable[[], str],
) -> None:
    """Write those of the `files` that are asked for, by the names of their options, and print the answer."""
    paths = {name: getattr(request, name) for name in files if getattr(request, name) is not None}
    for name, path in paths.items():
        written(f"--{name}", path, files[name]())
    if request.as_json:
        click.echo(json.dumps(finite(document()), indent=2, allow_nan=False))
        return
    click.echo(text(), nl=False)
    for name, path in paths.items():
        label = {"out": "plan", "html": "page"}.get(name, name)
        click.echo(f"{label}: {path}")


def run_on(request: PlanRequest, recipe: Recipe) -> int:
    """Predict for the machines of `--on`, print and write the result; the exit status."""
    workload = cache(partial(workload_at, request, recipe))
    predictions = [predicted(request, recipe, machine, workload) for machine in request.machines]
    images, what = _training(request, recipe)
    name = recipe.model.name
    head = f"{name}, batch {recipe.batch}: predicted, not measured, as eager PyTorch runs it\n\n"
    files = {
        "out": lambda: f"# {command_of(request.arguments)}\n{predictions[0].plan.to_yaml()}",
        "html": lambda: machines_page(name, predictions, images, request.prices, what, command_of(request.arguments)),
    }
    prices: Sequence[float | None] = request.prices or [None] * len(predictions)
    _show(
        request,
        files,
        lambda: [prediction.document(images, price) for prediction, price in zip(predictions, prices, strict=True)],
        lambda: head + "\n".join([*_lines(predictions, images, prices, what, len(request.plans)), ""]),
    )
    return 0


def predicted(
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


def workload_at(request: PlanRequest, recipe: Recipe, precision: str, microbatch: int) -> Workload:
    """The network at the batch of an update; its weights are not made where it allows that."""
    try:
        with torch.device("meta"):
            model, shape, _ = _network(request, recipe, torch.device("meta"))
    except ConvoyError:
        raise
    except Exception:  # a network of the user's that computes with its weights as it is made
        model, shape, _ = _network(request, recipe, torch.device("cpu"))
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
