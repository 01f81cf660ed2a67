"""Saves a run's state while it trains: when a checkpoint is due, every so many updates or as was measured; and by all
ranks together, beside the training, one at a time.
"""

import json
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from convoy.checkpoint.store import CheckpointStore, Writing, snapshot, sweep
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError, MachineError
from convoy.files import stamp, to_json
from convoy.recipe.schema import in_words

# The first checkpoint of a process comes after this many updates at most: those by which predictions are checked are
# before it.
FIRST_UPDATES = 65
FIRST_S = 30.0  # the same in seconds: the first one shows what a checkpoint costs, and whether it can be written at all
_REMEMBERED = 5  # costs of checkpoints, of which the median counts
PATIENCE_S = 0.1  # a rank's wait for its own thread before it hears of the other ranks
TIMEOUT_S = 300.0  # the default limit of the run's wait for a checkpoint
END_S = 5.0  # what a checkpoint on its way is given when the run ends by a mistake


class Timetable:
    """When a checkpoint is due: every so many updates, or (None) at the interval that follows from what one costs, the
    first one soon, to measure that. All ranks follow the clock of rank 0.

    Young, A first order approximation to the optimum checkpoint interval, 1974: with a checkpoint that costs C and a
    mean time M between failures, `mtbf_s`, the least time is lost with sqrt(2 · C · M) between checkpoints. (Daly,
    2006, adds terms that matter where C is not far below M.) Shorter than the time in which a checkpoint is written it
    cannot be.
    """

    def __init__(self, every: int | None, ranks: Ranks, mtbf_s: float = 6 * 3600.0) -> None:
        self._every, self._ranks, self._mtbf_s = every, ranks, mtbf_s
        # The time of an update, with evaluations and without checkpoints, is that from the second one on.
        self._first: int | None = None
        self._began = self._waited_s = 0.0
        self._done = self._last = 0
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._interval = self._told = 0  # updates; 0 before anything is measured
        self._next: int | None = None

    def due(self, done: int) -> bool:
        """Whether a checkpoint is due after so many updates. All ranks call it after every update."""
        self._done = done
        if self._first is None:
            self._first, self._began = done, time.perf_counter()
        if self._every is not None:
            return done % self._every == 0
        if self._next is None and done == self._first + 1:
            updates = min(FIRST_UPDATES, max(2, int(FIRST_S / self.update_s)))
            (updates,) = self._ranks.largest(updates if self._ranks.rank == 0 else 0)
            self._next = done + updates - 2
        return self._next is not None and done >= self._next

    @property
    def update_s(self) -> float:
        """Seconds of an update on this rank; 0 while nothing is known."""
        if self._first is None or self._done == self._first:
            return 0.0
        return max(1e-6, (time.perf_counter() - self._began - self._waited_s) / (self._done - self._first))

    def waited(self, seconds: float) -> None:
        """The run was kept by a checkpoint."""
        if self._first is not None:
            self._waited_s += seconds

    def saved(self, step: int) -> None:
        """A checkpoint was begun, due or not."""
        self._last = step
        if self._interval or self._next is not None:
            self._next = step + (self._interval or FIRST_UPDATES)

    def measured(self, cost_s: float, write_s: float, update_s: float) -> str | None:
        """A checkpoint is on disk: seconds that it kept the run from its work, until it was written, and of an update
        (0: not known yet); the same numbers on all ranks. The interval follows from the median of the last costs; it is
        said at first, and where it has changed to half or double of that.
        """
        if self._every is not None or update_s == 0:
            return None
        self._costs.append(max(cost_s, 1e-6))
        cost, update_s = median(self._costs), max(update_s, 1e-6)
        young = math.sqrt(2 * cost * self._mtbf_s)
        updates = self._interval = max(1, round(max(young, write_s) / update_s))
        self._next = self._last + updates
        if self._told and 0.5 < updates / self._told < 2:
            return None
        self._told = updates
        formula = f"sqrt(2 · {in_words(cost)} · {in_words(self._mtbf_s)}), Young 1974"
        if write_s > young:
            formula = f"as long as one takes to be written, more than {formula}"
        every = f"checkpoint every {updates:,} update{'s' if updates > 1 else ''} ({in_words(updates * update_s)})"
        return f"{every}: {formula}; at most {in_words(updates * update_s + write_s)} of work are lost"


@dataclass
class CheckpointTally:
    """What the checkpoints of a run have cost it, on rank 0."""

    written: int = 0
    failed: int = 0
    waited_s: float = 0.0  # of the run: while its state was copied, and for a checkpoint that was not yet on disk
    longest_wait_s: float = 0.0  # in one go

    def __str__(self) -> str:
        return (
            f"{self.written:,} checkpoint{'' if self.written == 1 else 's'} written; the run waited "
            f"{in_words(self.waited_s)} for them in all, {in_words(self.longest_wait_s)} at most"
        )


@dataclass(frozen=True)
class Report:
    """What a rank knows of the checkpoint on its way."""

    writes: bool  # this rank still does
    failure: str | None  # why it could not
    cost_s: float  # that it kept the run from its work so far
    seconds: float  # until it was written
    update_s: float  # the time of an update
    kept_s: float  # that the run has now waited for it in one go


@dataclass
class Saver:
    """Writes the checkpoints of a run.

    Every rank that sees the run directory writes a share of the tensors. The run waits while the shares are copied to
    the host's memory, and, where one is due before the one before is on disk, for that one: at most `timeout_s`. `tell`
    takes a sentence for whoever watches, `goes_on` says whether a run survives a checkpoint that cannot be written, and
    `on_processor` whether the ranks compute on the processor that the writing thread needs as well. On rank 0,
    `check(updates done)` refuses to write where the run directory has gone.
    """

    store: CheckpointStore
    when: Timetable
    ranks: Ranks
    tell: Callable[[str], None]
    _: KW_ONLY
    goes_on: bool = False
    on_processor: bool = True
    timeout_s: float = TIMEOUT_S
    check: Callable[[int], None] = lambda done: None

    def __post_init__(self) -> None:
        self.newest: int | None = None  # step of the newest checkpoint on disk
        self.tally = CheckpointTally()
        self._wait_s = self._waited_before_s = 0.0
        self._writing: Writing | None = None
        self._writers: list[int] = [0]
        self._token = ""
        self._count = 0
        self._failed = False

    @contextmanager
    def open(self, seen: Path) -> Iterator[None]:
        """While entered, checkpoints are written. All ranks enter it; `seen` is a file of the run directory that rank 0
        has just written.
        """
        if self.ranks.rank == 0:
            sweep(self.store.folder, "step-*")
        stamps = self.ranks.gather((stamp(seen), uuid.uuid4().hex))
        self._token = stamps[0][1]
        self._writers = [rank for rank, (of_rank, _) in enumerate(stamps) if rank == 0 or of_rank == stamps[0][0]]
        try:
            yield
        except BaseException as error:
            self._abandon(END_S if isinstance(error, ConvoyError) else 0.0)
            raise

    def has(self, step: int) -> bool:
        """Whether the state after `step` updates is saved, or on its way."""
        return self.newest == step or (self._writing is not None and self._writing.draft.step == step)

    def look(self) -> None:
        """See whether the checkpoint on its way is written. All ranks call it, when they meet anyway."""
        if self._writing is not None:
            self._ask()

    def save(
        self,
        step: int,
        identity: str,
        tensors: Iterable[tuple[str, Tensor]],
        values: Mapping[str, Any],
        best_step: int | None,
    ) -> None:
        """Begin a checkpoint of the state after `step` updates, when the one before is written; that of `best_step`
        stays. All ranks call it. The tensors are whole and by serial names, and each is asked for once.
        """
        self.finish()
        self.ranks.first(lambda: self.check(step))
        began = time.perf_counter()
        self._wait_s = 0.0
        number = self._writers.index(self.ranks.rank) if self.ranks.rank in self._writers else None
        shard = snapshot(tensors, number, len(self._writers))
        self._count += 1
        draft = self.store.draft(step, len(self._writers), f"{self._token}-{self._count}")
        frozen = json.loads(to_json(values))

        def put() -> None:
            draft.put(self.store.place(step), identity, frozen)
            self.store.prune(step, best_step)

        self._writing = Writing(draft, number, shard, put if self.ranks.rank == 0 else None)
        self.when.saved(step)
        self._waited(began)

    def finish(self, or_raise: bool = False) -> None:
        """Wait until the checkpoint on its way is written; with `or_raise`, a failure ends the run in any case. All
        ranks call it.
        """
        came, self._waited_before_s = time.perf_counter(), self.tally.waited_s
        while self._writing is not None:
            began = time.perf_counter()
            self._writing.wait(PATIENCE_S)
            self._waited(began)
            reports = self._ask(or_raise, time.perf_counter() - came)
            if self._writing is not None and reports[0].kept_s > self.timeout_s:  # one clock for all
                self._too_late(self._writing, reports)

    def _waited(self, since: float) -> None:
        seconds = time.perf_counter() - since
        self._wait_s += seconds
        self.tally.waited_s += seconds
        self.tally.longest_wait_s = max(self.tally.longest_wait_s, self.tally.waited_s - self._waited_before_s)
        self.when.waited(seconds)

    def _ask(self, or_raise: bool = False, kept_s: float = 0.0) -> list[Report]:
        """What every rank knows of the checkpoint on its way; when all have ended, what follows."""
        writing = self._writing
        assert writing is not None
        runs, reason, error = writing.runs, None, writing.failure
        if not runs and error is not None:
            reason = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
        cost_s = self._wait_s + (writing.processor_s if self.on_processor else 0.0)
        reports = self.ranks.gather(Report(runs, reason, cost_s, writing.seconds, self.when.update_s, kept_s))
        failures = [(rank, report.failure) for rank, report in enumerate(reports) if report.failure is not None]
        if failures:
            writing.give_up()
        if not any(report.writes for report in reports):
            self._writing = None
            if failures:
                rank, reason = failures[0]
                self._failure(writing, f"rank {rank}: {reason}" if len(reports) > 1 else reason, or_raise)
            else:
                self._success(writing.draft.step, reports)
        return reports

    def _success(self, step: int, reports: list[Report]) -> None:
        self.newest = step
        self.tally.written += 1
        if self._failed:
            self._failed = False
            self.tell(f"the checkpoint of update {step:,} is written: a failure costs no more than that")
        cost_s, write_s = max(report.cost_s for report in reports), max(report.seconds for report in reports)
        if (sentence := self.when.measured(cost_s, write_s, reports[0].update_s)) is not None:
            self.tell(sentence)

    def _failure(self, writing: Writing, reason: str | None, or_raise: bool) -> None:
        if self.ranks.rank == 0:
            writing.draft.discard()
        self.ranks.first(lambda: self.check(writing.draft.step))
        if writing.failure is not None and not isinstance(writing.failure, OSError):
            raise writing.failure
        sentence = (
            f"the checkpoint of update {writing.draft.step:,} could not be written to {self.store.folder} "
            f"({reason}): {self._older()}"
        )
        if or_raise or not self.goes_on:
            raise ConvoyError(
                f"{sentence}; free what is in its way and go on with --resume, or let runs train on without it: "
                "--set checkpoint.on_error=continue"
            )
        self._failed = True
        self.tally.failed += 1
        self.tell(f"{sentence}; the run goes on")

    def _too_late(self, writing: Writing, reports: list[Report]) -> None:
        """The file system may not answer: nothing more is asked of it, not even to remove the draft."""
        self._writing = None
        writing.give_up()
        slow = ", ".join(f"rank {rank}" for rank, report in enumerate(reports) if report.writes)
        raise MachineError(
            f"the checkpoint of update {writing.draft.step:,} is not written after {in_words(self.timeout_s)} "
            f"(--timeout), still written by {slow}: {self._older()}; see whether the file system of "
            f"{self.store.folder} answers, then go on with --resume"
        )

    def _older(self) -> str:
        return f"the newest whole one is of update {self.newest:,}" if self.newest else "there is no older one"

    def _abandon(self, timeout_s: float) -> None:
        """The run ends in the middle: let what is on its way become a checkpoint if that does not take long."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.wait(timeout_s)
        writing.give_up()
        if self.ranks.rank == 0 and timeout_s and (writing.runs or writing.failure is not None):
            writing.draft.discard()
