"""What the checkpoints of a run have cost it, for its summary."""

from dataclasses import asdict, dataclass
from typing import Any

from convoy.training.config.timespan import in_words


@dataclass
class Tally:
    """Over all of a run, on rank 0.

    Attributes:
        written: checkpoints.
        failed: those that could not be written.
        waited_s: seconds in which the run waited: while its state was copied, and for one that was not yet on disk.
        longest_wait_s: the longest of them at once.
    """

    written: int = 0
    failed: int = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0

    def at_once(self, seconds: float) -> None:
        """The run waited so long without a break."""
        self.longest_wait_s = max(self.longest_wait_s, seconds)

    def as_dict(self) -> dict[str, Any]:
        """For the summary, and for `Tally(**values)`."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.written:,} checkpoint{'' if self.written == 1 else 's'} written; the run waited "
            f"{in_words(self.waited_s)} for them in all, {in_words(self.longest_wait_s)} at most"
        )
