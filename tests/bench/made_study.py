"""Studies as convoy bench writes them, made from formulas: any plans, devices, rounds and damage."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convoy.bench.ask import configurations
from convoy.bench.records import (
    Configuration,
    Evaluation,
    Forecast,
    Made,
    Measurement,
    PlanPrediction,
    RankTimes,
    Session,
    Store,
    StudyFacts,
    TableOptions,
    Training,
)
from convoy.bench.study import plain_recipe
from convoy.recipe.recipe import Recipe, load_recipe

MACHINE = {"machine": "A processor", "convoy": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "cores": 4}
AUTO = "mesh: {gpu: 4}\nlayers:\n  features.*: {gpu: sample}\n  '*': {gpu: filter}\n"
RECIPE = load_recipe("default", ["model.name=lenet", "data.path=mnist-mini", "batch=64"])
MADE = Made(shape=(1, 28, 28), classes=10)


def study(recipe: Recipe = RECIPE, /, **changes: Any) -> StudyFacts:
    facts: dict[str, Any] = {"model": recipe.model.name, "recipe": plain_recipe(recipe, MADE), "images": MADE}
    facts |= {"weak": False, "batch": recipe.batch, "device_type": "cpu", "cores_per_device": 1, "cluster": ""}
    return StudyFacts(**{**facts, "updates": 4, "warm_up": 1, **changes})


def new_store(folder: Path, epochs: float | None = 2, **changes: Any) -> Store:
    """A store of which a call of the command has begun."""
    folder.mkdir(parents=True, exist_ok=True)
    store = Store.open(folder, study=study(**changes), machine=MACHINE)
    store.table = TableOptions(epochs=epochs, dataset_size=6400)
    store.sessions.append(Session(command="convoy bench lenet", started="2026-11-22T09:00:00+00:00"))
    store.sessions[-1].wall_s, store.sessions[-1].planning_s = 100.0, 20.0
    return store


def measure(row: Configuration, number: int, seconds: float, wait: float = 0.1) -> None:
    """A round in which the first rank waits least for others, as long as a peer takes longer with exchanges."""
    num = row.devices
    row.visits.append(Measurement(round=number, loss=2.3, ranks=[]))
    for rank in range(num):
        waits = 0.0 if num == 1 else seconds * (wait + 0.05 * rank)
        parts = {"seconds": seconds, "communication": waits, "input": 0.02 * seconds, "optimizer": 0.1 * seconds}
        without = [seconds * (1 - wait)] * 4 if row.kind in ("ddp", "fabric") else []
        lists = {name: [part] * 4 for name, part in parts.items()}
        row.visits[-1].ranks.append(RankTimes(**lists, without=without, memory=10**8 + rank, overhead=1e-6))


LOSSES = {"sample": 0.9, "auto": 0.97, "filter": 0.6, "ddp": 0.8, "fabric": 0.78}


def write_study(
    folder: Path,
    *,
    devices: Sequence[int] = (1, 2, 4),
    plans: Sequence[str] = ("sample", "filter", "auto"),
    peers: Sequence[str] = ("ddp", "fabric"),
    rounds: int = 5,
    failed: Sequence[str] = (),
) -> Path:
    """The folder of a study in which nothing but bench.json is; times differ by 2 %."""
    store, noise = new_store(folder), np.random.default_rng(0)
    rows = store.add(configurations(devices, plans, peers))
    for number in devices:
        texts = {row.plan for row in rows if row.kind == "convoy" and row.devices == number}
        prediction = PlanPrediction(seconds=0.095 / number, memory=10**8)
        predictions = dict.fromkeys((AUTO if text == "auto" else str(text) for text in texts), prediction)
        chosen = AUTO if number > 1 else None
        store.forecasts[number] = Forecast(auto=chosen, predictions=predictions, notes=["a note"])
    for row in rows:
        row.failed = "a layer cannot be divided: use fewer devices" if row.key in failed else None
        for number in range(1, rounds + 1) if row.key not in failed else ():
            seconds = 0.1 / (1 + (row.devices - 1) * LOSSES.get(row.series, 0.85))
            measure(row, number, seconds * max(0.1, 1 + 0.02 * noise.standard_normal()))
    store.save()
    return folder


def write_trainings(folder: Path, *, same: Sequence[str] = ()) -> Path:
    """Trainings in the folder of a study: falling errors, in the middle 0.1 % higher with each row after the first;
    the rows of `same` end with the very curve and weights of the first."""
    store = Store.open(folder, study=study(), machine={})
    store.begin_training(5.0)
    for number, row in enumerate(row for row in store.configurations if row.kind == "convoy"):
        off = 0.0 if number == 0 or row.key in same else 1e-3 * number
        evaluations = []
        for place in range(1, 11):
            when = {"step": 100 * place, "epoch": place / 2, "train_s": 12.0 * place / row.devices}
            error, loss = round(0.9 / place**1.5 + off * (place == 5), 9), 2.3 / place + 2 * off * (place == 4)
            evaluations.append(Evaluation(error=error, loss=loss, **when))
        weights = f"{0 if not off else number:064x}"
        row.training = Training(run="run", finished=True, images=10_000, sha256=weights, evaluations=evaluations)
    store.save()
    return folder


def document(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return content


def rewrite(folder: Path, content: Mapping[str, Any]) -> Store:
    (folder / "bench.json").write_text(json.dumps(content))
    return Store.read(folder)
