"""What the report reads of a run directory: whatever is missing, cut off or damaged."""

import json
from pathlib import Path

import numpy as np
import pytest

from convoy.errors import ConvoyError
from convoy.report.run_directory import Metrics, column, read_metrics, read_run
from report.made_runs import complete_run, metrics, write_run


def test_a_run_is_read_and_everything_but_the_configuration_may_be_missing(tmp_path: Path) -> None:
    run = read_run(complete_run(tmp_path))
    assert run.summary is not None and run.summary.status == "finished"
    assert run.evaluation is not None and {len(row) for row in run.evaluation.confusion} == {10}
    assert (run.setting("model.name"), run.setting("model.name.deeper")) == ("lenet", None)
    text = "data: {path: no, format: 2026-13-45}\nseed: 017\nloss: {label_smoothing: 1e-05}\nepochs: 1_0\n"
    alone = read_run(write_run(tmp_path / "alone", config=text))  # as the trainer reads it
    keys = ("data.path", "data.format", "seed", "loss.label_smoothing", "epochs")
    assert [alone.setting(key) for key in keys] == ["no", "2026-13-45", 17, 1e-05, "1_0"]
    assert (alone.summary, alone.evaluation, alone.environment) == (None, None, {})
    with pytest.raises(ConvoyError, match=r"has no config\.yaml"):
        read_run(tmp_path)
    with pytest.raises(ConvoyError, match="does not exist"):
        read_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.yaml", b"model:\n  name: [lenet\n", "line 3: expected"),
        ("config.yaml", b"just words", "not a mapping"),
        ("config.yaml", b"a: 1\nb: \xff\n", "line 2 is not UTF-8"),
        ("summary.json", b'{"status":\n "finished",\n', "line 3 is not valid JSON"),
        ("summary.json", b'{"status": "lost"}', "`status`"),
        ("summary.json", b'{"bad_images": [{"reason": "no name"}]}', "`bad_images.0.name`"),
        ("environment.json", b"[]", "not a JSON object"),
        ("environment.json", b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        ("evaluation.json", b'{"classes": ["a"],\n "x": "\xff"}', "line 2 is not UTF-8"),
        ("evaluation.json", b'{"classes": ["a", "b"], "confusion": [[1, 2]]}', "2 rows and 2 columns"),
        ("evaluation.json", b'{"classes": ["a"], "confusion": [[99999999999999999999]]}', "`confusion.0.0`"),
        ("diagnosis.json", b"{", "diagnosis.json"),
        ("diagnosis.json", b'{"sentence": null}', "diagnosis.json"),
        ("prediction.json", b'{"version": 2}', "prediction.json"),
        ("prediction.json", b"[]", "prediction.json"),
        ("metrics.jsonl", b"[1, 2]\n{}", "line 1: valid dictionary"),
    ],
)  # fmt: skip
def test_a_corrupt_file_is_named(tmp_path: Path, file: str, content: bytes, words: str) -> None:
    run = complete_run(tmp_path)
    (run / file).write_bytes(content)
    with pytest.raises(ConvoyError) as caught:
        read_run(run)
    assert str(run / file) in str(caught.value)
    assert all(word in str(caught.value) for word in words.split(": "))
    assert "\n" not in str(caught.value)


def history(folder: Path, *rows: object, end: str = "\n") -> Metrics:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end)
    return read_metrics(path)


def train(step: int, loss: float | None = 1.0) -> dict[str, object]:
    return {"split": "train", "step": step, "loss": loss, "top1": 0.5}


def test_metrics_are_one_history(tmp_path: Path) -> None:
    whole = history(tmp_path, *metrics())
    assert [line.step for line in whole.train] == list(range(4, 125, 4))
    assert [line.step for line in whole.test] == [31, 62, 93, 124] and not whole.cut
    first, second = ({"split": "test", "step": 30, "top1": top1} for top1 in (0.1, 0.2))
    resumed = history(tmp_path, train(10, 1), train(20, 2), train(30, 3), first, train(20, 4))
    assert [(line.step, line.loss) for line in resumed.train] == [(10, 1), (20, 4)]
    assert resumed.test == []  # of a branch that is dead
    repeated = history(tmp_path, train(10), first, train(40), second)
    assert [line.top1 for line in repeated.test] == [0.2] and len(repeated.train) == 2
    rows = [f'{{"split": "train", "step": {n}, "loss": {x}}}' for n, x in enumerate(("null", "NaN", "Infinity", "2"))]
    np.testing.assert_array_equal(column(history(tmp_path, *rows).train, "loss"), [np.nan, np.nan, np.nan, 2])
    cut = history(tmp_path, train(10), '{"split": "train", "st', end="")
    assert len(cut.train) == 1 and cut.cut
    assert read_metrics(tmp_path / "none.jsonl").train == []


BAD = {"split": '"other"', "step": -1, "top1": 98.2, "loss": '"low"'}


def test_a_corrupt_line_is_named(tmp_path: Path) -> None:
    rows = {'{"split": "train", "st': "not a JSON object", "[" * 100_000: "not a JSON object"}
    rows |= {f'{{"split": "train", "step": 1, "{key}": {value}}}': f"`{key}`" for key, value in BAD.items()}
    for row, words in rows.items():
        with pytest.raises(ConvoyError, match=rf"metrics\.jsonl, line 2.*{words}"):
            history(tmp_path, train(10), row, train(20))
    (tmp_path / "metrics.jsonl").write_bytes(b'{"split": "train", "step": 1}\n\xff\xfe\n')
    with pytest.raises(ConvoyError, match="line 2 is not a JSON object"):
        read_metrics(tmp_path / "metrics.jsonl")
    run = write_run(tmp_path)
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(ConvoyError, match=r"metrics\.jsonl cannot be read"):
        read_run(run)
