"""Sends what a run writes to TensorBoard's files in its folder, and to Weights & Biases, MLflow and trackio.

A thread for each reads what is appended to `metrics.jsonl`: the training waits for no server, and what a tracker has
missed while it was gone, or before a stop, comes later. `trackers.json` keeps the run's name there, by which a resumed
run is found again, and which lines it has.
"""

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from convoy.errors import ConvoyError
from convoy.files import write_json
from convoy.run.directory import RunDirectory
from convoy.terminal import brief, pip_install, printable

POLL_S, RETRY_S = 1.0, 30.0
END_S = 30.0  # in which trackers have to take the last lines when the run ends
_PROJECT, _TAG = "convoy", "convoy.run"
_SPLITS = ("train", "validation", "test")  # in the order of their lines after an update
_PARAMETERS_IN_A_BATCH = 100  # MLflow takes no more


def check_trackers(names: Sequence[str]) -> None:
    """Refuse those whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConvoyError(f"log={name} needs {name}, which is not installed: {pip_install(name)}")


class _WandB:
    """A run, of this `identity`, with a tracker. Any call may raise what it likes, or take minutes."""

    def __init__(self, run: Path, identity: str, parameters: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and not wandb.login(prompt=False):  # nobody is asked for a key
            mode = "offline"
        quiet = wandb.Settings(console="off", silent=True)
        place = {"project": os.environ.get("WANDB_PROJECT", _PROJECT), "dir": str(run), "mode": mode}
        name = {"name": run.name, "id": identity, "resume": "allow"}
        self._run = wandb.init(**place, **name, config=dict(parameters), settings=quiet)

    def send(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(status == "failed"))


class _MLflow:
    def __init__(self, run: Path, identity: str, parameters: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(project)
        place = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
        runs = self._client.search_runs([place], f"tags.`{_TAG}` = '{identity}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        from mlflow.entities import Param

        self._id = self._client.create_run(place, run_name=run.name, tags={_TAG: identity}).info.run_id
        params = [Param(key, brief(str(value), 500)) for key, value in parameters.items()]
        for start in range(0, len(params), _PARAMETERS_IN_A_BATCH):
            self._client.log_batch(self._id, params=params[start : start + _PARAMETERS_IN_A_BATCH])

    def send(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(key, value, now, step) for key, value in values.items()])

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        words = {key: value for key, value in summary.items() if isinstance(value, str)}
        for key, word in words.items():
            self._client.set_tag(self._id, key, brief(word, 500))
        self.send(int(summary.get("steps", 0)), {f"summary/{k}": v for k, v in summary.items() if k not in words})
        ends = {"finished": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._id, ends.get(status, "KILLED"))


class _Trackio(_WandB):
    def __init__(self, run: Path, identity: str, parameters: Mapping[str, Any]) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
        off = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        name = f"{run.name}-{identity}"  # by which it is resumed
        self._run = trackio.init(project, name=name, resume="allow", config=dict(parameters), **off)

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self._run.log({f"summary/{key}": value for key, value in summary.items()}, step=summary.get("steps"))
        self._run.finish()


class _TensorBoard:
    """Not by tensorboardX's own `SummaryWriter`: its thread and queue stop for good, and then block, on a full disk."""

    def __init__(self, run: Path, identity: str, parameters: Mapping[str, Any]) -> None:
        self._folder = run / "tensorboard"
        self._file: Any = None

    def send(self, step: int, values: dict[str, float]) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        if self._file is None:
            self._folder.mkdir(exist_ok=True)
            self._file = EventsWriter(str(self._folder / "events"), f".{uuid.uuid4().hex[:8]}")
        # one event for all of them, as the checksums of an event for each take 250 µs a line
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        try:
            self._file.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            self._file.flush()
        except OSError:
            with suppress(OSError):
                self._file._py_recordio_writer.close()  # its own `close` gives up where it cannot flush
            self._file = None  # nobody reads what comes after half an event
            raise

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.close()


_Tracker = _WandB | _MLflow | _TensorBoard
_TRACKERS: dict[str, type[_Tracker]] = {"wandb": _WandB, "mlflow": _MLflow, "trackio": _Trackio}
_TRACKERS |= {"tensorboard": _TensorBoard}


class Trackers:
    """While entered, those of a run are told of its metrics; at its end of its summary. One that fails is tried again,
    which is said once, and stops no run."""

    def __init__(
        self, run: RunDirectory, names: Sequence[str], parameters: Mapping[str, Any], tell: Callable[[str], None]
    ) -> None:
        self._run, self._parameters, self._tell = run, parameters, tell
        self._file = run.path / "trackers.json"
        self._state: dict[str, Any] = {"run": uuid.uuid4().hex[:8], "sent": {}}
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            self._state = {"run": kept["run"], "sent": dict(kept["sent"])}
        for name in names:
            self._state["sent"].setdefault(name, [])
        self._read = dict.fromkeys(names, 0)  # bytes of the metrics that were looked at
        self._writing, self._ending = threading.Lock(), threading.Event()
        self._threads = {
            name: threading.Thread(target=self._follow, args=(name,), daemon=True, name=f"convoy-{name}")
            for name in names
        }

    def __enter__(self) -> Self:
        for thread in self._threads.values():
            thread.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._ending.set()
        until = time.monotonic() + END_S
        for name, thread in self._threads.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                later = f"convoy train {self._run.path} --resume sends what it lacks"
                self._tell(f"{name} has not taken the last lines within {END_S:.0f} s: {later}")

    def _follow(self, name: str) -> None:
        """In a thread: send new lines to a tracker, until the run ends."""
        tracker: _Tracker | None = None
        is_told, wait_s, ends = False, 0.0, False
        while not ends:
            ends = self._ending.wait(wait_s)
            try:
                if tracker is None:
                    tracker = _TRACKERS[name](self._run.path.resolve(), self._state["run"], self._parameters)
                self._send(name, tracker)
                if ends:
                    summary = self._run.summary()
                    tracker.end(str(summary.get("status")), {k: v for k, v in summary.items() if _is_simple(v)})
                wait_s = POLL_S
            except Exception as error:
                wait_s = RETRY_S
                reason = brief(printable(str(error).partition("\n")[0] or type(error).__name__), 200)
                if not is_told:
                    is_told = True
                    self._tell(f"{name} fails ({reason}): the training goes on, and it is tried again")

    def _send(self, name: str, tracker: _Tracker) -> None:
        """Send the lines that a tracker does not have."""
        if not self._run.metrics.exists():  # not begun yet
            return
        sent, before = self._state["sent"], self._state["sent"][name]
        try:
            with self._run.metrics.open("rb") as file:
                file.seek(self._read[name])
                for line in file:
                    if not line.endswith(b"\n"):  # it is being written
                        return
                    row = json.loads(line)
                    step, split = row.pop("step"), row.pop("split")
                    place = [step, _SPLITS.index(split)]
                    if place > sent[name]:
                        tracker.send(step, {f"{split}/{key}": float(v) for key, v in row.items() if _is_number(v)})
                        sent[name] = place
                    self._read[name] += len(line)
        finally:
            if sent[name] != before:
                with self._writing:
                    write_json(self._file, self._state)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_simple(value: Any) -> bool:
    return isinstance(value, str) or _is_number(value)
