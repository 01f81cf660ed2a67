"""Seconds of the sides of a case over the rounds, their ratios, and the tables made of them."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from measuring import harness

SERIAL = "one device"
QUIET = 0.97
"""Part of the time that one device's process must have had its core for the figures to mean something."""

COLUMNS = ("", "seconds an update", "ratio to one device", "min–max of the rounds", "arrangement")


@dataclass
class Row:
    """One side."""

    label: str
    arrangement: str
    seconds: list[float] = field(default_factory=list)  # of an update, in every round
    first_loss: float | None = None  # over the global batch, before any update
    plan: Any = None
    busy: float = 1.0  # the least part of the time that its process had the core in a round
    predicted: float | None = None  # seconds of an update, before it was run; None where nothing was said

    def add(self, seconds: float, first_loss: float, busy: float) -> None:
        """Another round."""
        self.seconds.append(seconds)
        self.first_loss = first_loss
        self.busy = min(self.busy, busy)

    @property
    def median(self) -> float:
        """Seconds of an update."""
        return statistics.median(self.seconds)


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

    def speedups(self, row: Row) -> list[float]:
        """How many times faster than one device the side was, in every round."""
        return [one / seconds for one, seconds in zip(self.row(SERIAL).seconds, row.seconds, strict=False)]

    def speedup(self, row: Row) -> float:
        """The same of the medians over the rounds."""
        return self.row(SERIAL).median / row.median

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        sides = [{**asdict(row), "median_s": row.median, "ratio": self.speedup(row)} for row in self.rows]
        return {**{key: value for key, value in vars(self).items() if key != "rows"}, "sides": sides}


def markdown(results: Results) -> str:
    """The table of a case."""
    lines = [f"**{results.case}**: {results.network}, global batch {results.batch}", "", harness.header(*COLUMNS)]
    for row in results.rows:
        ratios = results.speedups(row)
        spread = f"{min(row.seconds):.3f}–{max(row.seconds):.3f} s, ×{min(ratios):.2f}–{max(ratios):.2f}"
        ratio = f"{results.speedup(row):.2f}"
        lines.append(harness.row(row.label, f"{row.median:.4f}", ratio, spread, row.arrangement))
    busy = results.row(SERIAL).busy / results.share
    if busy < QUIET:
        lines.append(f"\nOther programs took {1 - busy:.0%} of the one device's core: measure again.")
    lines += [f"\n{label}: skipped, {reason}" for label, reason in results.skipped.items()]
    return "\n".join(lines)


def predictions(results: Results) -> str:
    """What the planner said of the sides, beside what was measured."""
    lines = [harness.header("plan", "predicted s", "measured s", "error")]
    rows = [row for row in results.rows if row.predicted is not None]
    errors = [row.predicted / row.median - 1 for row in rows if row.predicted is not None]
    for row, error in zip(rows, errors, strict=True):
        lines.append(f"| {row.label} | {row.predicted:.3f} | {row.median:.3f} | {error:+.1%} |")
    if errors:
        lines.append(f"\nMean absolute error {statistics.mean(map(abs, errors)):.1%}.")
    return "\n".join(lines)
