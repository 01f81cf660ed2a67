"""Finds the verb, runs it, and turns what goes wrong into one sentence and an exit status.

A verb is a file of options, which imports torch when it runs: neither `--help` nor a mistake in names or files is to
wait for it, 2 s and up to 20 on a busy machine.
"""

import difflib
import errno
import os
import sys
import time
import traceback
from collections.abc import Sequence

import click

from convoy.cli.options import HELP, LazyGroup, is_verbose
from convoy.errors import ConvoyError, MachineError
from convoy.failure import Failure, Kind, has_agent, place_of, write_error_file
from convoy.terminal import LOST, brief, printable, shortened, write_to_any
from convoy.version import __version__

VERBS = {
    "train": ("convoy.cli.train", "Train a network and write a report."),
    "plan": ("convoy.cli.plan", "Find the fastest plan for a network on some devices, and say why."),
    "bench": ("convoy.cli.bench", "Measure how training scales over devices and plans, beside other tools."),
    "trials": ("convoy.cli.trials:trials", "Try values of the recipe in short trainings, one a device."),
    "folds": ("convoy.cli.trials:folds", "Cross-validate: train without each part of the data in turn."),
    "branch": ("convoy.cli.branch", "Train the next stretch of a run with several batches, and compare."),
    "launch": ("convoy.cli.launch", "Train on several hosts: commands, or a job for Slurm or Kubernetes."),
    "doctor": ("convoy.cli.doctor", "Say what holds a training back, and which change would help most."),
    "profile": ("convoy.cli.profile", "Show or clear the times that were measured for the planner."),
    "predict": ("convoy.cli.trained:predict", "Classify pictures by a trained network."),
    "eval": ("convoy.cli.trained:evaluate", "Evaluate a finished run, on its own data or other."),
    "export": ("convoy.cli.trained:export", "Write a trained network as ONNX or torch.export program."),
    "report": ("convoy.cli.trained:report", "Write the report of a run again."),
    "models": ("convoy.cli.lists:models", "List the networks with parameters and FLOPs."),
    "recipes": ("convoy.cli.lists:recipes", "List the built-in recipes, print one, or list every key."),
    "data": ("convoy.cli.data", "Say what is in a data set, check its pictures, or pack it."),
}


@click.command(
    cls=LazyGroup,
    verbs=VERBS,
    context_settings={**HELP, "max_content_width": 110},
)
@click.version_option(__version__, prog_name="convoy")
def convoy_command() -> None:
    """Train convolutional networks, with the same result on every number of devices.

    \b
    A first run, with data that is at hand (pip install -e '.[demo]'):
      convoy train lenet --data mnist-mini
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status: 0 for success, 2 for a mistake of the user, 1 for anything else."""
    if arguments is None and sys.getfilesystemencoding() != "utf-8":
        # Runs keep names of files and classes in UTF-8, which these are here then, too; what is printed need not be.
        os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding if sys.stdout is not None else "utf-8")
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    write_to_any()
    status = _run(arguments)
    sys.stdout.flush()
    lost = LOST.get("stdout")
    if lost is None or isinstance(lost, BrokenPipeError):  # who has read enough knows it
        return status
    click.echo(f"convoy: standard output could not be written ({lost.strerror}): free what is in its way", err=True)
    return status if arguments[:1] == ["train"] else status or 1  # a training is in its folder, not in what it says


def _run(arguments: Sequence[str]) -> int:
    # Before torch loads OpenMP: a thread that waits spins shortly, then sleeps. With libgomp's default an update of a
    # CIFAR net on two cores took 49 to 55 ms, and 1,193 with one core taken; with 10,000 174, with 3,000 134 but 54 to
    # 59 on idle cores.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        status = convoy_command.main(arguments, prog_name="convoy", standalone_mode=False, obj=arguments)
    except ConvoyError as error:
        return _fail(str(error), 1 if isinstance(error, MachineError) else 2, arguments)
    except click.ClickException as error:
        return _fail(usage(error), 2, arguments)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 1, arguments)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _fail(f"the name {str(error.filename)[:60]}... is too long for a file: shorten it", 2, arguments)
        place = place_of(error)
        hint = "" if is_verbose(arguments) else "-v shows the traceback"
        where = "; ".join(filter(None, (place, hint)))
        reason = shortened(str(error).partition("\n")[0])
        return _fail(f"{type(error).__name__}: {reason}" + (f" ({where})" if where else ""), 1, arguments)
    return status if isinstance(status, int) else 0


def _fail(sentence: str, status: int, arguments: Sequence[str]) -> int:
    verbose = is_verbose(arguments)
    if has_agent():  # a rank, which has not begun: who started it says it once
        trace = traceback.format_exc() if verbose else ""
        kind: Kind = "mistake" if status == 2 else "error"
        failure = Failure(int(os.environ.get("RANK", 0)), kind, sentence, trace, time.time())
        if write_error_file(failure, verbose):
            return status
    if verbose:
        traceback.print_exc()
    click.echo(f"convoy: {sentence}", err=True)
    return status


def usage(error: click.ClickException) -> str:
    """A sentence on what was typed wrong."""
    if isinstance(error, click.NoSuchOption):
        typed = [error.option_name.strip("-")]  # click counts the dashes, too
        close = [name for name in error.possibilities or () if difflib.get_close_matches(name.strip("-"), typed)]
        near = f"did you mean {' or '.join(sorted(close))}? " if close else ""
        end = f" {error.ctx.command_path} --help" if error.ctx is not None else " --help"
        return f"no such option {printable(brief(error.option_name))}: {near}see{end}"
    sentence = shortened(printable(error.format_message().rstrip("."), keep="\n"))
    sentence = sentence[:1].lower() + sentence[1:]
    context = getattr(error, "ctx", None)
    colon = ":" * (not sentence.endswith("?"))
    return f"{sentence}{colon} see {context.command_path} --help" if context is not None else sentence
