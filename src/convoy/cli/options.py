"""Shared by several verbs: options, groups of verbs, tables, the files that options name, and the end by a signal."""

import difflib
import importlib
import json
import re
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import click
from rich.markup import escape
from rich.table import Table

from convoy.errors import ConvoyError
from convoy.files import expanded, finite, unwritable, write_text, writing
from convoy.resources import device_name
from convoy.terminal import Console

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}  # click keeps those of a command's first context


def command_of(arguments: Sequence[str]) -> str:
    """The command line as a run, a plan or a study keeps it."""
    return shlex.join(["convoy", *arguments])


def is_verbose(arguments: Sequence[str]) -> bool:
    """Whether it asks for the traceback of an error."""
    return "-v" in arguments or "--verbose" in arguments


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def sigterm_as_interrupt(stop: Callable[[int, FrameType | None], None] = _interrupt) -> Iterator[None]:
    """Call `stop` on SIGTERM as on Ctrl-C, and on that also where the shell has it ignored, so that what was made is
    removed."""
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class LazyGroup(click.Group):
    """Verbs by name, each with the module whose `command` it is (or `module:function`), and one line on what it
    does."""

    def __init__(self, *args: Any, verbs: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.verbs:
            if not ctx.resilient_parsing and (near := difflib.get_close_matches(name, self.verbs, 1)):
                ctx.fail(f"No such command {name!r}: did you mean {near[0]}?")
            return None
        module, _, function = self.verbs[name][0].partition(":")
        command = getattr(importlib.import_module(module), function or "command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in self.verbs.items()])


def show(
    rows: Sequence[dict[str, Any]],
    as_json: bool = False,
    right: Sequence[str] = (),
    formats: Mapping[str, Callable[[Any], str]] = {},
) -> None:
    """Print rows with equal keys as JSON, or as a table with the keys as headings: columns in `right` are flush right,
    those in `formats` have their values in words, and None is `-`."""
    if as_json:
        click.echo(json.dumps(finite(rows), indent=2, allow_nan=False))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0] if rows else ():
        justify: Literal["left", "right"] = "right" if name in right else "left"
        heading = name.removesuffix("_s").replace("_", " ")  # seconds are said with their unit
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=not table.columns)
    for row in rows:
        table.add_row(*(escape(_in_words(value, formats.get(name))) for name, value in row.items()))
    Console(highlight=False).print(table)


def _in_words(value: Any, format_: Callable[[Any], str] | None) -> str:
    if value is None:
        return "-"
    if format_ is not None:
        return format_(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that could not be written, before the work for it is done."""
    folder = path.parent
    if path.is_dir():
        raise ConvoyError(f"{option} {path} is a folder: name a file in it")
    if not folder.is_dir():
        raise ConvoyError(f"{option} {path} cannot be written: there is no folder {folder}")
    reason = unwritable(folder)
    if reason is not None:
        raise ConvoyError(f"{option} {path} cannot be written ({reason}): choose a folder that is yours to write in")


def written(option: str, path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    with writing(f"{option} {path}", "choose another place"):
        write_text(path, text)


class Verb(click.Command):
    """A verb. In its errors a key of the recipe goes by the name of the option, or of the argument, that has set it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConvoyError as error:
            for option in self.params:
                key, value = getattr(option, "key", ""), ctx.params.get(option.name or "")
                if key and value is not None and not isinstance(value, bool):
                    begin = rf"(?<!--set )(?<![\w.-]){re.escape(key)}"
                    name = option.opts[0] if isinstance(option, click.Option) else option.human_readable_name
                    alone = begin + r"(?!\.?\w)" if "." in key else f"^{key}(?=:| is )"  # not words of the sentence
                    said = re.sub(alone, name, re.sub(f"{begin}=", f"{name} ", error.args[0]))
                    error.args = said, *error.args[1:]
            raise


def verb(
    name: str, examples: str = "", *, verbose: str = "Show the traceback of an error.", **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Makes a function a verb, whose last option is -v, and whose help ends with the lines of `examples`."""
    if examples:
        settings["epilog"] = f"\b\n{'Examples' if examples.count('  convoy ') > 1 else 'Example'}:{examples}"

    def made(function: Callable[..., Any]) -> click.Command:
        command: click.Command = click.command(name, cls=Verb, **settings)(function)
        command.params.append(click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, help=verbose))
        return command

    return made


class OutputPath(click.Path):
    """A file or folder as a person types it, whose `~` is the home folder also where no shell has replaced it."""

    def __init__(self, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(expanded(value), param, ctx)


class DataArgument(click.Argument):
    """The data set that a verb is about."""

    key = "data.path"


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
settings = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="A key of the recipe, as data.train; repeatable."
)
device = click.option(
    "--device",
    metavar="DEVICE",
    callback=lambda context, option, name: name if name is None else device_name(name),
    help="cpu, cuda or cuda:N. [default: the first GPU, or the CPU]",
)
checkpoint = click.option(
    "--checkpoint",
    metavar="best|last|STEP",
    help="Use a checkpoint: the best on the test split, the newest, or of an update. [default: the final weights]",
)
trust_code = click.option(
    "--trust-code", is_flag=True, help="Run the code that RUN or FILE names as its network, wherever it lies."
)
run_argument = click.argument("run", type=OutputPath())
