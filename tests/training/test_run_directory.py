"""The folder of a run."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convoy.checkpoint.files import in_file
from convoy.errors import ConvoyError
from convoy.training import lock
from convoy.training.run_directory import RunDirectory, save_weights


def test_a_run_a_file_and_a_full_folder_are_not_overwritten(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.check_free()
    run.create("seed: 0\n", {"device": "cpu"})
    with pytest.raises(ConvoyError, match="--resume"):
        run.check_free()
    with pytest.raises(ConvoyError, match="is not empty"):
        RunDirectory(tmp_path).check_free()
    with pytest.raises(ConvoyError, match="is a file"):
        RunDirectory(run.config).check_free()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("running", "already holds a run: add --resume to go on with it, or choose another --out"),
        ("stopped", "already holds a run: add --resume to go on with it, or choose another --out"),
        ("failed", "already holds a run, which failed: add --resume to go on with it, or choose another --out"),
        ("finished", "already holds a run, which is finished: choose another --out"),
    ],
)
def test_a_second_start_is_told_how_the_run_stands(tmp_path: Path, status: str, words: str) -> None:
    run = RunDirectory(tmp_path)
    run.create("seed: 0\n", {"device": "cpu"})
    run.summary_file.write_text(json.dumps({"status": status}))
    with pytest.raises(ConvoyError) as caught:
        run.check_free()
    assert str(caught.value) == f"{tmp_path} {words}"
    with run.lock(), pytest.raises(ConvoyError, match=f"another process is training in {tmp_path} "):
        run.check_free()


def test_who_has_the_lock_is_not_told_that_another_process_trains(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create("seed: 0\n", {"device": "cpu"})
    with run.lock(), pytest.raises(ConvoyError, match="already holds a run: add --resume"):
        run.check_free(mine=True)


def test_what_is_left_of_a_process_that_was_killed_as_it_began_is_no_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for name in (lock.NAME, ".environment.json.4711.tmp", ".config.yaml.4711.tmp"):
        (tmp_path / name).write_text("{")
    run.check_free()
    run.sweep()
    assert [entry.name for entry in tmp_path.iterdir()] == [lock.NAME]
    run.environment.write_text("{}")
    with pytest.raises(ConvoyError, match="is not empty"):
        run.check_free()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConvoyError, match="choose another --out"):
        RunDirectory(tmp_path / "file" / "run").create("", {})


def test_metrics_of_updates_to_be_done_again_are_dropped(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    run.forget_metrics_after(2)
    assert run.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_damaged_line_of_metrics_is_dropped(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_bytes(b'{"step": 1}\n{"st\xff\xfe\n{"step": 2}\n')
    run.forget_metrics_after(2)
    assert run.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_weights_are_written_one_after_the_other(tmp_path: Path) -> None:
    kinds = {"small": (torch.int8, (3,)), "wide": (torch.float64, (2, 5)), "usual": (torch.float32, ())}
    wanted = {name: torch.full(shape, 7, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    given: list[weakref.ref[torch.Tensor]] = []

    def one_by_one() -> Iterator[torch.Tensor]:
        for name in in_file(kinds):
            assert all(before() is None for before in given)
            whole = wanted[name].clone()
            given.append(weakref.ref(whole))
            yield whole
            del whole

    save_weights(kinds, one_by_one(), tmp_path / "weights.safetensors")
    found = load_file(tmp_path / "weights.safetensors")
    assert found.keys() == wanted.keys() and len(given) == 3
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in wanted.items()
    )
