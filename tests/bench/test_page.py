"""The files of a study: the page, tables and pictures, and what the page says first."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from bench.made_study import document, write_study, write_trainings
from convoy.bench.page import write_files
from convoy.cli.bench import study
from convoy.errors import ConvoyError
from report.pages import HOSTILE, harmless

TABLES = {"table.csv", "convergence.csv", "curves.csv"}
PICTURES = ("speed-up", "parts", "predictions", "error-time", "error-updates")


def test_a_study_has_a_page_tables_and_pictures_and_the_same_page_again(tmp_path: Path) -> None:
    def work(*_: object) -> None:
        write_trainings(write_study(tmp_path))
        raise ConvoyError("one training broke")

    with pytest.raises(ConvoyError, match="broke"):  # what was done has its page
        study(work, write_files, tmp_path, False)
    report = tmp_path / "report.html"
    files = {"bench.json", *TABLES, *(f"{name}.{kind}" for name in PICTURES for kind in ("svg", "png"))}
    assert {path.name for path in tmp_path.iterdir()} == files | {"report.html"}
    with Image.open(tmp_path / "speed-up.png") as picture:
        assert picture.width > 1200
    html = report.read_text(encoding="utf-8")
    assert files == set(re.findall(r'download="([^"]+)"', html))
    assert write_files(tmp_path).report.read_text(encoding="utf-8") == html


def test_names_of_others_are_text(tmp_path: Path) -> None:
    folder = write_study(tmp_path, devices=(1, 2), plans=("sample",), peers=(), rounds=1, failed=["sample=2 on 2"])
    text, inside = json.dumps(document(folder)), json.dumps("\n\n".join(HOSTILE))[1:-1]
    for known in ("lenet", "A processor", "a layer cannot be divided", "a note"):
        text = text.replace(known, inside)
    (folder / "bench.json").write_text(text)
    assert harmless(write_files(folder).report.read_text(encoding="utf-8")).all("b") == []
