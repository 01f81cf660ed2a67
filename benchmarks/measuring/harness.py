"""What the scripts share: sides that take turns, tables, files, and runs of `convoy train` on pictures in memory."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from convoy.errors import ConvoyError
from measuring import machine

T = TypeVar("T")


def names(text: str) -> list[str]:
    """Of an option: words with commas between, or none."""
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    """Of an option: whole numbers with commas between."""
    return [int(number) for number in text.split(",")]


def positive(text: str) -> int:
    """Of an option: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number from 1")
    return int(text)


def some(choices: Collection[str]) -> Callable[[str], list[str]]:
    """Of an option: some of these words, with commas between."""

    def parse(text: str) -> list[str]:
        for name in names(text):
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(choices)}")
        return names(text)

    return parse


def parser(description: str | None) -> argparse.ArgumentParser:
    """One that prints a script's docstring as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


@contextmanager
def ended() -> Iterator[None]:
    """Errors of Convoy end the script with their sentence, and SIGTERM lets hosts and processes be cleaned up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except ConvoyError as error:
        raise SystemExit(f"{error}") from None


def say(text: str) -> None:
    """What is going on, beside the tables."""
    print(f"  {text}", file=sys.stderr, flush=True)


def heading() -> dict[str, Any]:
    """Print, and return, what is measured on and by which command."""
    about = machine.describe()
    print(f"{about['date']}: `{about['command']}`\n\n{machine.sentence(about)}\n", flush=True)
    return about


def row(*cells: object) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(*columns: str) -> str:
    """The first two lines of a Markdown table."""
    return f"{row(*columns)}\n{row(*('---' for _ in columns))}"


def show(*cells: object) -> None:
    """Print a line of a table as soon as it is known."""
    print(row(*cells), flush=True)


def turns(sides: Mapping[str, T], rounds: int) -> Iterator[tuple[int, str, T]]:
    """Every side once a round, every other round in reverse, so that a machine whose speed drifts slows all alike."""
    for number in range(rounds):
        for name in sides if number % 2 == 0 else reversed(list(sides)):
            yield number, name, sides[name]


def seconds_of(run: Callable[[], object]) -> float:
    """Of one call, by the clock."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def save(file: Path | None, document: Any) -> None:
    """As JSON, if a file is asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def write_images(folder: Path, number: int, size: int) -> None:
    """Random grey pictures as files of MNIST's kind, which are kept in memory and need no decoding."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, count in (("train", number), ("t10k", 64)):
        for kind, magic, shape in (("images-idx3", 0x803, (count, size, size)), ("labels-idx1", 0x801, (count,))):
            content = random.integers(256 if magic == 0x803 else 10, size=shape, dtype=np.uint8)
            start = b"".join(part.to_bytes(4, "big") for part in (magic, *shape))
            (folder / f"{split}-{kind}-ubyte").write_bytes(start + content.tobytes())


def run_convoy(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What the command says; a failure ends the benchmark with the command's own words."""
    command = [sys.executable, "-m", "convoy", *arguments]
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"convoy {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
    return done.stdout + done.stderr


def train(
    model: str,
    data: Path,
    out: Path,
    updates: int,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    **keys: Any,
) -> tuple[list[dict[str, Any]], str]:
    """The lines of training in the metrics of a `convoy train` without evaluations and checkpoints, and what it said.

    `keys` are those of the recipe, with `__` for a point.
    """
    settings = {"evaluate_every": "100000ba", "checkpoint__every": "100000ba", "log_every": "1ba", **keys}
    command = ["train", model, "--data", str(data), "--out", str(out), "--epochs", f"{updates}ba", *flags]
    command += [part for key, value in settings.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
    said = run_convoy(*command, environment=environment)
    lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["split"] == "train"], said
