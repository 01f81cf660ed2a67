"""`convoy profile`: the measured times that are kept for the planner."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from convoy.cli import options
from convoy.errors import ConvoyError
from convoy.units import plural, seconds

if TYPE_CHECKING:
    from convoy.planner.store import Device, ProfileStore


@options.verb(
    "profile",
    """
  convoy profile
  convoy profile 1
  convoy profile --clear
  convoy profile --export mine.yaml
""",
)
@click.argument("device", required=False)
@click.option("--clear", is_flag=True, help="Forget what was measured: all of it, or that of DEVICE.")
@click.option(
    "--export",
    metavar="FILE",
    type=options.OutputPath(),
    help="Measure this device, for --catalog of convoy plan --on.",
)
@options.as_json
def command(device: str | None, clear: bool, export: Path | None, as_json: bool) -> None:
    """List the devices of which times are kept, or the measured pieces of DEVICE: its number in the list, or its key.

    What runs have measured counts before what was profiled for a plan. The store is a folder:
    $CONVOY_CACHE/profiles, or convoy/profiles in the user's cache.
    """
    if export is not None:
        _export(export, device)
        return
    from convoy.planner.store import ProfileStore  # with torch, for which no help is to wait

    store = ProfileStore()
    chosen = _find(store, device) if device is not None else None
    if clear:
        try:
            number = store.clear(chosen)
        except OSError as error:
            raise ConvoyError(f"{store.path} cannot be cleared ({error.strerror}): check who owns it") from error
        if as_json:
            options.show([{"cleared": number}], as_json)
        else:
            click.echo(f"forgot {number} device{'' if number == 1 else 's'}")
    elif chosen is not None:
        _show_pieces(store, chosen, as_json)
    else:
        _show_devices(store, as_json)


def _export(path: Path, device: str | None) -> None:
    """Measure a device as torch names it, and write it as a device of a catalog."""
    options.check_writable("--export", path)
    import torch

    from convoy.hardware.speed import measure_device
    from convoy.training import choose_device

    chosen = choose_device(device)
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"cpu-{torch.get_num_threads()}"
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    written = yaml.safe_dump({name: measure_device(chosen)}, sort_keys=False)
    options.written("--export", path, written)
    click.echo(f"{path}: {name}, for convoy plan MODEL --on 8x{name} --catalog {path}")


def _find(store: "ProfileStore", name: str) -> "Device":
    devices = store.devices()
    if name.isdecimal() and 1 <= int(name) <= len(devices):
        return devices[int(name) - 1]
    matches = [device for device in devices if name.lower() in f"{device.key} {device.name}".lower()]
    if len(matches) == 1:
        return matches[0]
    if not devices:
        raise ConvoyError(f"nothing is kept in {store.path}: convoy plan and --plan auto fill it")
    if matches:
        raise ConvoyError(f"{name!r} may be {len(matches)} devices: give the number or the whole key (convoy profile)")
    raise ConvoyError(f"no device is called {name!r}: convoy profile lists the {len(devices)} there are, by number")


def _show_devices(store: "ProfileStore", as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "no": number,
            "device": device.describe(),
            "pieces": len(pieces := store.rows(device)),
            "from_runs": sum(piece.source == "run" for piece in pieces),
            "measured": max((piece.measured for piece in pieces), default=None),
            "key": device.key,
        }
        for number, device in enumerate(store.devices(), 1)
    ]
    if not rows and not as_json:
        click.echo(f"nothing is kept in {store.path}: convoy plan and --plan auto fill it")
        return
    options.show(rows, as_json, right=("no", "pieces", "from_runs"), formats={"measured": _ago})
    if not as_json:
        click.echo(f"in {store.path}")


def _show_pieces(store: "ProfileStore", device: "Device", as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"piece": row.local_op.describe()}
        | ({"key": row.local_op.key, "op": row.local_op.op} if as_json else {})
        | {"forward_s": row.times.forward, "backward_s": row.times.backward}
        | {"source": row.source, "measured": row.measured}
        for row in sorted(store.rows(device), key=lambda row: -row.times.total)
    ]
    if not as_json:
        click.echo(device.describe())
        if not rows:
            click.echo("no pieces were measured")
            return
    formats = {"forward_s": seconds, "backward_s": seconds, "measured": _ago}
    options.show(rows, as_json, right=("forward_s", "backward_s"), formats=formats)


def _ago(moment: float) -> str:
    """How long since: `3 minutes ago`."""
    passed = time.time() - moment
    for size, word in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if passed >= size:
            return f"{plural(int(passed // size), word)} ago"
    return "just now"
