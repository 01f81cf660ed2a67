import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from convoy.report.pages import inline_svg
from convoy.report.plots import draw_panels
from convoy.report.run_directory import read_run
from report.made_runs import complete_run


@pytest.fixture
def drawings(tmp_path: Path) -> list[str]:
    panels = draw_panels(read_run(complete_run(tmp_path)))
    return [inline_svg(panel.figure, panel.name, panel.title, "a <b>") for panel in panels if panel.figure is not None]


def test_colors_and_fonts_are_those_of_the_page(drawings: list[str]) -> None:
    for drawing in drawings:
        assert "var(--train)" in drawing
        assert "font-family" not in drawing
        assert not re.search(r"(fill|stroke): *(#|rgb|black|white)", drawing)


def test_a_color_without_a_property_of_the_page_is_noticed() -> None:
    figure = Figure()
    figure.text(0, 0, "x", color="#123456")
    with pytest.raises(KeyError, match="#123456"):
        inline_svg(figure, "x", "x", "x")


def test_ids_are_unique_over_all_drawings_and_every_reference_is_met(drawings: list[str]) -> None:
    roots = [ElementTree.fromstring(drawing) for drawing in drawings]
    ids = [node.attrib["id"] for root in roots for node in root.iter() if "id" in node.attrib]
    assert len(ids) == len(set(ids))
    for root, drawing in zip(roots, drawings, strict=True):
        own = {node.attrib["id"] for node in root.iter() if "id" in node.attrib}
        used = re.findall(r'(?:href="#|url\(#)([^)"]+)', drawing)
        assert used
        assert set(used) <= own


def test_drawings_are_named_for_screen_readers(drawings: list[str]) -> None:
    root = ElementTree.fromstring(drawings[0])
    assert root.attrib["role"] == "img"
    texts = {node.attrib.get("id"): node.text for node in root}
    assert [texts[name] for name in root.attrib["aria-labelledby"].split()] == ["Loss over updates", "a <b>"]
    assert "width" not in root.attrib
