"""Whole runs of the trainer as bodies for `run_ranks`: the same on one rank and on several."""

import contextlib
import hashlib
import itertools
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.comm.joining import meeting_store
from convoy.progress import Reporter
from convoy.recipe.recipe import Recipe, load_recipe
from convoy.training import Outcome, Trainer
from convoy.training.environment import join_ranks
from convoy.training.step import TrainingStep
from convoy.training.watchdog import Watchdog

BASE = {"model.name": "tiny:TinyNet", "batch": "24", "microbatch": "3", "threads": "1", "log_every": "1ba"}
BASE |= {"optimizer.lr": "0.05", "data.augment.crop": "pad"}


@dataclass
class Ended:
    """A run that came to its end, or stopped at a signal."""

    outcome: Outcome
    digest: str  # SHA-256 of the weights' file, if there is one
    curve: list[float]  # loss of every update, and of the evaluation at the end
    said: list[str]  # what rank 0 said, and what else stands in its notes


class Console(Reporter):
    """Takes the place of a person: keeps what is said, and sends a signal once an update is done."""

    def __init__(self, stop_at: int | None) -> None:
        self.said: list[str] = []
        self.stop_at = stop_at

    def say(self, text: str) -> None:
        self.said.append(text)

    def advance(self, done: int, text: str | None = None) -> None:
        if done == self.stop_at:
            os.kill(os.getpid(), signal.SIGUSR2)


@contextlib.contextmanager
def as_before() -> Iterator[pytest.MonkeyPatch]:
    """Processes live on after a run, which sets torch's switches; a patch for this run alone."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            yield patch
        finally:
            torch.use_deterministic_algorithms(False)


def recipe_of(data: Path, settings: dict[str, str], num: int = 1) -> Recipe:
    values = BASE | {"data.path": str(data), "parallel.devices": str(num)} | settings
    return load_recipe("default", [f"{key}={value}" for key, value in values.items()])


def train_here(
    data: Path,
    out: Path,
    settings: dict[str, str],
    resume: bool = False,
    stop_at: int | None = None,
    fails: BaseException | None = None,
    at: int = 5,
    **options: Any,
) -> Ended:
    """Train as the recipe `settings` says, with a signal once an update is done, or with an error in place of one. All
    ranks that have joined call it."""
    (ranks, device), console, notes = join_ranks(), Console(stop_at), list[list[str]]()
    step = TrainingStep.__call__

    def failing(self: TrainingStep, batch: Any, update: int) -> Any:
        if update == at and fails is not None:
            raise fails
        return step(self, batch, update)

    with as_before() as patch:
        patch.setattr(TrainingStep, "__call__", failing)
        options |= {"reporter": console, "on_start": lambda session: notes.append(session.notes)}
        recipe = recipe_of(data, settings, ranks.num)
        with Watchdog(ranks, meeting_store()) as watchdog:
            here: dict[str, Any] = {"device": device, "ranks": ranks, "watchdog": watchdog}
            outcome = Trainer(recipe, out, resume=resume, **here, **options).run()
    weights, lines = out / "weights.safetensors", (out / "metrics.jsonl").read_text().splitlines()
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else ""
    said = list(dict.fromkeys([*console.said, *itertools.chain(*notes)]))
    return Ended(outcome, digest, [json.loads(line)["loss"] for line in lines], said)


class Crashed(Exception):  # noqa: N818
    """The ranks are gone."""


def train_until(data: Path, out: Path, settings: dict[str, str], after: int | None) -> Ended | None:
    """Begin or go on with a run whose ranks end without a word after so many updates, if any are said."""
    try:
        return train_here(data, out, settings, resume=True, fails=Crashed() if after else None, at=after or 0)
    except Crashed:
        return None
