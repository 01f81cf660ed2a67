"""Runs `convoy train`: as one of several ranks, as what starts them, or alone; and prints how it goes."""

import math
from pathlib import Path
from typing import Any

import click

from convoy import interfaces, launch, resources
from convoy.cli.on_devices import device_of
from convoy.cli.options import command_of, is_verbose
from convoy.cli.requests import TrainRequest
from convoy.comm.joining import leave, meeting_store
from convoy.comm.position import current
from convoy.comm.ranks import Ranks
from convoy.doctor.updates import RunDoctor
from convoy.errors import ConvoyError
from convoy.files import stamp
from convoy.planner.comparison import comparison_text, headline
from convoy.plans.plan import Plan
from convoy.progress import ConsoleReporter
from convoy.recipe.parallel_config import num_devices, plan_of
from convoy.recipe.recipe import Recipe
from convoy.recipe.schema import seconds_of
from convoy.run.directory import RunDirectory
from convoy.tasks.metric import metric_in_words
from convoy.terminal import Console
from convoy.training import Outcome, Session, Trainer, choose_device
from convoy.training.build import check_layers
from convoy.training.environment import join_ranks
from convoy.training.resume import check_run
from convoy.training.set_up import check_devices
from convoy.training.stop import Interrupt
from convoy.training.watchdog import TIMEOUT_S, Watchdog, collective_limit_s
from convoy.units import plural, shorten

LONGEST_PLAN = 90  # characters of a plan in one line; `plan.yaml` has all of it
_ADVICE = "--resume goes on from the newest checkpoint"


def run(request: TrainRequest) -> int:
    """Train, and print the result; the exit status."""
    timeout_s = TIMEOUT_S
    if request.timeout is not None:
        try:
            timeout_s = seconds_of(request.timeout)
        except ValueError as error:
            raise ConvoyError(f"--timeout: {error}") from error
    if request.interface is not None:
        interfaces.use(request.interface)
    place = launch.find_place()
    if place is not None:
        return _run_as_rank(request, place, timeout_s)
    recipe, out = request.resolve(Ranks())
    number, per_device = num_devices(recipe.parallel), recipe.parallel.cores_per_device
    if number > 1:
        return _start_ranks(request, recipe, RunDirectory(out), number)
    request.notes += _without_effect(request, None, 1)
    if per_device is not None:
        resources.pin(resources.share(resources.own_cores(), 1, 0, per_device))
    with Watchdog(Ranks(), None, timeout_s=timeout_s) as watchdog:
        outcome = _train(request, recipe, out, device=choose_device(request.device), watchdog=watchdog)
    with Interrupt():
        return _answer(outcome, Ranks(), is_verbose(request.arguments))


def _start_ranks(request: TrainRequest, recipe: Recipe, folder: RunDirectory, number: int) -> int:
    """Start as many processes, after what each of them would refuse; the exit status."""
    check_run(folder, recipe, request.resume)
    resources.share(resources.own_cores(), number, 0, recipe.parallel.cores_per_device)
    try:
        check_devices(recipe, number)
    except ConvoyError:
        turns = resources.in_turns(number, len(resources.own_cores()))
        if turns is not None and choose_device(request.device).type == "cpu":  # else a note of the run
            click.echo(turns, err=True)
        raise
    plan, _ = plan_of(recipe.parallel, number)
    if plan is not None and plan != Plan.by_samples(number):
        check_layers(recipe, plan)
    before = stamp(folder.summary_file)
    return launch.start(
        request.arguments,
        number,
        is_verbose(request.arguments),
        request.max_restarts or 0,
        advice=lambda: _ADVICE if any(folder.checkpoints.glob("step-*")) else "nothing was saved yet",
        on_failure=lambda failure: folder.note_end(failure.reason, before),
    )


def _run_as_rank(request: TrainRequest, place: launch.RankPlace, timeout_s: float) -> int:
    place.check(request.devices)
    with launch.as_rank(place, saves=True) as hang:
        ranks, local_device = join_ranks(collective_limit_s(timeout_s), request.device)
        with Watchdog(ranks, meeting_store(), hang, timeout_s) as watchdog:
            jobs = tuple(dict.fromkeys(filter(None, ranks.gather(place.job))))
            recipe, out = request.resolve(ranks, jobs, elastic=place.max_restarts > 0 and place.folder is None)
            check_alike(ranks, recipe)
            if ranks.num > 1:
                num_cores = len(resources.own_cores())
                resources.take_share(ranks.gather, ranks.rank, recipe.parallel.cores_per_device)
                ranks.on_host = Ranks.here().on_host  # hosts are known now
            request.notes += _without_effect(request, place, ranks.num)
            device = device_of(request.device, local_device, ranks.num)
            if ranks.num > 1 and device.type == "cpu":
                turns = resources.in_turns(ranks.on_host, num_cores)
                request.notes += [turns] if turns is not None else []
            handed_on = place.folder is not None
            of_rank: dict[str, Any] = {"device": device, "handed_on": handed_on, "jobs": jobs}
            outcome = _train(request, recipe, out, ranks, watchdog=watchdog, **of_rank)
            with Interrupt(handed_on):  # the training is reported in any case
                status = _answer(outcome, ranks, is_verbose(request.arguments))
                ranks.barrier()  # before any rank's status has a launcher end the others
        ranks.barrier()  # nobody asks any more where the others are
        leave()
        return launch.ended(place, status)


def check_alike(ranks: Ranks, recipe: Recipe) -> None:
    """Refuse ranks that were started with other options than rank 0; only their cores are their hosts'."""
    sections = recipe.model_dump(mode="json")
    sections["parallel"].pop("cores_per_device", None)
    everyone = ranks.gather(sections)
    for rank, other in enumerate(everyone):
        unlike = [key for key in other if other[key] != everyone[0].get(key)]
        if unlike:
            raise ConvoyError(
                f"rank {rank} was started with other options than rank 0 ({', '.join(unlike)}): give all the same"
            )


def _train(request: TrainRequest, recipe: Recipe, out: Path, ranks: Ranks | None = None, **place: Any) -> Outcome:
    ranks = ranks or Ranks()
    console, verbose = Console(highlight=False, quiet=ranks.rank > 0), is_verbose(request.arguments)
    for note in request.notes:
        if note not in recipe.notes():  # those are printed, and kept, with the session's
            console.print(note, markup=False, soft_wrap=True)
    with ConsoleReporter(console) as reporter:
        return Trainer(
            recipe,
            out,
            resume=request.resume,
            ranks=ranks,
            command=command_of(request.arguments),
            reporter=reporter,
            on_start=lambda session: None if request.again else _show_start(session, out, console, verbose),
            explicit_keys=request.explicit_keys,
            accept_code_change=request.accept_code_change,
            subscribe=RunDoctor,
            **place,
        ).run()


def _answer(outcome: Outcome, ranks: Ranks, verbose: bool) -> int:
    """On rank 0 write and say what came of it, with the parts of an update where asked; the exit status."""
    current.to("report")
    console, out = Console(highlight=False, quiet=ranks.rank > 0), outcome.run
    say = ConsoleReporter(console).say
    if outcome.signal is not None:  # status 1: a script that goes on with && is not to take it for a finished run
        done = f"{outcome.steps:,} of {outcome.total_steps:,} updates"
        say(f"{outcome.signal}: stopped and saved after {done}; go on with: convoy train {out} --resume")
        if ranks.rank == 0:
            _report(out)
        return 1
    if outcome.comparison is not None and outcome.comparison.update.predicted_s is not None:
        comparison = outcome.comparison
        say(comparison_text(comparison) if verbose else headline(comparison))
    value = outcome.metrics.get(outcome.best_metric)
    result = metric_in_words(outcome.best_metric, math.nan if value is None else value).replace("top-1", "accuracy")
    console.print(f"{outcome.split} {result}", style="bold")
    if ranks.rank == 0:
        folder = RunDirectory(out)
        if skipped := folder.summary().get("bad_images"):
            say(f"skipped {plural(len(skipped), 'picture')} that cannot be read, named in {folder.summary_file}")
        say(f"report: {_report(out)}")
    return 0


def _report(out: Path) -> Path:
    from convoy.report.report import write_report  # with matplotlib, for which no rank is to wait at its start

    return write_report(out)


def _without_effect(request: TrainRequest, place: launch.RankPlace | None, number: int) -> list[str]:
    """A sentence for each option that is given and changes nothing for so many ranks, at such a place."""
    notes = []
    if request.max_restarts and place is None:
        notes.append("--max-restarts has no effect on one device: go on with a run by --resume")
    elif request.max_restarts and place is not None and place.folder is None:
        instead = "convoy launch slurm" if place.source == "Slurm" else place.source
        notes.append(f"--max-restarts has no effect on ranks that {place.source} started: give it to {instead}")
    if request.interface is not None and number == 1:
        notes.append("--interface has no effect on one device: there are no other ranks")
    return notes


def _show_start(session: Session, out: Path, console: Console, verbose: bool) -> None:
    """Print what is trained on what, on which devices and by which plan, and where it goes; then the notes."""
    data, recipe, quantities = session.data, session.recipe, session.quantities
    kind, total, length = session.device.type, quantities.total_updates, recipe.epochs
    updates = plural(total, "update")
    if length.unit == "ep":
        updates += f" ({_number(length.value)} epoch{'' if length.value == 1 else 's'})"
    where = f"on one device ({kind})"
    if session.ranks.num > 1:
        where = f"on {session.ranks.num} devices ({kind}), plan {shorten(str(session.plan), LONGEST_PLAN)}"
    lines = [
        f"{recipe.model.name} on {data.name}: {len(data.train):,} training and {len(data.test):,} {data.split} images "
        f"of {data.channels}×{data.image_size}×{data.image_size}, {len(data.classes)} "
        + ("outputs" if data.task == "regression" else "classes"),
        f"{where}: {updates} of {recipe.batch:,} images, learning rate up to {quantities.lr:.4g}",
        f"in {out}; how these numbers follow from the recipe is in its report, and here with -v",
    ]
    if verbose:
        width = max(len(row.name) for row in session.derived)
        lines += [
            f"  {row.name:{width}}  {_number(row.value)} = {row.formula}  ({row.source})" for row in session.derived
        ]
    for line in (*lines, *session.notes):
        console.print(line, markup=False, soft_wrap=True)


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) else f"{value:.6g}"
