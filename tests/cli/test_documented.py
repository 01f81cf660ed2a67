"""The commands that the README and the first guide show: each can be typed as it stands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from convoy.cli.app import convoy_command
from convoy.cli.options import HELP
from convoy.cli.requests import PlanRequest, TrainRequest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/first-run.md")


def blocks(document: str) -> Iterator[str]:
    yield from re.findall(r"^```\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    """Of a block, without comments, redirections and what torchrun is told."""
    joined = re.sub(r"\\\n\s*", "", text)
    for line in re.findall(r"^(?:\$ |torchrun .* -m )?convoy (.*)$", joined, re.MULTILINE):
        yield re.split(r"\s+[#>]", line)[0].strip()


def inside(document: str) -> Iterator[str]:
    """In backquotes, where all of a command stands there."""
    for line in re.findall(r"`convoy ([a-z]+ [^`]*)`", (ROOT / document).read_text(encoding="utf-8")):
        if not re.search(r"^\w+ --", line) and not re.search(r"\b[A-Z]{3,}\b", line):
            yield line


def test_every_command_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = dict.fromkeys(line for document in DOCUMENTS for block in blocks(document) for line in commands(block))
    assert len(lines) > 20
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "holiday", "runs/resnet50-photos"):
        (tmp_path / folder).mkdir(parents=True)
    for line in (*lines, *(line for document in DOCUMENTS for line in inside(document))):
        verb, *arguments = shlex.split(line.replace("…", ""))
        if verb == "doctor" and arguments[0] == "train":
            verb, *arguments = arguments
        command = convoy_command.get_command(click.Context(convoy_command), verb)
        assert command is not None, line
        with command.make_context(verb, list(arguments), obj=arguments, **HELP) as context:
            values = context.params
        if verb == "plan":
            assert PlanRequest(arguments, values).check().model.name, line
        elif verb == "train" and "runs/resnet50-photos" not in arguments:
            assert TrainRequest(arguments, values).recipe_of().data.path, line
