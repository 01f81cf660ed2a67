"""The arguments of `convoy train` in a pod: the user's, and those without which a restarted pod would begin anew."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from convoy.errors import ConvoyError
from convoy.launch.kubernetes.names import label_of
from convoy.launch.kubernetes.training import DATA_PATH, RUN_PATH


def complete(
    arguments: Sequence[str],
    said: Mapping[str, Any],
    name: str,
    num_devices: int,
    elastic: bool = False,
    data_claim: bool = True,
) -> tuple[str, ...]:
    """Arguments with `--out /runs/NAME` and `--resume`, where they lack them.

    Args:
        arguments: what the user wrote after `--`.
        said: the options that it says, by name, as far as they are `out`, `data`, `devices` and `resume`.
        name: of the job.
        num_devices: of the whole job, which `--devices` must not contradict.
        elastic: whether it may run on fewer, so that no number is right.
        data_claim: whether there is anything at `/data`.

    Raises:
        ConvoyError: there are none, the run would be written where it is lost, the data are on no volume, or
            `--devices` says another number.
    """
    if not arguments:
        raise ConvoyError("nothing to train: write -- and what convoy train would be given, e.g. -- resnet50")
    out, data, devices = (said.get(option) for option in ("out", "data", "devices"))
    if devices is not None and elastic:
        raise ConvoyError(f"--devices {devices} contradicts --min-nodes, which lets the number change: leave it away")
    if devices is not None and devices != num_devices:
        raise ConvoyError(
            f"--devices {devices} contradicts --nodes and --devices-per-node, which make {num_devices}: leave it away"
        )
    if out is not None and not _below(str(out), RUN_PATH):
        raise ConvoyError(
            f"--out {out} would be lost with the pod: name a folder below {RUN_PATH}, where --run-claim is mounted"
        )
    if data is not None and _below(data, DATA_PATH, itself=True) and not data_claim:
        raise ConvoyError(f"--data {data} is on no volume: give the claim that has it by --data-claim")
    added = [] if out is not None else ["--out", f"{RUN_PATH}/{name}"]
    if not said.get("resume"):
        added.append("--resume")
    return (*arguments, *added)


def name_for(model: str | None, recipe: str | None) -> str:
    """A name for the job, made from that of the model or the recipe."""
    return label_of(model or recipe or "convoy")


def _below(path: str, folder: str, itself: bool = False) -> bool:
    place, root = PurePosixPath(path), PurePosixPath(folder)
    return ".." not in place.parts and root in (*place.parents, *([place] if itself else []))
