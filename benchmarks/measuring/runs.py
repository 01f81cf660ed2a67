"""One case: trials that choose arrangements and plans, then rounds in which all sides take turns; and their tables."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from convoy.bench.emulated import EmulatedDevice
from convoy.bench.processes import RankFailed
from convoy.errors import ConvoyError
from measuring import harness
from measuring.cases import Case
from measuring.ranks import run_ranks
from measuring.sides import Arrangement, Side, Timing, try_arrangements

SERIAL = "one device"
QUIET = 0.97
"""Part of the time that one device's process must have had its core for the figures to mean something."""


@dataclass
class Row:
    """One side."""

    label: str
    arrangement: str
    seconds: list[float] = field(default_factory=list)  # of an update, in every round
    plan: Any = None
    busy: float = 1.0  # the least part of the time that its process had the core in a round
    predicted: float | None = None  # seconds of an update, before it was run; None where nothing was said

    @property
    def median(self) -> float:
        """Seconds of an update."""
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """Of the prediction, as a part of what was measured."""
        assert self.predicted is not None
        return self.predicted / self.median - 1


@dataclass
class Results:
    """All sides of one case."""

    case: str
    batch: int
    network: str
    rows: list[Row] = field(default_factory=list)
    # seconds of an update in the trials that chose arrangements and plans; no part of the results
    tried: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # sides that could not be measured, and why
    share: float = 1.0  # of a core that the one device has

    def row(self, label: str) -> Row:
        """The row of a side."""
        return next(row for row in self.rows if row.label == label)

    def show(self, report: harness.Report) -> None:
        """The tables of the case."""
        one = self.row(SERIAL)
        sides = [{**asdict(row), "median_s": row.median, "ratio": one.median / row.median} for row in self.rows]
        report.document.setdefault("cases", []).append({**vars(self), "rows": sides})
        report.print(f"\n**{self.case}**: {self.network}, global batch {self.batch}\n")
        report.header("", "seconds an update", "ratio to one device", "min–max of the rounds", "how")
        for row in self.rows:
            ratios = [alone / seconds for alone, seconds in zip(one.seconds, row.seconds, strict=False)]
            ends = f"{harness.spread(row.seconds, 3)[1]} s, ×{harness.spread(ratios, 2)[1]}"
            report.row(row.label, f"{row.median:.4f}", f"{one.median / row.median:.2f}", ends, row.arrangement)
        if one.busy / self.share < QUIET:
            taken = 1 - one.busy / self.share
            report.print(f"\nOther programs took {taken:.0%} of the one device's core: measure again.")
        for label, reason in self.skipped.items():
            report.print(f"\n{label}: skipped, {reason}")
        if rows := [row for row in self.rows if row.predicted is not None]:
            report.print("")
            report.header("plan", "predicted s", "measured s", "error")
            for row in rows:
                report.row(row.label, f"{row.predicted:.3f}", f"{row.median:.3f}", f"{row.error:+.1%}")
            report.print(f"\nMean absolute error {statistics.mean(abs(row.error) for row in rows):.1%}.")


@dataclass
class Runs:
    """Measures sides of one case by fresh processes, and gives up those that fail."""

    case: Case
    rounds: int
    places: Sequence[EmulatedDevice]  # of the ranks; none for loopback
    seconds: float  # after which a side is given up
    # what each rank measures of a side in a round; of a trial alone, where the last is true
    measure: Callable[[Side, int, bool], list[Timing]]
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.results = Results(self.case.name, self.case.batch, f"{self.case.model}, {self.case.image_size} px")

    def one_device(self, keeps: bool) -> Arrangement:
        """The fastest arrangement of one device by itself."""
        where: dict[str, Any] = {"places": self.places[:1] if keeps else (), "seconds": self.seconds}
        seconds: dict[Arrangement, float] = run_ranks(try_arrangements, 1, self.case, keeps, **where)[0]
        for arrangement in seconds:
            self._note(f"{SERIAL}, {arrangement}", seconds[arrangement])
        return min(seconds, key=lambda arrangement: seconds[arrangement])

    def best(self, rivals: Sequence[Side]) -> list[Side]:
        """The fastest in one trial, which a side without rivals does not need; none if all fail."""
        if len(rivals) < 2:
            return list(rivals)
        seconds: list[tuple[float, int]] = []
        for number, side in enumerate(rivals):
            name = f"{side.label}, {side.how}"
            timings = self._try(side, name, 0, True)
            if timings is not None:
                seconds.append((slowest(timings), number))
                self._note(name, slowest(timings))
        return [rivals[min(seconds)[1]]] if seconds else []

    def take_turns(self, sides: Sequence[Side], predicted: Callable[[Side], float | None] = lambda _: None) -> Results:
        """The rounds, beside what is predicted of the sides."""
        results = self.results
        results.rows = [Row(s.label, s.how, [], s.plan and str(s.plan), 1.0, predicted(s)) for s in sides]
        for number, label, side in harness.turns({side.label: side for side in sides}, self.rounds):
            timings = self._try(side, label, number, False) if label not in results.skipped else None
            if timings is not None:
                row = results.row(label)
                row.seconds.append(slowest(timings))
                row.busy = min(row.busy, timings[0].busy)
                harness.say(f"round {number + 1}: {label} {slowest(timings):.4f} s")
        results.rows = [row for row in results.rows if row.seconds and row.label not in results.skipped]
        return results

    def _try(self, side: Side, name: str, number: int, trial: bool) -> list[Timing] | None:
        try:
            return self.measure(side, number, trial)
        except (RankFailed, ConvoyError) as error:
            line = str(error).strip().splitlines()[-1 if isinstance(error, RankFailed) else 0]
            self.results.skipped[name] = f"failed: {line}"
            harness.say(f"{name}: {error}")
            return None

    def _note(self, name: str, seconds: float) -> None:
        self.results.tried[name] = seconds
        harness.say(f"trial: {name} {seconds:.4f} s")


def slowest(timings: Sequence[Timing]) -> float:
    """Seconds of an update on the slowest rank."""
    return max(timing.median for timing in timings)
