import json
from pathlib import Path

import numpy as np
import pytest

from convoy.errors import ConvoyError
from convoy.report.run_directory import column, read_metrics
from report.made_runs import metrics


def write(folder: Path, *rows: object, end: str = "\n") -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end)
    return path


def train(step: int, loss: float | None = 1.0) -> dict[str, object]:
    return {"split": "train", "step": step, "loss": loss, "top1": 0.5}


def test_a_run_is_read_by_split(tmp_path: Path) -> None:
    found = read_metrics(write(tmp_path, *metrics()))
    assert [line.step for line in found.train] == list(range(4, 125, 4))
    assert [line.step for line in found.test] == [31, 62, 93, 124]
    assert not found.cut


def test_a_resumed_run_keeps_the_last_of_each_step_and_no_dead_branch(tmp_path: Path) -> None:
    test = {"split": "test", "step": 30, "top1": 0.1}
    found = read_metrics(write(tmp_path, train(10, 1), train(20, 2), train(30, 3), test, train(20, 4)))
    assert [(line.step, line.loss) for line in found.train] == [(10, 1), (20, 4)]
    assert found.test == []


def test_a_test_line_that_is_repeated_replaces_the_first(tmp_path: Path) -> None:
    first, second = ({"split": "test", "step": 10, "top1": top1} for top1 in (0.1, 0.2))
    found = read_metrics(write(tmp_path, train(10), first, train(20), second))
    assert [line.top1 for line in found.test] == [0.2]
    assert len(found.train) == 2


def test_null_nan_and_infinity_have_no_value(tmp_path: Path) -> None:
    losses = ("null", "NaN", "Infinity", "2")
    rows = (f'{{"split": "train", "step": {step}, "loss": {loss}}}' for step, loss in enumerate(losses))
    found = column(read_metrics(write(tmp_path, *rows)).train, "loss")
    np.testing.assert_array_equal(found, [np.nan, np.nan, np.nan, 2])


def test_a_last_line_cut_off_while_writing_is_left_out_and_said(tmp_path: Path) -> None:
    found = read_metrics(write(tmp_path, train(10), '{"split": "train", "st', end=""))
    assert len(found.train) == 1
    assert found.cut


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"split": "train", "st', "not a JSON object"),
        ("[1, 2]", "valid dictionary"),
        ('{"split": "other", "step": 1}', "`split`"),
        ('{"split": "train", "step": -1}', "`step`"),
        ('{"split": "train", "step": 1, "top1": 98.2}', "`top1`"),
        ('{"split": "train", "step": 1, "loss": "low"}', "`loss`"),
        ("[" * 100_000, "not a JSON object"),
    ],
)
def test_a_corrupt_line_is_named(tmp_path: Path, row: str, said: str) -> None:
    path = write(tmp_path, train(10), row, train(20))
    with pytest.raises(ConvoyError) as caught:
        read_metrics(path)
    assert f"{path}, line 2" in str(caught.value)
    assert said in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"split": "train", "step": 1}\n\xff\xfe\n')
    with pytest.raises(ConvoyError, match="line 2 is not a JSON object"):
        read_metrics(path)


def test_no_file_is_an_empty_history(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl").train == []
