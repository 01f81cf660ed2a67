"""Reads what is to be given to `convoy train` on other hosts as that will, so that a slip is found here and now."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convoy.cli.train import KEYS
from convoy.cli.train import command as train
from convoy.errors import ConvoyError


def training_arguments(arguments: Sequence[str], devices: int, elastic: bool = False) -> dict[str, Any]:
    """The options of `convoy train` in a command line, by name; a run that is gone on with is in `out`, not `model`.

    Args:
        arguments: what comes after `convoy train`.
        devices: ranks that will be started.
        elastic: they may become fewer.

    Raises:
        click.ClickException: `convoy train` would not take them.
        ConvoyError: they say something else than the launcher, or no recipe or network that there is.
    """
    values = parsed(arguments)
    if values["model"] is None and values["recipe"] is None and not values["resume"]:
        raise ConvoyError("nothing to train: give after -- what convoy train is to be given, e.g. -- lenet --data DIR")
    asked = values["devices"]
    if asked is not None and (elastic or asked != devices):
        raise ConvoyError(f"--devices {asked} contradicts the {devices} ranks that are started: leave it out")
    if values["max_restarts"]:
        raise ConvoyError("--max-restarts after -- is for the ranks of one host: put it before the --")
    return values | check_recipe(arguments)


def check_recipe(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the recipe as `convoy train` will, without the data; not a file `/…` that only the other hosts have.

    Returns:
        The network's name, and the run that is gone on with, or that is to be: `model` and `out`.

    Raises:
        click.ClickException: `convoy train` would not take the options.
        ConvoyError: there is no such recipe, key, network or run.
    """
    from convoy.cli.train_request import Request
    from convoy.models.registry import check_name

    values = parsed(arguments)
    overrides = [f"{key}={values[name]}" for name, key in KEYS.items() if values[name] is not None]
    asked = {name: values[name] for name in ("model", "recipe", "out", "resume", "device")}
    request = Request(arguments, overrides=[*overrides, *values["settings"]], **asked)
    if request.recipe is None or not Path(request.recipe).is_absolute() or Path(request.recipe).exists():
        check_name(request.recipe_of().model.name, here=False)
    return {"model": request.model, "out": request.out}


def without_model(arguments: Sequence[str]) -> list[str]:
    """Arguments without MODEL, which may stand anywhere and say the same as the value of an option."""
    values, given = parsed(arguments), list(arguments)
    for number, argument in enumerate(given):
        shorter = [*given[:number], *given[number + 1 :]]
        if argument == values["model"] and parsed(shorter) == values | {"model": None}:
            return shorter
    return given


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """What `convoy train` would be told by some arguments, by the names of its options; `model` is MODEL.

    Raises:
        click.ClickException: it would not take them.
    """
    return train.make_context("convoy train", list(arguments)).params


def without(arguments: Sequence[str], *options: str, flags: Sequence[str] = ()) -> list[str]:
    """Arguments without some options, whose values follow them or an equals sign, and without some flags."""
    left, skip = [], False
    for argument in arguments:
        if skip or argument in flags:
            skip = False
        elif argument in options:
            skip = True
        elif argument.partition("=")[0] not in options:
            left.append(argument)
    return left
