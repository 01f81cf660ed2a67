"""Trainings that are refused, a session without a run, and what stands in the folder of a run."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from convoy.checkpoint.files import Checkpoint
from convoy.checkpoint.store import CheckpointStore
from convoy.errors import ConvoyError
from convoy.recipe.recipe import load_recipe
from convoy.resources import own_cores, pin
from convoy.training import Session
from convoy.training.environment import join_ranks
from convoy.training.set_up import set_up
from whole_runs import train_here

Settings = dict[str, str]


def refusals(data: Path, out: Path, cases: list[Settings]) -> list[str]:
    """What is said of trainings that cannot be: ranks that fail would be replaced, which takes seconds."""
    said = []
    for settings in cases:
        with pytest.raises(ConvoyError) as refused:
            train_here(data, out, settings)
        said.append(str(refused.value))
    return said


def session(data: Path, *settings: str) -> Session:
    """Of a run of TinyNet on the ranks that have joined: batches of 16 of the 96 samples that are in memory."""
    ranks, device = join_ranks()
    values = {"data.path": data, "model.name": "tiny:TinyNet", "batch": 16, "microbatch": 8, "optimizer.lr": 0.1}
    values |= {"threads": 1, "parallel.devices": ranks.num} | dict(setting.split("=", 1) for setting in settings)
    recipe = load_recipe("default", [f"{key}={value}" for key, value in values.items()], [])
    return set_up(recipe, device, ranks=ranks)


@contextlib.contextmanager
def cores_as_before() -> Iterator[None]:
    """The processes of `run_ranks` live on."""
    cores = own_cores()
    try:
        yield
    finally:
        pin(cores)
        torch.use_deterministic_algorithms(False)


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def config(out: Path) -> dict[str, Any]:
    return yaml.safe_load((out / "config.yaml").read_text())


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "weights.safetensors")


def lines(out: Path, *keys: str, split: str | None = None) -> list[list[Any]]:
    """What stands in the lines of metrics, without the times; of one split if it is named."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    keys = keys or ("split", "step", "loss", "top1", "lr")
    return [[row.get(key) for key in keys] for row in rows if split in (None, row["split"])]


def store_of(out: Path) -> CheckpointStore:
    return CheckpointStore(out / "checkpoints", keep=99)


def put(store: CheckpointStore, checkpoint: Checkpoint) -> Path:
    """A checkpoint that one process has written."""
    draft = store.draft(checkpoint.step, 1, "put")
    draft.add(0, checkpoint.tensors)
    draft.put(store.place(checkpoint.step), checkpoint.identity, checkpoint.values)
    return store.place(checkpoint.step)


def drop_checkpoints(out: Path, after: int) -> None:
    """As if the run had been killed once the checkpoint of that update was written."""
    for step in store_of(out).steps():
        if step > after:
            shutil.rmtree(store_of(out).place(step))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
