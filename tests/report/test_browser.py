"""The report of a run and that of a study in a real browser, narrow and wide, light and dark."""

import json
from pathlib import Path

import pytest

from bench.made_study import write_study, write_trainings
from convoy.bench.page import write_files
from convoy.report.report import write_report
from report.made_runs import comparison, complete_run, evaluation, summary
from report.pages import BROWSER, look

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium is not installed")


def run_page(folder: Path) -> Path:
    """The page of a run whose names are long or look like markup."""
    names = ["airplane", "<script>alert(1)</script>", "w" * 300, *map(str, range(9))]
    bad = [{"name": "deep/" * 60 + "x.png", "reason": "truncated", "split": "train"}]
    run = complete_run(folder, final=evaluation(names), results=summary(data="d" * 300, bad_images=bad))
    (run / "prediction.json").write_text(json.dumps(comparison(plan="p" * 300).to_document()), encoding="utf-8")
    return write_report(run)


def study_page(folder: Path) -> Path:
    plans = ("sample", "filter", "sample=2,filter=2", "owt", "auto")
    return write_files(write_trainings(write_study(folder, plans=plans, failed=["filter=4 on 4"]))).report


@pytest.mark.slow
def test_pages_are_whole_quiet_and_fit(tmp_path: Path) -> None:
    run, study = run_page(tmp_path / "run"), study_page(tmp_path / "study")
    for page, plots, width, dark in ((run, 6, 400, True), (study, 5, 400, False), (study, 5, 1600, True)):
        found, console = look(page, tmp_path / "profile", width=width, dark=dark)
        assert console == []
        assert found["width"] == width and found["content"] <= width
        assert [address for address in found["requests"] if not address.startswith(("data:", "file:"))] == []
        assert found["plots"] == plots
        assert page is not run or found["pictures"] == 6
        assert (found["dark"], found["paper"]) == (dark, "rgb(18, 21, 26)" if dark else "rgb(255, 255, 255)")


def test_tables_show_that_they_scroll_and_a_bad_page_is_noticed(tmp_path: Path) -> None:
    report = write_report(complete_run(tmp_path))
    bad = '<div style="width: 500px">wide</div><img src="http://127.0.0.1:9/a.png"><script>alert(1)</script></footer>'
    report.write_text(report.read_text(encoding="utf-8").replace("</footer>", bad), encoding="utf-8")
    found, console = look(report, tmp_path / "profile", width=240)
    assert found["cut"] and all(found["cut"])
    assert found["content"] > 400
    assert any("Content Security Policy" in line for line in console)
