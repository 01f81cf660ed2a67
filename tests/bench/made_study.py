"""Studies as convoy bench writes them, made from formulas: any plans, devices, rounds and damage."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convoy.bench import records
from convoy.bench.ask import configurations
from convoy.bench.records import Configuration, Evaluation, Forecast, Made, RankTimes, Store, StudyFacts, TableOptions
from convoy.bench.study import plain_recipe
from convoy.training import Recipe, load_recipe

MACHINE = {"machine": "A processor", "convoy": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "cores": 4}
AUTO = "mesh: {gpu: 4}\nlayers:\n  features.*: {gpu: sample}\n  '*': {gpu: filter}\n"
RECIPE = load_recipe("default", ["model.name=lenet", "data.path=mnist-mini", "batch=64"])
MADE = Made(shape=(1, 28, 28), classes=10)


def study(recipe: Recipe = RECIPE, /, **changes: Any) -> StudyFacts:
    return StudyFacts(
        model=recipe.model.name,
        recipe=plain_recipe(recipe, MADE),
        images=MADE,
        weak=False,
        batch=recipe.batch,
        device_type="cpu",
        cores_per_device=1,
        cluster="",
        updates=4,
        warm_up=1,
    ).model_copy(update=changes)


def new_store(folder: Path, **changes: Any) -> Store:
    """A store of which a call of the command has begun."""
    folder.mkdir(parents=True, exist_ok=True)
    store = Store.open(folder, study(**changes), MACHINE)
    store.table = TableOptions(epochs=2, dataset_size=6400)
    store.begin("convoy bench lenet", "2026-11-22T09:00:00+00:00")
    return store


def ranks(
    seconds: float, num: int, *, peer: bool = False, wait: float = 0.1, noise: float = 0.0, **changes: Any
) -> list[RankTimes]:
    """Every rank of a measurement; the first waits least for others."""
    return [
        RankTimes(
            seconds=[seconds + noise * place for place in (-1, 0, 0, 1)],
            communication=[0.0 if num == 1 else seconds * (wait + 0.05 * rank)] * 4,
            input=[0.02 * seconds] * 4,
            optimizer=[0.1 * seconds] * 4,
            memory=10**8 + rank,
            overhead=1e-6,
            loss=2.3 / num,
            without=[seconds * (1 - wait)] * 4 if peer and num > 1 else [],
            **changes,
        )
        for rank in range(num)
    ]


def add_measurement(row: Configuration, number: int, times: list[RankTimes]) -> None:
    loss = sum(rank.loss for rank in times)
    row.visits.append(records.Measurement(round=number, wall_s=1.5, loss=loss, ranks=times))


def seconds_of(row: Configuration) -> float:
    """A tenth of a second on one device, less on more."""
    losses = {"sample": 0.9, "auto": 0.97, "filter": 0.6, "ddp": 0.8, "fabric": 0.78, "torch": 0.95, "": 1.0}
    return (
        0.1 / (1 + (row.devices - 1) * losses.get(row.series, 0.85)) / (losses["torch"] if row.kind == "torch" else 1)
    )


def write_study(
    folder: Path,
    *,
    devices: Sequence[int] = (1, 2, 4),
    plans: Sequence[str] = ("sample", "filter", "auto"),
    peers: Sequence[str] = ("ddp", "fabric"),
    rounds: int = 5,
    waiting: Sequence[str] = (),
    failed: Sequence[str] = (),
    epochs: float | None = 90.0,
    spread: float = 0.02,
    **changes: Any,
) -> Path:
    """The folder of a study in which nothing but bench.json is; times differ by `spread`, a part of them."""
    folder.mkdir(parents=True, exist_ok=True)
    store = Store.open(folder, study(**changes), MACHINE)
    store.table = TableOptions(epochs=epochs, dataset_size=1_281_167)
    store.begin("convoy bench lenet", "2026-11-21T20:00:00+00:00")
    rows = store.add(configurations(devices, plans, peers))
    for number in devices:
        texts = {row.plan for row in rows if row.kind == "convoy" and row.devices == number}
        named = {AUTO if text == "auto" else str(text): text for text in texts}
        one = records.PlanPrediction(seconds=0.095 / number, parts={"compute": 0.09 / number}, memory=10**8)
        auto = AUTO if number > 1 else None
        store.put_forecast(number, Forecast(auto=auto, predictions=dict.fromkeys(named, one), notes=["a note"]))
    noise = np.random.default_rng(0)
    for number in range(1, rounds + 1):
        for row in rows:
            if row.key in failed:
                row.failed = "a layer cannot be divided: use fewer devices"
            elif row.key not in waiting:
                seconds = seconds_of(row) * max(0.1, 1 + spread * noise.standard_normal())
                add_measurement(row, number, ranks(seconds, row.devices, peer=row.kind in ("ddp", "fabric")))
    store.spent(100.0, 20.0)
    store.save()
    return folder


def write_trainings(
    folder: Path, *, apart: float = 1e-3, same: Sequence[str] = (), finished: bool = True, failed: Sequence[str] = ()
) -> Path:
    """Trainings in the folder of a study: falling errors, in the middle `apart` higher with each row after the first;
    the rows of `same` end with the very curve and weights of the first."""
    store = Store.open(folder, study(), {})
    store.begin_training(5.0)
    rows = [row for row in store.configurations if row.kind == "convoy"]
    for number, row in enumerate(rows):
        off = 0.0 if number == 0 or row.key in same else apart * number
        evaluations = [
            Evaluation(
                step=100 * place,
                epoch=place / 2,
                error=round(0.9 / place**1.5 + off * (place == 5), 9),
                loss=2.3 / place + 2 * off * (place == 4),
                train_s=12.0 * place / row.devices,
            )
            for place in range(1, 11)
        ]
        weights = f"{0 if not off else number:064x}" if finished else ""
        row.training = records.Training(
            run="run", finished=finished, wall_s=60.0, images=10_000, sha256=weights, evaluations=evaluations
        )
        if row.key in failed:
            row.training.failed, row.training.finished = "a layer is odd: use another", False
            row.training.evaluations = []
    store.save()
    return folder


def document(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return content
