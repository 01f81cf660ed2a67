"""Reads what is to be given to `convoy train` on other hosts as that will, so that a slip is found here and now."""

from collections.abc import Sequence
from typing import Any

from convoy.errors import ConvoyError


def training_arguments(arguments: Sequence[str], devices: int, elastic: bool = False) -> dict[str, Any]:
    """The options of `convoy train` in a command line, by name.

    Args:
        arguments: what comes after `convoy train`.
        devices: ranks that will be started.
        elastic: they may become fewer.

    Raises:
        click.ClickException: `convoy train` would not take them.
        ConvoyError: they say something else than the launcher.
    """
    from convoy.cli.train import command as train

    values = train.make_context("convoy train", list(arguments)).params
    if values["model"] is None and values["recipe"] is None:
        raise ConvoyError("nothing to train: give after -- what convoy train is to be given, e.g. -- lenet --data DIR")
    asked = values["devices"]
    if asked is not None and (elastic or asked != devices):
        raise ConvoyError(f"--devices {asked} contradicts the {devices} ranks that are started: leave it out")
    if values["max_restarts"]:
        raise ConvoyError("--max-restarts after -- is for the ranks of one host: put it before the --")
    return values


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
