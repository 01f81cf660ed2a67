"""Whatever is typed as a plan, a recipe or a change to one: it is taken, or refused in one short sentence."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from convoy.cli.app import main
from convoy.errors import ConvoyError
from convoy.plans.fixes import parse_fix
from convoy.plans.plan import Plan
from convoy.training.recipe import Recipe, check_names, load_recipe
from convoy.training.schema import all_keys

LONGEST = 1_000
"""Characters of a sentence about what was typed, however long that was."""
WORDS = [
    "sample",
    "filter",
    "channel",
    "height",
    "width",
    "replicate",
    "owt",
    "serial",
    "auto",
    "mesh",
    "layers",
    "conv",
]
WORDS += [
    "fc1",
    "*",
    "features.*",
    "~",
    "~x",
    "~root",
    "sgd",
    "adamw",
    "cosine",
    "null",
    "true",
    "false",
    ".nan",
    ".inf",
]
WORDS += ["1e999", "-1", "0", "2", "3.5", "07", "90ep", "10ba", "5%", "2d", "lenet", "timm:", "os:system", "a.b:c"]
MARKS = [
    *"=,:;{}[]()\"'&*!|>%@`#~?/\\.-+ \t\n\r\x00\x1b\x7f\u202e\udcff\ufeffé图",
    "~x/",
    "../",
    "- ",
    ": ",
    "${",
    "<<",
]
KEYS = ["", ".", "..", "model.name.x", *all_keys(Recipe)]
VALID = """mesh: {sample: 2, filter: 2}
layers:
  conv*: {sample: sample}
  '*': {sample: sample, filter: filter}
"""


def text(draw: random.Random, longest: int = 12) -> str:
    """Words and marks in any order, now and then one of them very often."""
    parts = [draw.choice(draw.choice((WORDS, MARKS))) for _ in range(draw.randrange(longest))]
    if draw.random() < 0.05:
        parts.insert(0, draw.choice([*WORDS, *MARKS, "x"]) * draw.choice((300, 5_000)))
    return "".join(parts)


def broken(draw: random.Random, good: str) -> str:
    """Something right with a few places changed."""
    letters = list(good)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(letters) + 1)
        letters[at : at + draw.randrange(3)] = text(draw, 3)
    return "".join(letters)


def change(draw: random.Random) -> str:
    key = draw.choice(KEYS) if draw.random() < 0.8 else text(draw, 4)
    return f"{key}{draw.choice(('=', '=', '=', ''))}{text(draw, 4)}"


def attempts(draw: random.Random, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is tried, by its text."""
    line = draw.choice((text(draw), broken(draw, "sample=2,filter=2")))
    yield line, lambda: Plan.parse(line, 2)
    document = broken(draw, VALID)
    yield document, lambda: Plan.parse(document)
    file = folder / "file.yaml"
    file.write_bytes(document.encode("utf-8", "surrogatepass"))
    yield f"file {document!r}", lambda: Plan.parse(str(file))
    fix = draw.choice((text(draw), broken(draw, "classifier.*=filter")))
    yield fix, lambda: parse_fix(fix)
    changes = [change(draw) for _ in range(draw.randrange(1, 3))]
    yield (
        str(changes),
        lambda: check_names(load_recipe("default", ["model.name=lenet", "data.path=mnist-mini", *changes])),
    )
    name = text(draw, 5)
    yield name, lambda: load_recipe(name, ["data.path=mnist-mini"])
    recipe = broken(draw, "model: {name: lenet}\noptimizer: {name: sgd, lr: 0.1}\nepochs: 3ep\nbatch: 32\n")
    other = folder / "recipe.yaml"
    other.write_bytes(recipe.encode("utf-8", "surrogatepass"))
    yield f"recipe {recipe!r}", lambda: load_recipe(str(other), ["data.path=mnist-mini"])


@pytest.mark.parametrize("seed", range(int(os.environ.get("CONVOY_FUZZ", "100"))))
def test_whatever_is_typed_is_taken_or_refused_in_a_sentence(seed: int, tmp_path: Path) -> None:
    """CONVOY_FUZZ=1000 tries more."""
    for typed, attempt in attempts(random.Random(seed), tmp_path):
        try:
            attempt()
        except ConvoyError as error:
            assert 0 < len(str(error)) <= LONGEST, typed
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} for {typed!r}") from error


LONG = "x" * 5_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", LONG, "--data", "mnist-mini"],
        ["train", "lenet", "--data", LONG],
        ["train", "lenet", "--data", "mnist-mini", "--plan", f"{LONG}=2"],
        ["train", "lenet", "--data", "mnist-mini", "--plan", f"sample=2,{LONG}"],
        ["train", "lenet", "--data", "mnist-mini", "--recipe", LONG],
        ["train", "lenet", "--data", "mnist-mini", "--set", LONG],
        ["train", "lenet", "--data", "mnist-mini", "--set", f"{LONG}=1"],
        ["train", "lenet", "--data", "mnist-mini", "--set", f"batch={'x ' * 5_000}"],
        ["train", "lenet", "--data", "mnist-mini", "--weights", LONG],
        ["train", "lenet", "--data", "mnist-mini", "--out", f"{LONG}/y"],
        ["train", "lenet", "--data", "mnist-mini", f"--{LONG}"],
        ["plan", "lenet", "--fix", LONG],
        ["plan", "lenet", "--link", LONG],
        ["plan", "lenet", "--memory-limit", LONG],
        ["bench", "lenet", "--devices", LONG],
        ["bench", "lenet", "--plans", LONG],
        ["eval", LONG],
        [LONG],
    ],
)
def test_what_is_long_is_not_repeated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert 0 < len(said) <= LONGEST and said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "lenet", "--data", "~no-such-user/x"],
        ["train", "lenet", "--data", "mnist-mini", "--plan", "~no-such-user/x"],
        ["train", "lenet", "--data", "mnist-mini", "--plan", "~no-such-user.yaml"],
        ["train", "lenet", "--data", "mnist-mini", "--recipe", "~no-such-user/x"],
        ["train", "lenet", "--data", "mnist-mini", "--weights", "~no-such-user/x"],
        ["train", "lenet", "--data", "mnist-mini", "--out", "~no-such-user/x"],
        ["plan", "lenet", "--score", "~no-such-user/x"],
        ["plan", "lenet", "--out", "~no-such-user/x"],
        ["bench", "lenet", "--emulate", "~no-such-user/x"],
        ["eval", "~no-such-user/x"],
    ],
)
def test_a_home_of_nobody_is_a_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "there is no such user: write the path in full" in capsys.readouterr().err


def test_without_a_home_a_path_has_to_be_written_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 123_456_789)
    assert main(["train", "lenet", "--data", "~/x"]) == 2
    assert "HOME is not set" in capsys.readouterr().err
