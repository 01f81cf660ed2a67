"""`convoy.train`: the command in a process of its own, as ranks must not inherit a notebook's threads or GPU."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import click

from convoy.cli.app import usage
from convoy.cli.requests import TrainRequest
from convoy.cli.train import command
from convoy.errors import ConvoyError
from convoy.training.restore import TrainedRun, load_run


def train(model: str | None = None, *, settings: Mapping[str, Any] = {}, **options: Any) -> TrainedRun:
    """Train as `convoy train` does, in other processes, and show the progress; the run, as `load_run` gives it.

    >>> run = convoy.train("resnet18", data="photos", devices=2, epochs="5ep", **{"optimizer.lr": 0.1})

    The options are those of `convoy train --help`, with underscores for dashes, and True for one that has no value;
    `settings` are keys of the recipe, as for `--set`, of which those with a dot may stand among the options. A network
    of yours is named: "mine.py:net". Where the command fails, a ConvoyError says why; an interrupt lets it save.
    """
    arguments = _arguments(model, settings, options)
    try:
        request = TrainRequest(arguments, command.make_context("convoy train", arguments[1:]).params)
    except click.ClickException as error:
        raise ConvoyError(usage(error)) from None
    out = request.resolve()[1]
    status, sentence = _run(arguments if request.out else [*arguments, f"--out={out}"])
    if status == 0:
        return load_run(out, trust_code=True)  # which ran already
    if sentence == "interrupted" and any(out.glob("checkpoints/step-*")):
        sentence += f": go on with convoy.train({str(out)!r}, resume=True)"
    raise ConvoyError(sentence)


def _arguments(model: str | None, settings: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    key_of = {name[2:].replace("-", "_"): getattr(known, "key", "") for known in command.params for name in known.opts}
    words, keys = ["train"] if model is None else ["train", str(model)], dict(settings)
    for name, value in {"model": model, **options}.items():
        if callable(value):
            raise ConvoyError(f'{name} is only in this process: write it into a file, and say {name}="mine.py:NAME"')
        key = key_of.get(name) if isinstance(value, bool | list | tuple | dict) else ""
        if key or "." in name:
            keys[key or name] = value
        elif name != "model" and value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"))
    pairs = {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in keys.items()}
    return [*words, *(f"--set={key}={value}" for key, value in pairs.items())]


def _run(arguments: list[str]) -> tuple[int, str]:
    """The command's exit status and its last sentence, `interrupted` where this process was."""
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE}  # a terminal has the bar
    if not sys.stdout.isatty():  # kernels ask for colors, but no notebook moves a cursor
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": os.environ | {"FORCE_COLOR": ""}}
    pipes["start_new_session"] = True  # a kernel's interrupt is for its group, and would come twice
    said, last, width = "", "", 0
    with subprocess.Popen([sys.executable, "-m", "convoy", *arguments], text=True, errors="replace", **pipes) as child:
        while True:
            try:
                for line in filter(None, map(str.rstrip, child.stdout or child.stderr or ())):
                    if line.startswith("convoy: "):
                        said = line.removeprefix("convoy: ")
                        continue
                    over = "ipykernel" in sys.modules and re.search(r"data wait \d+%$|\(\d+ of \d+\)$", line)
                    print("\r" * bool(width) + line.ljust(width), end="" if over else "\n", flush=True)
                    last, width = line, len(line) if over else 0  # which the next line replaces
                return child.wait(), said or last
            except KeyboardInterrupt:
                said = "interrupted"
                child.send_signal(signal.SIGINT)
