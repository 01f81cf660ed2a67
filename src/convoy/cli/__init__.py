"""The command line: `convoy VERB …`."""

from convoy.cli.app import main

__all__ = ["main"]
