"""Options that several verbs share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])


def verbose(function: Function) -> Function:
    """`-v`, read by the main function."""
    return click.option("-v", "--verbose", is_flag=True, expose_value=False, help="Show the traceback of an error.")(
        function
    )


def as_json(function: Function) -> Function:
    """`--json`, for verbs that print a table."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(function)


def device(function: Function) -> Function:
    """`--device`."""
    return click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. [default: the first GPU, or the CPU]")(
        function
    )


def run_argument(function: Function) -> Function:
    """The folder of a run, as an argument."""
    return click.argument("run", type=click.Path(path_type=Path))(function)
