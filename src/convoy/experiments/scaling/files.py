"""The files of a study beside bench.json: the report, the table as CSV and LaTeX, the pictures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.errors import ConvoyError
from convoy.experiments.scaling.remarks import remarks
from convoy.experiments.scaling.results import Results, results
from convoy.experiments.scaling.store import read
from convoy.experiments.scaling.table import csv_text, latex_text
from convoy.training.files import write_text


@dataclass(frozen=True)
class Written:
    """A study's results and the files that were made of them."""

    results: Results
    remarks: list[str]
    files: list[Path]


def write_files(folder: Path) -> Written:
    """Write all files of the study in a folder, as far as it was measured.

    Raises:
        ConvoyError: there is no study, or they cannot be written.
    """
    document = read(folder)
    table = document["table"]
    found = results(document, table["epochs"], table["dataset_size"])
    said = remarks(document, found)
    try:
        files = _write(folder, document, found, said)
    except OSError as error:
        raise ConvoyError(f"{folder} cannot be written ({error.strerror}): free space there, or copy it") from error
    return Written(found, said, files)


def _write(folder: Path, document: Mapping[str, Any], found: Results, said: list[str]) -> list[Path]:
    files = {"table.csv": csv_text(found), "table.tex": latex_text(found, document)}
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]
