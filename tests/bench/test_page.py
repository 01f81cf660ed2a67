"""The report of a study in a real browser."""

import re
from pathlib import Path

import pytest
from PIL import Image

from bench.made_study import write_study, write_trainings
from convoy.bench.page import write_files
from convoy.bench.table import lines
from report.test_browser import BROWSER, look

needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium is not installed")
PLANS = ("sample", "filter", "sample=2,filter=2", "owt", "auto")


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(400, False), (820, True), (1600, True)])
def test_the_page_is_whole_quiet_and_fits(tmp_path: Path, width: int, dark: bool) -> None:
    folder = write_study(tmp_path, plans=PLANS, failed=["filter=4 on 4"], waiting=["owt=4 on 4"])
    write_trainings(folder)
    found, said = look(write_files(folder).report, tmp_path / "profile", width=width, dark=dark)
    assert said == []
    assert found["width"] == width
    assert found["content"] <= width
    assert [address for address in found["requests"] if not address.startswith(("data:", "file:"))] == []
    assert (found["plots"], found["buttons"]) == (5, 2)
    assert 11 <= found["text"] <= 17
    assert found["dark"] == dark


@pytest.mark.slow
@needs_browser
def test_the_tables_fit_a_page_of_1200_pixels(tmp_path: Path) -> None:
    folder = write_trainings(write_study(tmp_path, plans=PLANS))
    found, _ = look(write_files(folder).report, tmp_path / "profile", width=1200)
    assert found["cut"] == []


@needs_browser
def test_the_page_of_one_row_alone(tmp_path: Path) -> None:
    folder = write_study(tmp_path, devices=(1,), plans=("sample",), peers=(), rounds=1)
    found, said = look(write_files(folder).report, tmp_path / "profile", width=400)
    assert said == []
    assert found["content"] <= 400


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1600, False)])
def test_the_page_of_trainings_alone(tmp_path: Path, width: int, dark: bool) -> None:
    folder = write_trainings(write_study(tmp_path, rounds=0), finished=False)
    found, said = look(write_files(folder).report, tmp_path / "profile", width=width, dark=dark)
    assert said == []
    assert found["content"] <= width
    assert found["plots"] == 2
    assert 11 <= found["text"] <= 17


def test_files_of_trainings(tmp_path: Path) -> None:
    write_files(write_trainings(write_study(tmp_path, rounds=0)))
    pictures = {f"{name}.{kind}" for name in ("error-time", "error-updates") for kind in ("svg", "png")}
    tables = {"convergence.csv", "convergence.tex", "curves.csv"}
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "report.html", *tables, *pictures}
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "complete" in html and "Where an update" not in html


def test_files(tmp_path: Path) -> None:
    report = write_files(write_study(tmp_path)).report
    names = {path.name for path in tmp_path.iterdir()}
    pictures = {f"{name}.{kind}" for name in ("speed-up", "parts", "predictions") for kind in ("svg", "png")}
    assert names == {"bench.json", "report.html", "table.csv", "table.tex", *pictures}
    with Image.open(tmp_path / "speed-up.png") as picture:
        assert picture.width > 1200
    html = report.read_text(encoding="utf-8")
    assert {"bench.json", "table.csv", "table.tex", *pictures} == set(re.findall(r'download="([^"]+)"', html))
    assert "http" not in re.sub(r'"data:[^"]*"', "", html).replace("http-equiv", "")


def test_names_are_escaped(tmp_path: Path) -> None:
    folder = write_study(tmp_path, failed=["filter=4 on 4"])
    path = folder / "bench.json"
    path.write_text(path.read_text().replace("a layer cannot be divided", "<script>alert(1)</script>"))
    assert "<script>alert" not in write_files(folder).report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_same_study_gives_the_same_page(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    first = write_files(folder).report.read_bytes()
    assert write_files(folder).report.read_bytes() == first


@pytest.mark.slow
def test_days_are_said_only_when_asked_for(tmp_path: Path) -> None:
    folder = write_study(tmp_path, epochs=None)
    written = write_files(folder)
    assert all(row.days is None for row in written.results.rows)
    assert "Days" not in written.report.read_text(encoding="utf-8")
    assert "days" not in (folder / "table.tex").read_text() and "days" not in lines(written.results)[0]
    asked = write_files(write_study(tmp_path / "asked", epochs=5.0))
    assert "Days of training" in asked.report.read_text(encoding="utf-8")
    assert "days" in (tmp_path / "asked" / "table.tex").read_text() and "days" in lines(asked.results)[0]


@pytest.mark.slow
def test_a_busy_machine_is_doubted_before_its_numbers(tmp_path: Path) -> None:
    calm = write_files(write_study(tmp_path / "calm"))
    assert "Prediction error" not in calm.report.read_text(encoding="utf-8")
    assert any("predictions of an update were off by" in said for said in calm.remarks)
    assert not any("busy" in said for said in calm.remarks)
    busy = write_files(write_study(tmp_path / "busy", spread=0.4))
    assert busy.remarks[0].startswith("The machine was busy with other work, or too few rounds were measured")
    assert any("as far as times so different can tell" in said for said in busy.remarks)
    html = busy.report.read_text(encoding="utf-8")
    assert html.index("The machine was busy") < html.index("Best speed-up")


def test_nothing_measured_yet(tmp_path: Path) -> None:
    folder = write_study(tmp_path, rounds=0)
    html = write_files(folder).report.read_text(encoding="utf-8")
    assert "Nothing has been measured yet" in html and "incomplete" in html
