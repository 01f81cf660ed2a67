"""`convoy launch hosts`: the command to start on each of several hosts."""

import json
import secrets
from typing import Any

import click

from convoy.cli import options
from convoy.cli.launch_arguments import training_arguments
from convoy.launch.hosts import Group, Host


@click.command(
    "hosts",
    epilog="""\b
Examples:
  convoy launch hosts node1:4,node2:4 -- resnet50 --data /data/imagenet --recipe imagenet-90
  convoy launch hosts --devices-per-host 8 --interface eth1 --min-hosts 2 --max-restarts 9 \\
      node1,node2,node3 -- resnet50 --data /data/imagenet --out runs/resnet50
""",
)
@click.argument("hosts")
@click.argument("arguments", metavar="-- TRAIN...", nargs=-1, type=click.UNPROCESSED)
@click.option("--devices-per-host", metavar="N", type=int, help="Of hosts without :N, so many ranks.")
@click.option("--interface", metavar="NAME", help="Talk through it, e.g. eth1. [default: on the way to the first host]")
@click.option("--port", type=int, default=29_400, show_default=True, help="Where they meet, on the first host.")
@click.option("--min-hosts", metavar="N", type=int, help="Begin, and go on, with so many. [default: all]")
@click.option("--max-restarts", metavar="N", type=int, default=0, show_default=True, help="After failures of ranks.")
@click.option(
    "--rendezvous",
    type=click.Choice(["convoy", "c10d", "static"]),
    default="convoy",
    show_default=True,
    help="convoy is torch's c10d, listening on one address only.",
)
@options.as_json
@options.verbose
def command(hosts: str, arguments: tuple[str, ...], devices_per_host: int | None, as_json: bool, **values: Any) -> int:
    """Print the command that each of HOSTS is to start to train together.

    HOSTS are names or addresses, as in node1:4,node2:4. The first one is where they meet. What comes after -- is what
    convoy train would be given.
    """
    values["least"] = values.pop("min_hosts")
    group = Group(Host.parse(hosts, devices_per_host), f"convoy-{secrets.token_hex(4)}", **values)
    devices = sum(host.devices for host in group.hosts)
    training_arguments(arguments, devices, elastic=group.least not in (None, len(group.hosts)))
    commands = group.commands(arguments)
    if as_json:
        records = [
            {
                "host": one.host.name,
                "devices": one.host.devices,
                "environment": one.environment,
                "arguments": one.arguments,
                "command": str(one),
            }
            for one in commands
        ]
        click.echo(json.dumps(records, indent=2))
        return 0
    for one in commands:
        click.echo(f"# {one.host.name}, {one.host.devices} device{'s' if one.host.devices > 1 else ''}")
        click.echo(str(one))
    click.echo(
        "start each on its host: the data are to be under one path, and the run directory on a file system of all; "
        "for a network of your own in the folder of its file (docs/hosts.md)",
        err=True,
    )
    return 0
