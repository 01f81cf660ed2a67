"""The command line as it was given."""

import shlex
from collections.abc import Sequence


def command_of(arguments: Sequence[str]) -> str:
    """The command line as a run, a plan or a study keeps it."""
    return shlex.join(["convoy", *arguments])


def is_verbose(arguments: Sequence[str]) -> bool:
    """Whether it asks for the traceback of an error."""
    return "-v" in arguments or "--verbose" in arguments
