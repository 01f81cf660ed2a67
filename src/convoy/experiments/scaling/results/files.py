"""The files of a study beside bench.json: the report, the table as CSV and LaTeX, the pictures."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from convoy.errors import ConvoyError
from convoy.experiments import axes
from convoy.experiments.plots import Panel
from convoy.experiments.scaling.results.convergence_plots import convergence_panels
from convoy.experiments.scaling.results.convergence_table import (
    convergence_csv,
    convergence_latex,
    convergence_missing,
    convergence_remarks,
    curves_csv,
)
from convoy.experiments.scaling.results.curves import Convergence, convergence
from convoy.experiments.scaling.results.page import Drawn, page
from convoy.experiments.scaling.results.plots import panels
from convoy.experiments.scaling.results.remarks import doubts, missing, remarks
from convoy.experiments.scaling.results.results import Results, results
from convoy.experiments.scaling.results.table import csv_text, latex_text
from convoy.experiments.scaling.storage.store import NAME, read
from convoy.files import write_atomically

DPI = 300


@dataclass(frozen=True)
class Written:
    """A study's results, what its trainings came to, what is to be said of them, and the report."""

    results: Results
    convergence: Convergence | None
    remarks: list[str]
    report: Path


def write_files(folder: Path) -> Written:
    """Write all files of the study in a folder, as far as it was measured.

    Raises:
        ConvoyError: there is no study, or they cannot be written.
    """
    document = read(folder)
    table = document["table"]
    found = results(document, table["epochs"], table["dataset_size"])
    trained = convergence(document)
    timed = bool(found.rows) or trained is None
    drawn = [*(panels(found) if timed else ()), *(convergence_panels(trained) if trained is not None else ())]
    pictures = [_drawn(panel) for panel in drawn]
    tables = {"table.csv": csv_text(found), "table.tex": latex_text(found, document)} if timed else {}
    said = [*doubts(found), *remarks(document, found), *missing(found)] if timed else missing(found)
    if trained is not None:
        tables |= {
            "convergence.csv": convergence_csv(trained),
            "convergence.tex": convergence_latex(trained, document),
            "curves.csv": curves_csv(trained),
        }
        said += [*convergence_remarks(trained), *convergence_missing(trained)]
    encoded = {name: text.encode() for name, text in tables.items()}
    raw = {NAME: (folder / NAME).read_bytes(), **encoded}
    html = page(document, found, trained, pictures, raw)
    files = {**encoded, "report.html": html.encode("utf-8", errors="replace")}
    for one in pictures:
        files |= one.files
    try:
        _write(folder, files)
    except OSError as error:
        raise ConvoyError(f"{folder} cannot be written ({error.strerror}): free space there, or copy it") from error
    return Written(found, trained, said, folder / "report.html")


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        write_atomically(folder / name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]


def _drawn(panel: Panel) -> Drawn:
    if panel.figure is None:
        return Drawn(panel, {})
    return Drawn(panel, {f"{panel.name}.{kind}": _saved(panel.figure, kind) for kind in ("svg", "png")})


def _saved(figure: Figure, kind: str) -> bytes:
    """A picture as a file: on white, with the text as text."""
    written = io.BytesIO()
    about: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with axes.house_style():
        figure.savefig(written, format=kind, dpi=DPI, metadata=about)
    return written.getvalue()
