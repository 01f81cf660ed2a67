"""`convoy trials` and `convoy folds`: many short trainings, one a device, and what they say together."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from convoy.cli import keys, options
from convoy.cli.bench import study
from convoy.cli.requests import TrainRequest
from convoy.cli.train import command as train
from convoy.errors import ConvoyError
from convoy.terminal import pip_install, waiting_for

_NAMED = ("recipe", "trust_code", "settings", "device")
_OF_BOTH = [
    click.Argument(["model"], required=False),
    click.Option(["--devices"], metavar="N", type=click.IntRange(min=1), help="Devices in all. [default: all here]"),
    click.Option(["--out"], type=options.OutputPath(), help="Folder of the study. [default: runs/VERB-MODEL]"),
    click.Option(["--json", "as_json"], is_flag=True, help="Print JSON instead of a table."),
    *(one for one in train.params if one.name in _NAMED or (isinstance(one, keys.KeyOption) and one.name != "devices")),
]


@options.verb(
    "trials",
    params=[one for one in _OF_BOTH if one.name != "epochs"],
    epilog="Example: convoy trials resnet18 --data photos/ --over optimizer.lr=0.01..1:log --budget 20x5ep",
)
@click.option("--over", metavar="KEY=VALUES", multiple=True, required=True, help="LO..HI, LO..HI:log or a,b,c.")
@click.option("--budget", metavar="NxLENGTH", required=True, help="Trials and the length of each, e.g. 20x5ep.")
@click.pass_obj
def trials(arguments: Sequence[str], /, over: Sequence[str], budget: str, **values: Any) -> int:
    """Try values of the recipe in short trainings of MODEL, one a device, and say which are best.

    Optuna's TPE chooses by the trials that have ended, and their metric of --best on a validation split. Stopped, the
    same command goes on; a larger budget adds trials; several hosts that share --out take different ones.
    """
    form = re.fullmatch(r"([1-9]\d{0,5})x(.+)", budget)
    if form is None:
        raise ConvoyError(f"--budget {budget} is no number of trials and their length: write e.g. 20x5ep")
    if importlib.util.find_spec("optuna") is None:
        raise ConvoyError(f"convoy trials needs optuna, which is not installed: {pip_install('trials')}")
    return _run(arguments, "trials", sorted(over), int(form[1]), [f"epochs={form[2]}"], values)


@options.verb(
    "folds",
    params=[click.Argument(["number"], metavar="K", type=click.IntRange(min=2)), *_OF_BOTH],
    epilog="Example: convoy folds 5 resnet18 --data photos/ --devices 2",
)
@click.pass_obj
def folds(arguments: Sequence[str], /, number: int, **values: Any) -> int:
    """Train MODEL K times, each time without one of K parts of the training samples, and evaluate it on that part.

    The parts are stratified, by data.split_seed; the test split is not looked at. The score is the metric of --best at
    the end. Trainings run one a device; stopped, the same command goes on.
    """
    return _run(arguments, "folds", [], number, [], values)


def _run(arguments: Sequence[str], verb: str, overs: list[str], number: int, length: list[str], values: Any) -> int:
    settings = [*values.pop("overrides", ()), *values.pop("settings"), *length]
    fixed = {**values, "resume": False, "extend": None, "out": None}

    def request(changes: Mapping[str, Any]) -> TrainRequest:
        texts = [f"{key}={value}" for key, value in changes.items()]
        return TrainRequest(arguments, fixed | {"settings": [*settings, *texts]})

    request({}).check()
    recipe = request({}).recipe_of()
    if verb == "folds" and recipe.stop_after is not None:
        raise ConvoyError("stop_after would end a fold by the part that it is measured on: set epochs instead")
    with waiting_for("loading PyTorch"):
        from convoy.bench.trials import train_trials
        from convoy.bench.trials_page import write_trials

    folder = values["out"] or Path("runs") / re.sub("[:/]", "-", f"{verb}-{recipe.model.name}")
    load, on = lambda changes: request(changes).recipe_of(), (values["devices"], values["device"])
    work = partial(train_trials, folder, overs, number, load, options.command_of(arguments), on)
    return study(work, write_trials, folder, values["as_json"], most=11)
