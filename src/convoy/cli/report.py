"""`convoy report`: the report of a run, made again."""

from pathlib import Path

import click

from convoy.cli import options
from convoy.experiments import write_report


@click.command("report", epilog="\b\nExample:\n  convoy report runs/first\n")
@options.run_argument
@options.verbose
def command(run: Path) -> None:
    """Write report.html for the run directory RUN, as far as the run has come."""
    click.echo(f"report: {write_report(run)}")
