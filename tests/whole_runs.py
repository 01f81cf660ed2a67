"""Whole runs of the trainer as bodies for `run_ranks`: the same on one rank and on several."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.progress import Reporter
from convoy.training import Trainer, load_recipe, loop
from convoy.training.environment import join_ranks
from convoy.training.watchdog import Watchdog

BASE = {
    "model.name": "tiny:TinyNet",
    "batch": "24",
    "microbatch": "3",
    "threads": "1",
    "log_every": "1ba",
    "optimizer.lr": "0.05",
    "data.augment.crop": "pad",
}


@dataclass
class Ended:
    """A run that came to its end."""

    digest: str  # SHA-256 of the weights' file
    curve: list[float]  # loss of every update, and of the evaluation at the end
    said: list[str] = field(default_factory=list)  # what rank 0 said, and what stands in its summary's notes


class Words(Reporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@contextlib.contextmanager
def as_before() -> Iterator[pytest.MonkeyPatch]:
    """Processes live on after a run, which sets torch's switches; a patch for this run alone."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            yield patch
        finally:
            torch.use_deterministic_algorithms(False)


def train_here(
    data: Path,
    out: Path,
    settings: dict[str, str],
    resume: bool = False,
    watchdog: Watchdog | None = None,
    keep: bool = True,
    **options: Any,
) -> Ended:
    """Train as the recipe `settings` says on all ranks that have joined. All ranks call it."""
    ranks, device = join_ranks()
    values = BASE | {"data.path": str(data), "parallel.devices": str(ranks.num)} | settings
    recipe = load_recipe("default", [f"{key}={value}" for key, value in values.items()])
    words, notes = Words(), []
    with as_before():
        Trainer(
            recipe,
            out,
            resume=resume,
            device=device,
            ranks=ranks,
            reporter=words,
            watchdog=watchdog,
            keep=keep,
            **options,
            on_start=lambda session: notes.append(session.notes),
        ).run()
    digest = hashlib.sha256((out / "weights.safetensors").read_bytes()).hexdigest()
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return Ended(digest, [line["loss"] for line in lines], [*words.said, *(note for each in notes for note in each)])


class Crashed(Exception):  # noqa: N818
    """The ranks are gone."""


def train_until(data: Path, out: Path, settings: dict[str, str], after: int | None) -> Ended | None:
    """Begin or go on with a run whose ranks end without a word after so many updates, if any are said."""
    log = loop.Loop._end_window

    def logged(self: loop.Loop) -> None:
        log(self)
        if self.done == after:
            raise Crashed

    with as_before() as patch:
        patch.setattr(loop.Loop, "_end_window", logged)
        try:
            return train_here(data, out, settings, resume=True)
        except Crashed:
            return None
