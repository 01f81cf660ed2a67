"""How `convoy bench` answers: measures, writes the files of the study, and prints what came of it."""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from convoy.bench.ask import Ask
from convoy.bench.command import measure
from convoy.bench.page import Written, write_files
from convoy.bench.table import (
    CONVERGENCE_NUMBERS,
    NUMBERS,
    convergence_lines,
    convergence_records,
    lines,
    records,
)
from convoy.cli.measuring_progress import Progress
from convoy.terminal import Console
from convoy.units import table


def answer(ask: Ask, as_json: bool) -> int:
    """Measure, write the files, and print the table.

    Args:
        ask: what is asked for, checked.
        as_json: print it for programs.

    Returns:
        The exit status: 1 where it was stopped.

    Raises:
        ConvoyError: something in it cannot be.
    """
    console = Console(stderr=True, highlight=False)
    try:
        with _terminated(), Progress(console) as progress:
            measure(ask, progress, lambda sentence: console.print(sentence, markup=False, soft_wrap=True))
    except KeyboardInterrupt:
        click.echo(f"convoy: stopped; {ask.folder} keeps what was measured, the same command goes on", err=True)
        return 1
    written = write_files(ask.folder)
    if as_json:
        click.echo(json.dumps(_document(written), indent=2, allow_nan=False))
        return 0
    _print(lines(written.results), NUMBERS)
    _print(convergence_lines(written.convergence) if written.convergence is not None else [], CONVERGENCE_NUMBERS)
    for sentence in written.remarks:
        click.echo(sentence)
    click.echo(f"report: {written.report}")
    return 0


def _document(written: Written) -> dict[str, Any]:
    found: dict[str, Any] = {"configurations": records(written.results), "remarks": written.remarks}
    if written.convergence is not None:
        found["convergence"] = convergence_records(written.convergence)
    return found


def _print(rows: list[dict[str, str]], numbers: Sequence[str]) -> None:
    for line in table(list(rows[0]), [list(row.values()) for row in rows], numbers) if rows else ():
        click.echo(line)


@contextmanager
def _terminated() -> Iterator[None]:
    """Take SIGTERM as Ctrl-C, and Ctrl-C also where the shell has it ignored, so that what was made is removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
