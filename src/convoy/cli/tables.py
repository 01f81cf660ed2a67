"""Tables for people, and the same rows as JSON for programs."""

import json
from collections.abc import Sequence
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from convoy.terminal import Console


def show(rows: Sequence[dict[str, Any]], as_json: bool, right: Sequence[str] = ()) -> None:
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
