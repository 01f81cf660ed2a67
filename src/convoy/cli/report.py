"""`convoy report`: the report of a run or of a scaling study, made again."""

from pathlib import Path

import click

from convoy.cli import options
from convoy.training.run_directory import RunDirectory


@click.command(
    "report",
    epilog="""\b
Examples:
  convoy report runs/first
  convoy report runs/bench-resnet18
""",
)
@options.run_argument
@options.verbose
def command(run: Path) -> None:
    """Write report.html for the run directory RUN, or the folder of a scaling study, as far as it has come."""
    if (run / "bench.json").exists():
        from convoy.bench.page import write_files

        click.echo(f"report: {write_files(run).report}")
        return
    RunDirectory(run).check_run()
    from convoy.report.report import write_report  # with matplotlib, for which no mistake is to wait

    click.echo(f"report: {write_report(run)}")
