from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.report.report import write_report
from convoy.report.run_directory import read_run
from report.made_runs import complete_run, evaluation, write_run


def test_a_complete_run_is_read(tmp_path: Path) -> None:
    run = read_run(complete_run(tmp_path))
    assert run.summary is not None and run.summary.status == "finished"
    assert run.evaluation is not None and {len(row) for row in run.evaluation.confusion} == {10}
    assert run.setting("model.name") == "lenet"
    assert run.setting("model.name.deeper") is None


def test_the_configuration_is_read_as_the_trainer_reads_it(tmp_path: Path) -> None:
    run = complete_run(tmp_path)
    text = "data: {path: no, format: 2026-13-45}\nseed: 017\nloss: {label_smoothing: 1e-05}\nepochs: 1_0\n"
    (run / "config.yaml").write_text(text)
    found = read_run(run)
    keys = ("data.path", "data.format", "seed", "loss.label_smoothing", "epochs")
    assert [found.setting(key) for key in keys] == ["no", "2026-13-45", 17, 1e-05, "1_0"]


def test_everything_but_the_configuration_may_be_missing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    assert run.summary is None
    assert run.evaluation is None
    assert run.environment == {}


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvoyError, match=r"has no config\.yaml"):
        read_run(tmp_path)
    with pytest.raises(ConvoyError, match="does not exist"):
        read_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.yaml", b"model:\n  name: [lenet\n", "line 3: expected"),
        ("config.yaml", b"just words", "not a mapping"),
        ("config.yaml", b"a: 1\nb: \xff\n", "line 2 is not UTF-8"),
        ("config.yaml", b"a: &a [*a]\nb: \x00\n", "no YAML"),
        ("summary.json", b'{"status":\n "finished",\n', "line 3 is not valid JSON"),
        ("summary.json", b'{"status": "lost"}', "`status`"),
        ("summary.json", b'{"top1": 97.3}', "`top1`"),
        ("summary.json", b'{"bad_images": [{"reason": "no name"}]}', "`bad_images.0.name`"),
        ("summary.json", b"", "line 1 is not valid JSON"),
        ("environment.json", b"[]", "not a JSON object"),
        ("environment.json", b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        ("evaluation.json", b'{"classes": ["a"],\n "x": "\xff"}', "line 2 is not UTF-8"),
        ("evaluation.json", b'{"classes": ["a", "b"], "confusion": [[1, 2]]}', "2 rows and 2 columns"),
        ("evaluation.json", b'{"classes": ["a"], "confusion": [[-1]]}', "`confusion.0.0`"),
        ("evaluation.json", b'{"classes": ["a"], "confusion": [[99999999999999999999]]}', "`confusion.0.0`"),
    ],
)
def test_a_corrupt_file_is_named(tmp_path: Path, file: str, content: bytes, said: str) -> None:
    run = complete_run(tmp_path)
    (run / file).write_bytes(content)
    with pytest.raises(ConvoyError) as caught:
        read_run(run)
    assert str(run / file) in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(ConvoyError, match=r"metrics\.jsonl cannot be read"):
        read_run(run)


def test_a_class_without_a_name_is_numbered(tmp_path: Path) -> None:
    final = evaluation(["cat", "dog"])
    final["mistakes"][0] |= {"label": 1, "predicted": 2}
    html = write_report(complete_run(tmp_path, final=final)).read_text(encoding="utf-8")
    assert "dog, taken for class 2" in html
