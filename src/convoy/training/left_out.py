"""Updates that are left out because loss or gradient is not finite: counted, told of, and not without end."""

from collections.abc import Callable

from convoy.errors import ConvoyError
from convoy.training.failures.finite import ADVICE, Bad
from convoy.training.summary import Progress

GIVE_UP = 20
"""Updates left out in a row after which the run ends."""
TOLD = 5
"""Updates that were left out, of which something is said."""


class LeftOut:
    """Knows how many there were in a row; all of them are counted in the run's progress.

    Args:
        tell: takes a sentence that stays with the run.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._in_a_row = 0

    def made(self) -> None:
        """An update was made."""
        self._in_a_row = 0

    def add(self, bad: Bad, progress: Progress) -> None:
        """An update was not made.

        Raises:
            ConvoyError: there were too many in a row.
        """
        progress.left_out += 1
        self._in_a_row += 1
        if self._in_a_row == GIVE_UP:
            raise ConvoyError(f"{bad}: the {GIVE_UP}th in a row to be left out: {ADVICE}")
        if progress.left_out <= TOLD:
            last = "; others are only counted" if progress.left_out == TOLD else ""
            self._tell(f"{bad}: left out, with {progress.left_out} so far{last}")
