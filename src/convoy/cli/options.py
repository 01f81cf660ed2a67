"""Options that several verbs share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from convoy.files import expanded

Function = TypeVar("Function", bound=Callable[..., Any])


class Place(click.Path):
    """A file or folder as a person types it, whose `~` is the home folder also where no shell has replaced it."""

    def __init__(self, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See base class."""
        return super().convert(expanded(value), param, ctx)


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
    return click.argument("run", type=Place())(function)


def parallel(function: Function) -> Function:
    """Devices and plan."""
    for option in reversed(
        (
            click.option(
                "--devices", metavar="N", type=int, help="Train on so many devices. [default: those of --plan, or 1]"
            ),
            click.option(
                "--plan", metavar="TEXT|FILE", help="How they divide the work, e.g. sample=4. [default: sample=N]"
            ),
            click.option(
                "--shares",
                metavar="A,B,…",
                callback=shares,
                help="Parts of the batch for unequal devices, e.g. 3,3,2, or auto to measure. [default: even]",
            ),
            click.option(
                "--cores-per-device", metavar="N", type=int, help="CPU cores of each. [default: its share of all]"
            ),
            click.option(
                "--gradient-compression", metavar="TYPE", help="Approximate: send gradients as bf16. [default: exact]"
            ),
            click.option(
                "--local-sgd", metavar="H", type=int, help="Approximate: average the weights every H updates."
            ),
        )
    ):
        function = option(function)
    return function


def shares(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """`3,3,2` as YAML: the callback of `--shares`.

    Raises:
        click.BadParameter: these are no numbers.
    """
    if text is None or text == "auto":
        return text
    numbers = text.removeprefix("[").removesuffix("]")
    try:
        list(map(float, numbers.split(",")))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is neither numbers, such as 3,3,2, nor auto.") from error
    return f"[{numbers}]"
