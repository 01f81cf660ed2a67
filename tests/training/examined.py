"""Sessions of small trainings as bodies of `run_ranks`, for tests of what looks at them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from convoy.launch.cores import own_cores, pin
from convoy.training import Session, load_recipe
from convoy.training.environment import join_ranks
from convoy.training.set_up import set_up


def session(data: Path, *settings: str) -> Session:
    """Of a run of TinyNet on the ranks that have joined: batches of 16 of the 96 samples that are in memory."""
    ranks, device = join_ranks()
    values = {"data.path": data, "model.name": "tiny:TinyNet", "batch": 16, "microbatch": 8, "optimizer.lr": 0.1}
    values |= {"threads": 1, "parallel.devices": ranks.num} | dict(setting.split("=", 1) for setting in settings)
    if "microbatches" in values:
        del values["microbatch"]
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
