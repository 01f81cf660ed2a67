"""The files of a study: the page, tables and pictures, and what the page says first."""

import json
import re
from pathlib import Path

from PIL import Image

from bench.made_study import document, write_study, write_trainings
from convoy.bench.page import write_files
from convoy.report.axes import columns, house_style
from report.pages import HOSTILE, harmless

TABLES = {"table.csv", "table.tex", "convergence.csv", "convergence.tex", "curves.csv"}
PICTURES = ("speed-up", "parts", "predictions", "error-time", "error-updates")


def test_a_study_has_a_page_tables_and_pictures_and_the_same_page_again(tmp_path: Path) -> None:
    report = write_files(write_trainings(write_study(tmp_path))).report
    files = {"bench.json", *TABLES, *(f"{name}.{kind}" for name in PICTURES for kind in ("svg", "png"))}
    assert {path.name for path in tmp_path.iterdir()} == files | {"report.html"}
    with Image.open(tmp_path / "speed-up.png") as picture:
        assert picture.width > 1200
    html = report.read_text(encoding="utf-8")
    assert files == set(re.findall(r'download="([^"]+)"', html))
    assert write_files(tmp_path).report.read_text(encoding="utf-8") == html


def test_trainings_alone_and_a_study_that_begins_have_pages(tmp_path: Path) -> None:
    html = write_files(write_study(tmp_path / "begins", rounds=0)).report.read_text(encoding="utf-8")
    assert "Nothing has been measured yet" in html and "incomplete" in html
    folder = write_trainings(write_study(tmp_path / "trainings", rounds=0))
    html = write_files(folder).report.read_text(encoding="utf-8")
    assert not (folder / "table.csv").exists() and (folder / "curves.csv").exists()
    assert "complete" in html and "Where an update" not in html


def test_names_of_others_are_text(tmp_path: Path) -> None:
    folder = write_study(tmp_path, devices=(1, 2), plans=("sample",), peers=(), rounds=1, failed=["sample=2 on 2"])
    text, inside = json.dumps(document(folder)), json.dumps("\n\n".join(HOSTILE))[1:-1]
    for known in ("lenet", "A processor", "a layer cannot be divided", "a note"):
        text = text.replace(known, inside)
    (folder / "bench.json").write_text(text)
    assert harmless(write_files(folder).report.read_text(encoding="utf-8")).all("b") == []
    first, begin = (folder / "table.tex").read_bytes().decode("utf-8", "replace").splitlines()[:2]
    assert first.startswith("% ") and begin == r"\begin{tabular}{lrrrrrrr}"


def test_a_busy_machine_is_doubted_before_its_numbers(tmp_path: Path) -> None:
    busy = write_files(write_study(tmp_path, devices=(1, 2), peers=(), spread=0.4))
    assert busy.remarks[0].startswith("The machine was busy with other work, or too few rounds were measured")
    assert any("as far as times so different can tell" in sentence for sentence in busy.remarks)
    html = busy.report.read_text(encoding="utf-8")
    assert html.index("The machine was busy") < html.index("Best speed-up")


def test_a_legend_has_as_many_columns_as_fit() -> None:
    with house_style():
        assert columns(["one device", "sample=2, shares auto", "filter=2"], 2) == 2
        assert columns(["sample=2,filter=2, shares auto"] * 3, 2) == 1
