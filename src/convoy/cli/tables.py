"""Tables for people, and the same rows as JSON for programs."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from convoy.terminal import Console


def as_csv(row: Iterable[Any]) -> str:
    """A line of CSV. A text that a spreadsheet would take for a formula has a `'` before it; None is left empty."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(
        f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value for value in row
    )
    return line.getvalue()


def show(rows: Sequence[dict[str, Any]], as_json: bool = False, right: Sequence[str] = ()) -> None:
    """Print rows with equal keys, the keys as headings; columns named in `right` are aligned to the right."""
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0] if rows else ():
        first = not table.columns
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=first)
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else escape(str(value)) for value in row.values()))
    Console(highlight=False).print(table)
