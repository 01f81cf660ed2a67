"""W&B, MLflow and trackio hear of every line of a run once, also over a stop, and stop none; here they are made up."""

import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from convoy.recipe.recipe import check_names
from convoy.run import trackers
from convoy.run.directory import RunDirectory
from training.scenarios import lines
from whole_runs import recipe_of, train_here

SHORT = {"epochs": "2ep", "log": "[wandb, mlflow, trackio]"}


class Told(dict[str, Any]):
    """What a tracker has of a run: parameters, numbers by their step, status and summary."""

    def log(self, values: dict[str, float], step: int) -> None:
        if self["gone"]:
            self["gone"] -= 1
            raise ConnectionError("nobody answers")
        self["rows"].append((step, values))

    def finish(self, exit_code: int = 0) -> None:
        self["ends"].append(exit_code)


def made_up(runs: dict[str, Told], gone: int = 0) -> dict[str, ModuleType]:
    """Modules that keep what they are told in `runs`; the first `gone` lines of W&B's fail."""

    def run_of(key: str, parameters: Any = ()) -> Told:
        start = Told(parameters=dict(parameters), rows=[], ends=[], gone=gone if key.startswith("wandb") else 0)
        return runs.setdefault(key, start)

    class Client:
        def get_experiment_by_name(self, name: str) -> None: ...

        def create_experiment(self, name: str) -> str:
            return name

        def search_runs(self, places: list[str], query: str) -> list[Any]:
            key = f"mlflow {query.split(chr(39))[1]}"
            return [SimpleNamespace(info=SimpleNamespace(run_id=key))] if key in runs else []

        def create_run(self, place: str, run_name: str, tags: dict[str, str]) -> Any:
            run_of(key := f"mlflow {tags['convoy.run']}")
            return SimpleNamespace(info=SimpleNamespace(run_id=key))

        def update_run(self, key: str, status: str) -> None: ...

        def log_batch(self, key: str, params: list[Any] = (), metrics: list[Any] = ()) -> None:  # type: ignore[assignment]
            runs[key]["parameters"] |= {param[0]: param[1] for param in params}
            if metrics:
                runs[key].log({metric[0]: metric[1] for metric in metrics}, metrics[0][3])

        def set_tag(self, key: str, name: str, value: str) -> None: ...

        def set_terminated(self, key: str, status: str) -> None:
            runs[key].finish(status == "FAILED")

    def of_wandb(id: str, config: dict[str, Any], **place: Any) -> Any:
        run = run_of(f"wandb {id}", config)
        return SimpleNamespace(log=run.log, finish=run.finish, summary=run.setdefault("summary", {}))

    def of_trackio(project: str, name: str, config: dict[str, Any], **place: Any) -> Told:
        return run_of(f"trackio {name}", config)

    contents: dict[str, dict[str, Any]] = {
        "wandb": {"login": lambda prompt: True, "Settings": SimpleNamespace, "init": of_wandb},
        "mlflow": {"MlflowClient": Client},
        "mlflow.entities": {"Metric": lambda *values: values, "Param": lambda *values: values},
        "trackio": {"init": of_trackio},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
    return modules


def events_of(run: Path) -> list[tuple[int, str, float]]:
    """Numbers by their step, as TensorBoard reads them, with all checksums."""
    found = list[tuple[int, str, float]]()
    for content in (path.read_bytes() for path in sorted((run / "tensorboard").iterdir())):
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            assert struct.unpack("<I", content[8:12]) == (masked_crc32c(content[:8]),)
            record, content = content[12 : 12 + length], content[12 + length :]
            assert struct.unpack("<I", content[:4]) == (masked_crc32c(record),)
            content, event = content[4:], Event.FromString(record)
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_each_tracker_hears_every_line_once_over_a_stop_and_one_that_fails_stops_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "RETRY_S", 0.05)
    monkeypatch.setattr(trackers, "POLL_S", 0.05)
    runs: dict[str, Told] = {}
    for name, module in made_up(runs, gone=2).items():
        monkeypatch.setitem(sys.modules, name, module)
    plain = train_here(data, tmp_path / "plain", SHORT | {"log": "[tensorboard]"})
    begun = train_here(data, out := tmp_path / "run", SHORT, stop_at=3)
    ended = train_here(data, out, SHORT, resume=True)
    assert ended.digest == plain.digest
    assert sorted(key.split()[0] for key in runs) == ["mlflow", "trackio", "wandb"]
    expected = [(step, f"{split}/loss", loss) for step, split, loss in lines(out, "step", "split", "loss")]
    for key, run in runs.items():
        rows = [(step, name, value) for step, row in run["rows"] for name, value in row.items()]
        assert [row for row in rows if row[1] in ("train/loss", "test/loss")] == expected, key
        assert str(run["parameters"]["optimizer.lr"]) == "0.05" and {*run["ends"]} == {0}
        top1 = run["summary"]["top1"] if "summary" in run else dict(row[1:] for row in rows)["summary/top1"]
        assert top1 > 0
    for run in (tmp_path / "plain", out):
        losses = [event for event in events_of(run) if event[1] in ("train/loss", "test/loss")]
        assert sorted(losses) == [(step, name, pytest.approx(loss)) for step, name, loss in sorted(expected)]
    (said,) = (sentence for sentence in {*begun.said, *ended.said} if "fails" in sentence)
    assert said == "wandb fails (nobody answers): the training goes on, and it is tried again"


def test_tensorboard_has_all_events_after_a_disk_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError("No space left on device")

    board = trackers._TensorBoard(tmp_path, "", {})
    board.send(1, {"train/loss": 1.0})
    assert board._file is not None
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(board._file, "flush", full)
        board.send(2, {"train/loss": 0.5})
    board.send(2, {"train/loss": 0.5})
    board.end("finished", {})
    assert {(1, "train/loss", 1.0), (2, "train/loss", 0.5)} == {*events_of(tmp_path)}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_a_file_of_trackers_that_is_none_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text("5")
    with trackers.Trackers(RunDirectory(tmp_path), [], {}, print):
        pass


def test_a_tracker_that_is_not_installed_is_refused(data: Path) -> None:
    with pytest.raises(Exception, match=r"log=wandb needs wandb, which is not installed: pip install .*\[wandb\]"):
        check_names(recipe_of(data, {"log": "[wandb]", "model.name": "lenet"}))
