"""Predictions of published tables, each from a fit to all other sources.

    python benchmarks/published.py --published ../shared/published

Reads what other people measured (`scaling.csv` and what lies beside it), fits the coefficients of `convoy.hardware` to
it, and predicts every row from the sources that it is not of: docs/benchmarks/published/predictions.csv, and blind.csv
for rows whose results are not at hand (`questions.csv`). With `--coefficients` it also writes those of the fit to all,
which the package computes with, and how wide the ranges are. Minutes on one core.
"""

import argparse
import csv
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measuring.published_fit import (
    as_dict,
    constant,
    one_device,
    peak_rate,
    read_collectives,
    read_layers,
    several_devices,
    single,
    speedup,
)
from measuring.published_rows import KEYS, OURS, Row, family, read
from measuring.published_schemes import several

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "benchmarks" / "published"
COEFFICIENTS = ROOT / "src" / "convoy" / "hardware" / "coefficients.json"
COVERED = 0.92
"""Of the errors of all other sources, so that nine in ten of the next source are inside."""

Given = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Predicted:
    """A row with what is said of it: images a second, the speed-up, and how far off both may be."""

    row: Row
    rate: float | None
    speedup: float | None
    known: str  # what other sources say of its device and framework

    @property
    def error(self) -> float | None:
        """The logarithm of predicted over published images a second."""
        return math.log(self.rate / self.row.rate) if self.rate and self.row.rate else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, required=True, help="the folder with scaling.csv")
    parser.add_argument("--out", type=Path, default=OUT, help="where the predictions go")
    parser.add_argument("--coefficients", action="store_true", help="write those of the package")
    parser.add_argument("--families", action="store_true", help="leave out all near-copies of a source with it")
    given = parser.parse_args()
    rows, blind = list(read(given.published / "scaling.csv")), list(read(given.published / "questions.csv"))
    ours = list(read(OURS))
    name = (lambda row: family(row.source)) if given.families else (lambda row: row.source)
    sources = sorted({name(row) for row in [*rows, *ours, *blind]})
    layers, collectives = read_layers(given.published), read_collectives(given.published)
    first = one_device([*rows, *ours], layers, sources, name)
    at, slopes = first.solve()
    many = [row for row in rows if row.count > 1]
    whole = dict(zip(first.names, map(float, at), strict=True))
    second = several_devices(collectives, many, [single(row, whole) for row in many], sources, whole, name)
    at_many, slopes_many = second.solve()
    print(f"{len(first.names)} coefficients of one device, {len(second.names)} of several")
    predicted: dict[int, Predicted] = {}
    seen = _seen(rows, name)
    for number, source in enumerate(sources):
        alone = dict(zip(first.names, map(float, first.without(number, at, slopes)), strict=True))
        left = dict(zip(second.names, map(float, at_many), strict=True))
        if number in second.groups:
            own = several_devices(collectives, many, [single(row, alone) for row in many], sources, alone, name)
            left = dict(zip(own.names, map(float, own.without(number, at_many, slopes_many)), strict=True))
        for row in (*rows, *ours, *blind):
            if name(row) == source:
                predicted[id(row)] = predict(row, {"one device": alone, "several devices": left}, seen)
    given.out.mkdir(parents=True, exist_ok=True)
    ranges = widths([predicted[id(row)] for row in rows])
    write(given.out / "predictions.csv", [predicted[id(row)] for row in rows], ranges)
    write(given.out / "blind.csv", [predicted[id(row)] for row in blind], ranges)
    report([predicted[id(row)] for row in rows], rows)
    for row in ours:
        fitted, left_out = row.images / single(row, whole).total, predicted[id(row)].rate
        measured = f"{row.key[-1]}, batch {row.images:.0f}: {row.rate:,.0f} images/s"
        print(f"{measured}; {fitted:,.0f} fitted, {left_out:,.0f} left out")
    if given.coefficients:
        found = {
            "one device": as_dict(first.names, at),
            "several devices": as_dict(second.names, at_many),
            "ranges": {name: round(value, 3) for name, value in ranges.items()},
        }
        COEFFICIENTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _seen(rows: Sequence[Row], name: Callable[[Row], str]) -> dict[tuple[str, str], set[str]]:
    """From which sources devices and software are known."""
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        if not row.refused and row.rate:
            seen["device", row.device.name].add(name(row))
            seen["framework", row.software.framework].add(name(row))
    return seen


def predict(row: Row, given: Given, seen: Mapping[tuple[str, str], set[str]]) -> Predicted:
    """What a row is predicted to be, from coefficients that know nothing of its source."""
    known = [
        bool(seen.get((what, value), set()) - {row.source, family(row.source)})
        for what, value in (("device", row.device.name), ("framework", row.software.framework))
    ]
    distance = f"{'known' if known[0] else 'unknown'} device, {'known' if known[1] else 'unknown'} framework"
    distance += ", one device" if row.count == 1 else ", several devices"
    if row.refused:
        return Predicted(row, None, None, distance)
    one = single(row, given["one device"])
    if row.count == 1 and row.scheme.kind == "none":
        return Predicted(row, row.images / one.total, 1.0, distance)
    seconds = several(one, row, given).seconds
    pipeline = row.scheme.kind == "pipeline"
    faster = 1.0 if row.count == 1 and not pipeline else speedup(row, one, given)
    return Predicted(row, row.images * (1 if pipeline else row.count) / seconds, faster, distance)


def widths(predicted: Sequence[Predicted]) -> dict[str, float]:
    """For each distance the logarithm of the factor within which nine in ten are, every source with one vote."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    able = [(one, abs(one.error)) for one in predicted if one.error is not None]
    counts = Counter((one.known, one.row.source) for one, _ in able)
    for one, error in able:
        votes = counts[one.known, one.row.source] ** -0.5
        errors[one.known].append((error, votes))
        errors["any"].append((error, votes))
    return {known: _quantile(found) for known, found in sorted(errors.items()) if len(found) >= 10}


def _quantile(found: Sequence[tuple[float, float]]) -> float:
    values, votes = (np.array(column) for column in zip(*sorted(found), strict=True))
    return float(values[np.searchsorted(np.cumsum(votes), COVERED * votes.sum())])


def write(path: Path, predicted: Sequence[Predicted], ranges: Mapping[str, float]) -> None:
    """As the scorer reads it, with the range beside."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*KEYS, "images_per_s", "speedup_vs_1", "refused", "least", "most"])
        for one in predicted:
            width = math.exp(ranges.get(one.known, ranges["any"]))
            rate = [f"{value:.4g}" if value else "" for value in (one.rate, one.speedup)]
            bounds = [f"{one.rate / width:.4g}", f"{one.rate * width:.4g}"] if one.rate else ["", ""]
            writer.writerow([*one.row.key, *rate, one.row.refused, *bounds])


def report(predicted: Sequence[Predicted], rows: Sequence[Row]) -> None:
    """Means over sources; and the ranges, each source judged by the widths of all others."""
    alone: dict[str, list[float]] = defaultdict(list)
    flat: dict[str, list[float]] = defaultdict(list)
    by_source: dict[str, list[Predicted]] = defaultdict(list)
    for one in predicted:
        by_source[one.row.source].append(one)
    inside: list[list[bool]] = []
    for source, own in by_source.items():
        others, guess = widths([one for one in predicted if one.row.source != source]), constant(rows, source)
        errors = [(one, one.error) for one in own if one.error is not None]
        for one, error in errors:
            if one.row.count == 1:
                alone[source].append(abs(error))
                flat[source].append(abs(math.log(guess * peak_rate(one.row) / (one.row.rate or 1))))
        if errors:
            inside.append([abs(error) <= others.get(one.known, others["any"]) for one, error in errors])
    for what, found in (("fitted", alone), ("one efficiency constant", flat)):
        mean = statistics.fmean(statistics.fmean(values) for values in found.values())
        print(f"one device, {what}: mean error {math.expm1(mean):.1%} over {len(found)} sources")
    everywhere = statistics.fmean(value for values in inside for value in values)
    of_sources = statistics.fmean(statistics.fmean(values) for values in inside)
    print(f"inside the 90 % range: {everywhere:.1%} of the rows, {of_sources:.1%} in the mean of sources")


if __name__ == "__main__":
    main()
