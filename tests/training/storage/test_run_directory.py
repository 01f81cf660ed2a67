"""The folder of a run."""

from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.training.storage.run_directory import RunDirectory


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
