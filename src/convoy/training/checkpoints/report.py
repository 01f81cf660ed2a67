"""What the ranks tell each other of the checkpoint on its way."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.training.checkpoints.writing import State, Writing


@dataclass(frozen=True)
class Report:
    """What a rank knows of it.

    Attributes:
        failure: why this rank could not write.
        waited_s: the run, for this checkpoint.
        processor_s: that the thread had.
        seconds: until it was written.
        update_s: the time of an update.
        kept_s: that the run has now waited for it in one go.
    """

    state: State
    failure: str | None
    waited_s: float
    processor_s: float
    seconds: float
    update_s: float
    kept_s: float

    @staticmethod
    def of(writing: Writing, waited_s: float, update_s: float, kept_s: float) -> "Report":
        """This rank's, now."""
        state = writing.state
        failure = None if state == "running" else _reason(writing.failure)
        return Report(state, failure, waited_s, writing.processor_s, writing.seconds, update_s, kept_s)


def still(reports: Sequence[Report]) -> str:
    """Who has not ended."""
    slow = ", ".join(f"rank {rank}" for rank, report in enumerate(reports) if report.state == "running")
    return f"still written by {slow}"


def first_failure(reports: Sequence[Report]) -> str:
    """Why it could not be written, and by whom, where several write."""
    rank, reason = next((rank, report.failure) for rank, report in enumerate(reports) if report.failure is not None)
    return f"rank {rank}: {reason}" if len(reports) > 1 else reason


def _reason(error: Exception | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
