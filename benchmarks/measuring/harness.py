"""What the programs share: options, what is measured on, sides in turn, tables and files, runs of `convoy train`."""

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from convoy.bench.processes import RankFailed
from convoy.bench.study import machine_facts
from convoy.errors import ConvoyError

T = TypeVar("T")
CPU = torch.device("cpu")
CONVOY = (sys.executable, "-m", "convoy")


def numbers(text: str, kind: Callable[[str], Any] = int) -> list[Any]:
    """Of an option: numbers with commas between."""
    return [kind(number) for number in text.split(",")]


def some(choices: Collection[str]) -> Callable[[str], list[str]]:
    """Of an option: some of these words, with commas between, or none."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(choices)}")
        return names

    return parse


def parser(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """One that prints a program's docstring as it is; of a program whose sides take turns for some rounds."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, metavar="FILE", help="for JSON; what is printed goes beside it as Markdown")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help=f"in which the sides take turns ({rounds})")
    return made


def choice(made: argparse.ArgumentParser, name: str, choices: Collection[str], default: Collection[str]) -> None:
    """An option that takes some of these words."""
    help = f"of {', '.join(choices)}; with commas".replace("%", "%%")
    made.add_argument(name, type=some(choices), default=list(default), help=help)


class Report:
    """What a program prints, line by line as it is known; kept where a file is asked for, with a document as JSON."""

    def __init__(self, out: Path | None) -> None:
        self.machine = describe()  # what it runs on, for more that is to be known of it
        self.document: dict[str, Any] = {"machine": self.machine}
        self._out, self._lines = out, list[str]()
        machine = ", ".join(f"{key} {value}" for key, value in machine_facts(CPU).items())
        self.print(f"{self.machine['date']}: `{self.machine['command']}`\n\n{machine}\n")

    def print(self, text: str) -> None:
        """A line or a table."""
        print(text, flush=True)
        self._lines.append(text)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.document, indent=1, default=str)
            self._out.write_text(f"{text}\n", encoding="utf-8")
            self._out.with_suffix(".md").write_text("\n".join(self._lines) + "\n", encoding="utf-8")

    def header(self, *columns: str) -> None:
        """The first two lines of a table."""
        self.row(*columns)
        self.row(*("---" for _ in columns))

    def row(self, *cells: object, **values: Any) -> None:
        """A line of a table, and what the document has in it."""
        if values:
            self.document.setdefault("rows", []).append(values)
        self.print(f"| {' | '.join(map(str, cells))} |")


@contextmanager
def report(out: Path | None) -> Iterator[Report]:
    """Errors end the program with their sentence, and SIGTERM lets hosts and processes be cleaned up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield Report(out)
    except (ConvoyError, RankFailed) as error:
        raise SystemExit(f"{error}") from None


def say(text: str) -> None:
    """What is going on, beside the tables."""
    print(f"  {text}", file=sys.stderr, flush=True)


def describe() -> dict[str, Any]:
    """Processor, cores, load, versions, command and date."""
    facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(["python", *sys.argv])}
    load, system = round(os.getloadavg()[0], 2), f"{platform.system()} {platform.release()}"
    return {**facts, **machine_facts(CPU), "load_before": load, "system": system}


def turns(sides: Mapping[str, T], rounds: int) -> Iterator[tuple[int, str, T]]:
    """Every side once a round, every other round in reverse, so that a machine whose speed drifts slows all alike."""
    for number in range(rounds):
        for name in sides if number % 2 == 0 else reversed(list(sides)):
            yield number, name, sides[name]


def in_turn(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What the sides give, each in its rounds."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _, name, side in turns(sides, rounds):
        found[name].append(side())
    return found


def seconds_of(run: Callable[[], object]) -> float:
    """Of one call, by the clock."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def spread(values: Sequence[float], digits: int = 1) -> tuple[str, str]:
    """The median, and from where to where."""
    low, middle, high = (f"{of(values):,.{digits}f}" for of in (min, statistics.median, max))
    return middle, f"{low}–{high}"


@contextmanager
def beside(code: str, *arguments: object) -> Iterator[None]:
    """A Python program of its own, as long as the context lasts."""
    command = (sys.executable, "-I", "-S", "-c", code, *map(str, arguments))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


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
    command, variables = [*CONVOY, *arguments], {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"convoy {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
    return done.stdout + done.stderr


def train(
    model: str, data: Path, out: Path, updates: int, *flags: str, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The lines of training in the metrics of a `convoy train` without evaluations and checkpoints."""
    command = ["train", model, "--data", str(data), "--out", str(out), "--epochs", f"{updates}ba"]
    command += ["--set", "evaluate_every=100000ba", "--set", "checkpoint.every=100000ba"]
    run_convoy(*command, *flags, environment=environment)
    return lines_of(out)


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The lines of training in the metrics of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["split"] == "train"]
