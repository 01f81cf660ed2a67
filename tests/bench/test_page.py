"""The files of a study: the page, tables and pictures, and what the page says first."""

import re
from pathlib import Path

from PIL import Image

from bench.made_study import write_study, write_trainings
from convoy.bench.page import write_files

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
