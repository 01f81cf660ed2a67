"""Begins a run, or goes on with one, and leaves its folder complete."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from convoy.training import environment
from convoy.training.files import write_json
from convoy.training.loop import Loop
from convoy.training.progress import Reporter
from convoy.training.recipe import Recipe, load_recipe, to_yaml
from convoy.training.restore import network_input
from convoy.training.resume import check_same
from convoy.training.run_directory import RunDirectory
from convoy.training.session import Session, set_up
from convoy.training.summary import write_summary
from convoy.training.weights import save_weights


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        top1: share of right answers on the test split, if it was evaluated.
        signal: name of the signal that stopped the run, or None where it finished.
    """

    run: Path
    steps: int
    total_steps: int
    top1: float | None
    signal: str | None


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    device: torch.device | None = None,
    command: str = "",
    reporter: Reporter,
    on_start: Callable[[Session], None] = lambda session: None,
) -> Outcome:
    """Train a network as its recipe says, and leave everything about it in the folder `out`.

    Args:
        recipe: what is trained, on what, and how.
        out: the run directory; a new or empty folder, or the folder of this very run with `resume`.
        resume: go on from the newest checkpoint in `out`, if there is one. The final weights are those of a run that
            was never stopped.
        device: where to train; None takes the first GPU, or the CPU.
        command: the command line that repeats the run, for the report.
        reporter: whom to tell how it goes.
        on_start: called with the session when everything is checked and before the first update.

    Raises:
        ConvoyError: something is wrong with the recipe, the data, or the folder.
    """
    run = RunDirectory(out)
    resuming = resume and run.is_run()
    if resuming:
        check_same(recipe, load_recipe(str(run.config)), run)
    else:
        run.check_free()
    device = device or environment.choose_device(None)
    session = set_up(recipe, device, reporter.prepare)
    on_start(session)
    loop = Loop(session, run, reporter)
    if resuming:
        loop.resume()
        reporter.say(f"going on after {loop.done:,} of {session.quantities.total_updates:,} updates")
    else:
        run.create(to_yaml(recipe), {**environment.describe(command, device), "input": network_input(session.data)})
    write_summary(run, session, loop.progress, "running", loop.done, None)
    signal = loop.run_to_end()
    if signal is None:
        assert loop.evaluation is not None
        data = session.data
        write_json(run.path / "evaluation.json", loop.evaluation.save(run.path, data.classes, data.test.name))
        save_weights(session.state.delivered(), run.weights)
    write_summary(run, session, loop.progress, "stopped" if signal else "finished", loop.done, loop.evaluation)
    top1 = loop.evaluation.top1 if loop.evaluation else None
    return Outcome(out, loop.done, session.quantities.total_updates, top1, signal)
