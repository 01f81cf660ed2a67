"""The first lines of a report say what held the run back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.doctor.advice import Advice
from convoy.doctor.diagnosis import Diagnosis
from convoy.errors import ConvoyError
from convoy.report.remarks import about, remarks
from convoy.report.report import write_report
from convoy.report.run_directory import read_run
from report.made_runs import complete_run

FOUND = Diagnosis(
    "lenet",
    "mnist-mini",
    1,
    "serial",
    128,
    2000.0,
    0.064,
    {"forward": 0.02, "backward": 0.04},
    "Training waits for pictures for 40 % of its time.",
    (
        Advice("workers", "--workers 2", ("--workers", "2"), 1.62, "Training waits for pictures for 40 % of its time."),
        Advice("batch", "--batch 256", ("--batch", "256"), 1.2, "The batch is too small.", another_training=True),
    ),
)
FIRST = (
    "Training waits for pictures for 40 % of its time. "
    "What would help most: --workers 2: 1.62 × as many samples a second (predicted)."
)


def with_diagnosis(folder: Path, document: Any) -> Path:
    run = complete_run(folder)
    (run / "diagnosis.json").write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return run


def test_it_is_said_after_the_result_with_the_first_change(tmp_path: Path) -> None:
    run = with_diagnosis(tmp_path, FOUND.to_document())
    assert about(read_run(run))[1] == FIRST
    sentence = "<p>Training waits for pictures for 40 % of its time. "
    assert sentence in write_report(run).read_text(encoding="utf-8")
    healthy = replace(FOUND, sentence="None of the changes helps.", advice=())
    (run / "diagnosis.json").write_text(json.dumps(healthy.to_document()), encoding="utf-8")
    assert about(read_run(run))[1] == "None of the changes helps."
    later = replace(FOUND, updates=(406, 1500))
    (run / "diagnosis.json").write_text(json.dumps(later.to_document()), encoding="utf-8")
    assert about(read_run(run))[1] == f"In updates 406 to 1,500: {FIRST}"
    (run / "diagnosis.json").unlink()
    assert sentence not in write_report(run).read_text(encoding="utf-8")


def test_it_takes_the_place_of_what_was_said_of_waits(tmp_path: Path) -> None:
    run = with_diagnosis(tmp_path, FOUND.to_document())
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    (run / "summary.json").write_text(json.dumps({**summary, "data_wait_share": 0.4}), encoding="utf-8")
    assert not [line for line in remarks(read_run(run)) if "waited for data" in line]
    (run / "diagnosis.json").unlink()
    assert [line for line in remarks(read_run(run)) if "waited for data" in line]


def test_names_of_programs_are_text(tmp_path: Path) -> None:
    run = with_diagnosis(tmp_path, replace(FOUND, sentence="<script>x</script> has the cores.").to_document())
    html = write_report(run).read_text(encoding="utf-8")
    assert "&lt;script&gt;x&lt;/script&gt; has the cores" in html and "<script>x</script>" not in html


@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "",
        "[]",
        FOUND.to_document() | {"sentence": None},
        FOUND.to_document() | {"advice": [{"cause": "magic"}]},
        {key: value for key, value in FOUND.to_document().items() if key != "update_s"},
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damaged: Any) -> None:
    run = with_diagnosis(tmp_path, damaged)
    with pytest.raises(ConvoyError, match=r"diagnosis\.json"):
        read_run(run)
