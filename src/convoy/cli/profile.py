"""`convoy profile`: what was measured on the devices of this machine, and is kept for the planner."""

import click

from convoy.cli import options


@click.command(
    "profile",
    epilog="""\b
Examples:
  convoy profile
  convoy profile 1
  convoy profile --clear
""",
)
@click.argument("device", required=False)
@click.option("--clear", is_flag=True, help="Forget what was measured: all of it, or that of DEVICE.")
@options.as_json
@options.verbose
def command(device: str | None, clear: bool, as_json: bool) -> None:
    """List the devices of which times are kept, or the measured pieces of DEVICE: its number in the list, or its key.

    What runs have measured counts before what was profiled for a plan. The store is a folder:
    $CONVOY_CACHE/profiles, or convoy/profiles in the user's cache.
    """
    from convoy.cli.profile_answer import answer  # with torch, for which no help is to wait

    answer(device, clear, as_json)
