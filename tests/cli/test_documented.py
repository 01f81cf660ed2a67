"""The commands that the README and the first guide show: each can be typed as it stands, and the README says what it
takes."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from convoy.cli.app import VERBS
from convoy.cli.requests import PlanRequest, TrainRequest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/first-run.md")
EXPENSIVE = ("bench", "doctor", "plan", "train")


def blocks(document: str) -> Iterator[str]:
    yield from re.findall(r"^```\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    """Of a block, or in a table's backquotes; without comments, redirections and what torchrun is told."""
    joined = re.sub(r"\\\n\s*", "", text)
    for line in re.findall(r"^(?:\$ |torchrun .* -m )?convoy (.*)$", joined, re.MULTILINE):
        yield re.split(r"\s+[#>]", line)[0].strip()


LINES = list(dict.fromkeys(line for document in DOCUMENTS for block in blocks(document) for line in commands(block)))
INSIDE = [
    line
    for document in DOCUMENTS
    for line in re.findall(r"`convoy ([a-z]+ [^`]*)`", (ROOT / document).read_text(encoding="utf-8"))
]
INSIDE = [line for line in INSIDE if not re.search(r"^\w+ --", line) and not re.search(r"\b[A-Z]{3,}\b", line)]


def test_there_are_commands() -> None:
    assert len(LINES) > 20
    assert {line.split()[0] for line in LINES} <= set(VERBS)


@pytest.mark.parametrize("line", [*LINES, *dict.fromkeys(INSIDE)])
def test_a_command_is_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "holiday", "runs/resnet50-photos"):
        (tmp_path / folder).mkdir(parents=True)
    verb, *arguments = shlex.split(line.replace("…", ""))
    command: click.Command = importlib.import_module(VERBS[verb][0]).command
    if verb == "doctor" and arguments[0] == "train":
        command, verb = importlib.import_module(VERBS["train"][0]).command, "train"
        arguments = arguments[1:]
    with command.make_context(verb, list(arguments), obj=arguments) as context:
        values = context.params
    if verb == "plan":
        plan = PlanRequest.of(arguments, values)
        plan.check()
        assert plan.recipe_of().model.name
    elif verb == "train" and "runs/resnet50-photos" not in arguments:
        assert TrainRequest.of(arguments, values).recipe_of().data.path


def test_the_readme_says_what_each_of_its_expensive_commands_takes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    table = {command: (takes, memory) for command, takes, memory in rows}
    block = next(block for block in blocks("README.md") if "convoy train resnet18" in block)
    wanted = [line for line in commands(block) if line.split()[0] in EXPENSIVE]
    missing = [line for line in wanted if not any(line.startswith(command) for command in table)]
    assert not missing
    assert all(
        "B" in memory or "run" in memory for command, (_, memory) in table.items() if command.split()[0] in EXPENSIVE
    )
