"""What the report reads of a run directory: whatever is missing, cut off or damaged."""

from pathlib import Path

import pytest
from PIL import Image

from convoy.errors import ConvoyError
from convoy.report.pages import read_picture
from convoy.report.run import read_run
from report.made_runs import complete_run, write_run


def test_a_run_is_read_and_everything_but_the_configuration_may_be_missing(tmp_path: Path) -> None:
    run = read_run(complete_run(tmp_path))
    assert run.summary.status == "finished" and {len(row) for row in run.evaluation.confusion} == {10}
    assert (run.setting("model.name"), run.setting("model.name.deeper")) == ("lenet", None)
    alone = read_run(write_run(tmp_path / "alone", config="data: {path: no}\nseed: 017\n"))  # as the trainer reads it
    assert (alone.setting("data.path"), alone.setting("seed")) == ("no", 17)
    splits = enumerate(("validation", "test", "validation", "test"))  # the run that was made longer had both
    longer = write_run(tmp_path / "longer", lines=[{"split": split, "step": step} for step, split in splits])
    assert [line.step for line in read_run(longer).metrics.test] == [0, 2]
    assert (alone.summary.status, alone.evaluation.classes, alone.environment) == (None, [], {})
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConvoyError, match=r"has no config\.yaml"):
            read_run(path)


DAMAGE = [
    ("config.yaml", b"model:\n  name: [lenet\n", "line 3"),
    ("environment.json", b'{"a": ' + b"[" * 100_000, "recursion"),
    ("evaluation.json", b'{"classes": ["a", "b"], "confusion": [[1, 2]]}', "2 rows and 2 columns"),
    ("prediction.json", b'{"version": 2}', "`version`"),
    ("metrics.jsonl", b'{"split": "train", "step": 1}\n{"split": "train", "st\n{}', "line 2: this is no JSON"),
    ("metrics.jsonl", b'{"split": "train", "step": 1, "top1": 98.2}\n{}', "line 1: `top1`"),
]


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    for number, (file, content, words) in enumerate(DAMAGE):
        run = complete_run(tmp_path / str(number))
        (run / file).write_bytes(content)
        with pytest.raises(ConvoyError) as caught:
            read_run(run)
        assert str(run / file) in str(caught.value) and words in str(caught.value), file
        assert "\n" not in str(caught.value)


def test_a_corrupt_picture_and_one_outside_the_run_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    with pytest.raises(ConvoyError, match=r"a\.png is not a readable"):
        read_picture(run, "a.png")
    Image.new("L", (8, 8)).save(tmp_path / "private.png")
    (run / "link.png").symlink_to(tmp_path / "private.png")
    for name in ("link.png", "../private.png"):
        with pytest.raises(ConvoyError, match="outside the run directory"):
            read_picture(run, name)
