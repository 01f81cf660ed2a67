"""bench.json: what was measured so far, whole after every measurement, and checked when it is read."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from convoy.bench.configuration import AUTO, Configuration
from convoy.bench.forecast import Forecast
from convoy.bench.measurement import RankTimes
from convoy.bench.study import Study
from convoy.errors import ConvoyError
from convoy.files import write_text
from convoy.training.division import text
from convoy.training.run_directory import RunDirectory

_RECIPE = dict.fromkeys(("batch", "microbatch", "microbatches", "reproducible"))
_STUDY = dict.fromkeys(
    ("model", "images", "weak", "batch", "device_type", "cores_per_device", "cluster", "updates", "warm_up")
)
_RANK = dict.fromkeys(("seconds", "communication", "input", "optimizer", "memory", "overhead"))
_ROW = dict.fromkeys(("key", "label", "kind", "devices", "plan", "series", "failed"))
_DOCUMENT: dict[str, Any] = {
    "study": {**_STUDY, "recipe": {**_RECIPE, "data": {}, "parallel": {}}},
    "machine": dict.fromkeys(("machine", "cores", "torch")),
    "table": dict.fromkeys(("epochs", "dataset_size")),
    "sessions": [dict.fromkeys(("command", "started", "wall_s", "planning_s"))],
    "forecasts": {},
    "configurations": [{**_ROW, "visits": [{"round": None, "loss": None, "ranks": [_RANK]}]}],
}
"""Keys of mappings, parts of lists; None where anything may be."""
_NOTHING = object()


def lacking_in(document: Mapping[str, Any]) -> str | None:
    """The first thing that a document does not have, as in `sessions[0].wall_s`; None where it has all."""
    return _lacking(document, _DOCUMENT, "")


def _lacking(found: Any, shape: Any, name: str) -> str | None:
    if shape is None:
        return None
    if not isinstance(found, type(shape)):
        return name
    if isinstance(shape, list):
        parts = [(one, shape[0], f"{name}[{place}]") for place, one in enumerate(found)]
    else:
        parts = [(found.get(key, _NOTHING), part, f"{name}.{key}".lstrip(".")) for key, part in shape.items()]
    for one, part, where in parts:
        lacking = where if one is _NOTHING else _lacking(one, part, where)
        if lacking is not None:
            return lacking
    return None


FORMAT, SCHEMA = "convoy-bench", 1
NAME = "bench.json"
_DIGITS = 9
_MAY_DIFFER = ("updates",)
_OF_THE_MACHINE = ("machine", "cores", "device", "gpus", "cuda", "torch", "convoy")


class Store:
    """The file of a study.

    `document` is what it holds:

        format, schema
        study            what all rows share (`Study.to_dict`)
        machine          on which they were measured
        table            epochs, for the days that they would take, or null; dataset_size of them; rounds
        sessions         command, started, wall_s, planning_s and training_s of every call of the command; the last
                         two are parts of the whole time
        forecasts        by number of devices: auto, auto_shares, bound (plans by shares), predictions by plan, notes
        training         epochs of all trainings, where there are any
        configurations   all of `Configuration` and its label, failed, visits: round, started, wall_s, loss, ranks, and
                         training: run, finished, failed, wall_s, images, sha256, evaluations (`curves.EVALUATION`)

    A rank in `visits` has seconds, communication, input and optimizer, each a list over the timed updates, and memory
    in bytes, overhead in seconds, microbatches of an update, and for peers `without`: seconds without exchange.
    """

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path = path
        self.document = document

    @staticmethod
    def open(folder: Path, study: Study, machine: dict[str, Any]) -> "Store":
        """The store of a study in a folder: the one that is there, or a new one.

        Raises:
            ConvoyError: what is there is of another study or from another machine, or no such file, or a run.
        """
        path = folder / NAME
        if RunDirectory(folder).is_run():
            raise ConvoyError(f"--out {folder} holds a training run, which a study would overwrite: give another --out")
        if not path.exists():
            empty = {"study": study.to_dict(), "machine": machine, "table": {}}
            lists: dict[str, Any] = {"sessions": [], "forecasts": {}, "configurations": []}
            return Store(path, {"format": FORMAT, "schema": SCHEMA, **empty, **lists})
        document = read(folder)
        wanted, there = _plain(study.to_dict()), document["study"]
        for key, value in wanted.items():
            if key in _MAY_DIFFER and value is None:
                continue
            if there.get(key) != value and not (key in _MAY_DIFFER and there.get(key) is None):
                raise ConvoyError(
                    f"{path} is of a study with {_difference(key, there.get(key), value)}: give another --out, or "
                    "remove it"
                )
        for key in _OF_THE_MACHINE:
            if key in machine and document["machine"].get(key) != machine[key]:
                raise ConvoyError(
                    f"{path} was measured with {_difference(key, document['machine'].get(key), machine[key])}: give "
                    "another --out, or remove it"
                )
        return Store(path, document)

    def begin(self, command: str, started: str) -> None:
        """Another call of the command."""
        none = dict.fromkeys(("wall_s", "planning_s", "training_s"), 0.0)
        self.document["sessions"].append({"command": command, "started": started, **none})

    def spent(self, wall: float, planning: float) -> None:
        """Seconds of this call so far, which has not trained yet."""
        self.document["sessions"][-1] |= {"wall_s": round(wall, 3), "planning_s": round(planning, 3)}

    def spent_on_training(self, seconds: float) -> None:
        """Seconds of this call's trainings so far."""
        session = self.document["sessions"][-1]
        wall = session["wall_s"] - session["training_s"] + seconds
        session |= {"wall_s": round(wall, 3), "training_s": round(seconds, 3)}

    def add(self, configurations: list[Configuration]) -> None:
        """Make room for rows; those that are there already stay, and may be tried again."""
        there = {row["key"]: row for row in self.document["configurations"]}
        for configuration in configurations:
            fresh: dict[str, Any] = {**asdict(configuration), "label": configuration.label, "visits": []}
            there.setdefault(configuration.key, fresh)["failed"] = None
        self.document["configurations"] = list(there.values())

    def begin_training(self, epochs: float) -> None:
        """All configurations are trained for so long.

        Raises:
            ConvoyError: they were trained for another time.
        """
        before = self.document.setdefault("training", {"epochs": epochs})["epochs"]
        if before != epochs:
            raise ConvoyError(
                f"{self.path} has trainings of {before:g} epochs, which --train-epochs {epochs:g} would not go on "
                "with: give another --out, or remove it"
            )

    def add_training(self, configuration: Configuration) -> None:
        """Make room for a training; one that has failed may be tried again."""
        fresh = {"run": "", "finished": False, "wall_s": 0.0, "images": 0, "sha256": "", "evaluations": []}
        self.row(configuration).setdefault("training", fresh)["failed"] = None

    def row(self, configuration: Configuration) -> dict[str, Any]:
        """What is kept of a configuration."""
        rows: list[dict[str, Any]] = self.document["configurations"]
        return next(row for row in rows if row["key"] == configuration.key)

    def forecast(self, devices: int) -> dict[str, Any] | None:
        """What was predicted on some devices."""
        found: dict[str, Any] | None = self.document["forecasts"].get(str(devices))
        return found

    def plan_of(self, row: Configuration) -> str | None:
        """The plan that a row runs, as `plan_of` says."""
        return plan_of(self.document, self.row(row))

    def shares_of(self, row: Configuration) -> str:
        """The shares with which it runs: its own, or of `auto` those that the planner found."""
        return row.shares or text(found_shares(self.document, self.row(row)) or ())

    def put_forecast(self, devices: int, found: Forecast) -> None:
        """Keep what was predicted, beside what was before."""
        before = self.forecast(devices) or {"auto": None, "predictions": {}, "notes": []}
        new = _plain(asdict(found))
        last = new if new["auto"] else before
        self.document["forecasts"][str(devices)] = {
            "auto": last["auto"],
            "auto_shares": last.get("auto_shares"),
            "bound": {**before.get("bound", {}), **new["bound"]},
            "predictions": {**before["predictions"], **new["predictions"]},
            "notes": list(dict.fromkeys([*before["notes"], *new["notes"]])),
        }

    def put_measurement(
        self, configuration: Configuration, round_: int, ranks: list[RankTimes], started: str, wall: float
    ) -> None:
        """Keep what the ranks of a row measured in a round."""
        self.row(configuration)["visits"].append(
            {
                "round": round_,
                "started": started,
                "wall_s": round(wall, 3),
                "loss": sum(rank.loss for rank in ranks),
                "ranks": [_rank(rank) for rank in ranks],
            }
        )

    def save(self) -> None:
        """Write the file, as a whole or not at all.

        Raises:
            ConvoyError: it cannot be written.
        """
        try:
            write_text(self.path, json.dumps(self.document, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise ConvoyError(f"{self.path} cannot be written ({error.strerror}): choose another --out") from error


def plan_of(document: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """The plan that a row of a document runs: of `auto` that which was found, for its shares if they are numbers, or
    else plain sample parallelism.

    None where the row is not of Convoy.
    """
    plan: str | None = row["plan"]
    if plan != AUTO:
        return plan
    forecast = document["forecasts"].get(str(row["devices"])) or {}
    by_numbers = row.get("shares") not in (None, "", "auto")
    known: str | None = forecast.get("bound", {}).get(row["shares"]) if by_numbers else forecast.get("auto")
    return known or f"sample={row['devices']}"


def found_shares(document: Mapping[str, Any], row: Mapping[str, Any]) -> list[int] | None:
    """Microbatches of each part that the planner found for a row of `auto`; None where they are even, or its own."""
    if row["plan"] != AUTO or row.get("shares"):
        return None
    found: list[int] | None = (document["forecasts"].get(str(row["devices"])) or {}).get("auto_shares")
    return found


def read(folder: Path) -> dict[str, Any]:
    """The document in a folder.

    Raises:
        ConvoyError: there is none, or it cannot be read.
    """
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
            f"{path} has schema {document.get('schema')}, this Convoy reads {SCHEMA}: give another --out, or use the "
            "Convoy that wrote it"
        )
    lacking = lacking_in(document)
    if lacking is not None:
        raise ConvoyError(f"{path} is corrupt (it has no {lacking}): remove it and measure again")
    return document


def _rank(rank: RankTimes) -> dict[str, Any]:
    parts = ("seconds", "communication", "input", "optimizer")
    found: dict[str, Any] = {name: [round(getattr(lap, name), _DIGITS) for lap in rank.laps] for name in parts}
    found |= {"memory": rank.memory, "overhead": round(rank.overhead, _DIGITS), "microbatches": rank.microbatches}
    if rank.without:
        found["without"] = [round(seconds, _DIGITS) for seconds in rank.without]
    return found


def _difference(key: str, there: Any, wanted: Any) -> str:
    """What is other, in words."""
    if isinstance(there, dict) and isinstance(wanted, dict):
        other = next(name for name in wanted if there.get(name) != wanted[name])
        return _difference(f"{key}.{other}", there.get(other), wanted[other])
    return f"{key}={there} and not {wanted}"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
