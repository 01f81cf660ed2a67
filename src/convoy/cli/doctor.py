"""`convoy doctor`: what holds a training back, and the one change that would help most."""

import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import TypeAdapter

from convoy import interfaces, launch, resources
from convoy.cli import options
from convoy.cli.requests import TrainRequest
from convoy.cli.train import command as train
from convoy.doctor.diagnosis import Diagnosis
from convoy.errors import ConvoyError, MachineError
from convoy.failure import end_of
from convoy.progress import ConsoleReporter
from convoy.recipe.parallel_config import num_devices
from convoy.run.directory import RunDirectory
from convoy.terminal import Console, waiting_for

if TYPE_CHECKING:
    import torch

_DIVISION = ("parallel.plan", "parallel.shares", "parallel.schedule")
# Keys that are not said any more where another one is said anew.
_WITH = {"parallel.devices": _DIVISION, "parallel.plan": _DIVISION, "microbatch": ("microbatches",)}


@click.command(
    "doctor",
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  convoy doctor train resnet18 --data photos/          # what this command would wait for
  convoy doctor train resnet50 --data photos/ --devices 4 --verify
  convoy doctor runs/photos                            # the same of a run, as it was begun
  convoy doctor runs/photos --devices 2 --json         # with other options of convoy train
""",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Try the first change that an option makes, and print what it brings beside the prediction.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Answer within about so many seconds, with what is known by then.",
)
@click.option(
    "--no-trials",
    is_flag=True,
    help="Try no change, and say nothing of batch, precision, memory format, threads or plan.",
)
@options.as_json
@click.argument("what", nargs=-1, type=click.UNPROCESSED, metavar="RUN|train [OPTIONS OF convoy train]", required=True)
@click.pass_obj
def command(
    arguments: Sequence[str], /, verify: bool, seconds: float, no_trials: bool, as_json: bool, what: tuple[str, ...]
) -> int:
    """Say what holds a training back, and which changes would help most.

    It trains, and tries changes, without leaving a run, for up to a minute; --verify goes on after the answer. Each
    change is said with the option that makes it, and with the gain that is predicted. What it looks at: docs/doctor.md.
    """
    began = time.perf_counter()
    if not math.isfinite(seconds):
        raise ConvoyError(f"--seconds {seconds:g} is no time: give a number of seconds, e.g. 20")
    request = request_of(arguments, what)
    place = launch.find_place()
    if place is None:  # ranks find mistakes together
        request.check()
    elif verify:
        raise ConvoyError(
            f"--verify starts the training a second time, but here {place.source} has started it: leave it out, or "
            "give the change that is advised to the command yourself"
        )
    with options.sigterm_as_interrupt() if place is None else nullcontext():
        if verify:
            return _verify(what, seconds, no_trials, as_json)

        def show(diagnosis: Diagnosis) -> None:
            diagnosis = with_command(what, diagnosis)
            click.echo(json.dumps(asdict(diagnosis), indent=2) if as_json else diagnosis.text())

        return _examine(request, show, began, seconds, not no_trials)


def request_of(arguments: Sequence[str], what: Sequence[str]) -> TrainRequest:
    """The training that is asked about: that of a command line of `convoy train`, or of a run with other options."""
    first = what[0]
    if first.startswith("-"):
        names = [name for option in command.params for name in option.opts]
        raise click.NoSuchOption(first, possibilities=names, ctx=click.get_current_context())
    if first != "train":
        run = RunDirectory(Path(first))
        if not run.is_run():
            raise ConvoyError(
                f"{first} is no run directory: name one, or write convoy doctor train MODEL with the options of "
                "convoy train"
            )
    elif len(what) > 1 and RunDirectory(Path(what[1])).is_run():
        raise ConvoyError(f"{what[1]} is a run: write convoy doctor {shlex.join(what[1:])}")
    values: dict[str, Any] = train.make_context("convoy train", _line(what), obj=arguments, **options.HELP).params
    for option in ("resume", "extend", "out"):
        if values.get(option):
            raise ConvoyError(f"--{option} is for a run, but the doctor leaves none: leave it out")
    return TrainRequest(arguments, values)


def _examine(
    request: TrainRequest, show: Callable[[Diagnosis], None], began: float, seconds: float, trials: bool
) -> int:
    """Examine within some seconds of when it `began` (by `time.perf_counter`), with or without trials of changes, and
    show what follows; the exit status."""
    with waiting_for("loading PyTorch"):
        from convoy.cli.on_devices import on_devices  # with torch, for which no mistake is to wait
        from convoy.comm.ranks import Ranks
        from convoy.doctor.examination import examine
        from convoy.doctor.trials import Budget
        from convoy.training import choose_device
        from convoy.training.set_up import check_devices, set_up

    def work(ranks: Ranks, device: "torch.device") -> int:
        recipe, out = request.resolve(ranks)
        data = recipe.data.model_copy(update={"bad_images": "skip", "progressive": None})
        recipe = recipe.model_copy(update={"data": data})  # bad ones are counted, as the others tell the speed
        with ConsoleReporter(Console(highlight=False, quiet=ranks.rank > 0, stderr=True)) as reporter:
            budget = Budget(ranks, seconds, began, reporter.prepare)
            session = set_up(recipe, device, reporter.prepare, ranks)
            facts = examine(session, budget, trials=trials, folder=out)
        if ranks.rank == 0:
            show(Diagnosis.of(facts))
        ranks.barrier()
        return 0

    if request.interface is not None:
        interfaces.use(request.interface)
    per_device = request.recipe_of().parallel.cores_per_device

    def to_start() -> int:
        recipe, _ = request.resolve(Ranks())
        if (number := num_devices(recipe.parallel)) > 1:
            resources.share(resources.own_cores(), number, 0, per_device)
            turns = resources.in_turns(number, len(resources.own_cores()))
            if turns is not None and choose_device(request.device).type == "cpu":
                click.echo(turns, err=True)
            check_devices(recipe, number)
        return number

    return on_devices(request.arguments, request.devices, request.device, work, to_start, per_device)


def with_command(what: Sequence[str], diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with the command that trains with the first change to `what`: `train` or a run, with options."""
    if diagnosis.possible is None:
        return diagnosis
    changed = replaced(_line(what), diagnosis.advice[diagnosis.possible].arguments)
    return replace(diagnosis, command=shlex.join(["convoy", "train", *changed]))


def _line(what: Sequence[str]) -> list[str]:
    """Arguments of `convoy train` for what is asked about; a run is trained as it was begun, but for other options."""
    first, *rest = what
    return rest if first == "train" else ["--recipe", str(RunDirectory(Path(first)).config), *rest]


def _verify(what: Sequence[str], seconds: float, no_trials: bool, as_json: bool) -> int:
    """Examine, and compare the first change with the training as it is.

    Each runs in a process of its own, so that no threads, allocators or groups of ranks are left over, and in turns, as
    a machine's speed may change: measured once each, minutes apart, a change once showed 0.22 ×.
    """
    diagnosis = _examination(what, seconds, no_trials)
    place = diagnosis.possible
    if not as_json:
        click.echo(diagnosis.text())
        if place is None and diagnosis.advice:
            click.echo("No option of convoy train makes any of these changes, so none was tried.")
    try:
        if place is not None:
            changed_line = replaced(what, diagnosis.advice[place].arguments)
            rates = []
            for number, line in enumerate((changed_line, changed_line, what), 1):
                how = "as it is" if line is what else f"with {shlex.join(diagnosis.advice[place].arguments)}"
                click.echo(f"training {number} of 3, {how}", err=True)
                rates.append(_examination(line, seconds, no_trials=True).images_per_s)
            advice = diagnosis.advice[place].tried([diagnosis.images_per_s, *rates])
            diagnosis = replace(diagnosis, advice=(*diagnosis.advice[:place], advice, *diagnosis.advice[place + 1 :]))
            if not as_json:
                click.echo("\n".join(filter(None, (f"Tried: {advice.text}", advice.verdict))))
    finally:  # what was found is not lost where the change cannot be tried
        if as_json:
            click.echo(json.dumps(asdict(diagnosis), indent=2))
    return 0


def replaced(what: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """A command line with other arguments, without those that they take the place of."""
    keys = {key for key, _ in _settings(arguments) if key is not None}
    keys |= {other for key in keys for other in _WITH.get(key, ())}
    unchanged = [word for key, words in _settings(what) if key not in keys for word in words]
    return [*unchanged, *arguments]


def _settings(line: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Each option, with its value, and the key of the recipe that it sets; and each other word."""
    options_by_name = {name: option for option in train.params for name in (*option.opts, *option.secondary_opts)}
    words = iter(line)
    for word in words:
        name, _, value = word.partition("=")
        option, argument = options_by_name.get(name) if word.startswith("-") else None, [word]
        if isinstance(option, click.Option) and not option.is_flag and name == word:
            argument += [value := next(words, "")]
        key = None if option is None else getattr(option, "key", None)
        yield value.partition("=")[0] if option is not None and option.name == "settings" else key, argument


def _examination(what: Sequence[str], seconds: float, no_trials: bool) -> Diagnosis:
    """The answer of `convoy doctor --json` in a process of its own; SystemExit where that has said why there is none,
    MachineError where it was killed."""
    command = [sys.executable, "-m", "convoy", "doctor", *what, "--seconds", f"{seconds:g}", "--json"]
    command += ["--no-trials"] if no_trials else []
    # In a session of its own a terminal's Ctrl-C reaches it once, and it removes what it has made.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if process.returncode < 0:
        raise MachineError(f"the training that was examined {end_of(process.returncode)}")
    if process.returncode:
        raise SystemExit(process.returncode)
    return TypeAdapter(Diagnosis).validate_json(output)
