"""`convoy launch hosts`: the command to start on each of several hosts."""

import click


@click.command("hosts")
def command() -> int:
    """Print the command to start on each host."""
    raise NotImplementedError
