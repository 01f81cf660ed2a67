"""bench.json: whole after every measurement, and checked when it is read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from convoy.bench.records import (
    AUTO,
    Configuration,
    Forecast,
    Record,
    Session,
    StudyFacts,
    TableOptions,
    Training,
    TrainingLength,
)
from convoy.errors import ConvoyError
from convoy.files import write_text
from convoy.training.division import text
from convoy.training.run_directory import RunDirectory

FORMAT, SCHEMA = "convoy-bench", 1
NAME = "bench.json"
_MACHINE = ("machine", "cores", "torch")
_RECIPE = ("batch", "microbatch", "microbatches", "reproducible", "data", "parallel")
_OF_THE_MACHINE = ("machine", "cores", "device", "gpus", "cuda", "torch", "convoy")


class Store(Record):
    """The file of a study."""

    path: Path = Field(exclude=True)
    study: StudyFacts
    machine: dict[str, Any]
    table: TableOptions = TableOptions(epochs=None, dataset_size=0)
    sessions: list[Session] = Field([])
    forecasts: dict[int, Forecast] = Field({})  # by number of devices
    training: TrainingLength | None = None  # None where nothing is trained
    configurations: list[Configuration] = Field([])

    @staticmethod
    def open(folder: Path, study: StudyFacts, machine: dict[str, Any]) -> "Store":
        """The store of a study in a folder: the one that is there, or a new one. A ConvoyError says where the folder
        has that of another study or another machine, or a run."""
        path = folder / NAME
        if RunDirectory(folder).is_run():
            raise ConvoyError(f"--out {folder} holds a training run, which a study would overwrite: give another --out")
        if not path.exists():
            return Store(path=path, study=study.model_copy(), machine=machine)
        store = Store.read(folder)
        there, wanted = store.study.model_dump(mode="json"), study.model_dump(mode="json")
        for key, value in wanted.items():
            either = key == "updates" and None in (value, there[key])
            if there[key] != value and not either:
                raise ConvoyError(
                    f"{path} is of a study with {_difference(key, there[key], value)}: give another --out, or remove it"
                )
        for key in _OF_THE_MACHINE:
            if key in machine and store.machine.get(key) != machine[key]:
                raise ConvoyError(
                    f"{path} was measured with {_difference(key, store.machine.get(key), machine[key])}: give "
                    "another --out, or remove it"
                )
        return store

    @staticmethod
    def read(folder: Path) -> "Store":
        """The store in a folder."""
        path = folder / NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConvoyError(f"{path} cannot be read ({error.strerror}): give the folder of a study") from error
        except ValueError as error:
            raise ConvoyError(f"{path} is corrupt ({error}): remove it and measure again") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ConvoyError(f"{path} is no study of convoy bench: give another --out")
        if document.get("schema") != SCHEMA:
            raise ConvoyError(
                f"{path} has schema {document.get('schema')}, this Convoy reads {SCHEMA}: give another --out, or use "
                "the Convoy that wrote it"
            )
        try:
            store = Store.model_validate({**document, "path": path})
            absent = [f"machine.{key}" for key in _MACHINE if key not in store.machine]
            absent += [f"study.recipe.{key}" for key in _RECIPE if key not in store.study.recipe]
        except ValidationError as error:
            parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.errors()[0]["loc"])
            absent = ["".join(parts).lstrip(".")]
        if absent:
            raise ConvoyError(f"{path} is corrupt (it has no {absent[0]}): remove it and measure again")
        return store

    def save(self) -> None:
        """Write the file, as a whole or not at all."""
        document = {"format": FORMAT, "schema": SCHEMA, **self.model_dump(mode="json")}
        try:
            write_text(self.path, json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise ConvoyError(f"{self.path} cannot be written ({error.strerror}): choose another --out") from error

    def begin(self, command: str, started: str) -> None:
        self.sessions.append(Session(command=command, started=started, wall_s=0.0, planning_s=0.0))

    def spent(self, wall: float, planning: float) -> None:
        """Seconds of this call so far, which has not trained yet."""
        self.sessions[-1].wall_s, self.sessions[-1].planning_s = round(wall, 3), round(planning, 3)

    def spent_on_training(self, seconds: float) -> None:
        """Seconds of this call's trainings so far."""
        session = self.sessions[-1]
        session.wall_s = round(session.wall_s - session.training_s + seconds, 3)
        session.training_s = round(seconds, 3)

    def add(self, rows: Sequence[Configuration]) -> list[Configuration]:
        """The rows as they are kept: those that are there already stay, and may be tried again."""
        there = {row.key: row for row in self.configurations}
        kept = [there.setdefault(row.key, row.model_copy(deep=True)) for row in rows]
        for row in kept:
            row.failed = None
        self.configurations = list(there.values())
        return kept

    def begin_training(self, epochs: float) -> None:
        """Train all configurations for so long; a ConvoyError where they were trained for another time."""
        self.training = self.training or TrainingLength(epochs=epochs)
        if self.training.epochs != epochs:
            raise ConvoyError(
                f"{self.path} has trainings of {self.training.epochs:g} epochs, which --train-epochs {epochs:g} would "
                "not go on with: give another --out, or remove it"
            )

    def add_training(self, row: Configuration) -> Training:
        """The training of a row; one that has failed may be tried again."""
        row.training = row.training or Training()
        row.training.failed = None
        return row.training

    def put_forecast(self, devices: int, found: Forecast) -> None:
        self.forecasts[devices] = self.forecasts.get(devices, Forecast()) | found

    def plan_of(self, row: Configuration) -> str | None:
        """The plan that a row runs, None for peers. For `auto` it is the planner's for the row's shares, or else plain
        sample parallelism."""
        if row.plan != AUTO:
            return row.plan
        forecast = self.forecasts.get(row.devices, Forecast())
        plan = forecast.auto if row.shares in ("", "auto") else forecast.bound.get(row.shares)
        return plan or f"sample={row.devices}"

    def found_shares(self, row: Configuration) -> list[int] | None:
        """Microbatches of each rank that the planner found for a row of `auto`; None for even or given ones."""
        if row.plan != AUTO or row.shares:
            return None
        return self.forecasts.get(row.devices, Forecast()).auto_shares

    def shares_of(self, row: Configuration) -> str:
        """The shares with which a row runs: its own, or of `auto` those that the planner found."""
        return row.shares or text(self.found_shares(row) or ())


def _difference(key: str, there: Any, wanted: Any) -> str:
    if isinstance(there, dict) and isinstance(wanted, dict):
        other = next(name for name in wanted if there.get(name) != wanted[name])
        return _difference(f"{key}.{other}", there.get(other), wanted[other])
    return f"{key}={there} and not {wanted}"
