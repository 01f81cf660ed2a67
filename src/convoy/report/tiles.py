"""The result at a glance: a few numbers, each with what one needs to judge it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from convoy import units
from convoy.report.run_directory import Run, column
from convoy.training.records import RunSummary


@dataclass(frozen=True)
class Tile:
    """A label, a value, and a line of small print."""

    label: str
    value: str
    note: str = ""
    main: bool = False


def result_tiles(run: Run) -> list[Tile]:
    """The tiles of a run; numbers that the run has not got are left out, except the accuracy."""
    summary = run.summary or RunSummary()
    return [*_results(run, summary), *_course(run, summary), *_inputs(summary)]


def num_test_images(run: Run) -> int | None:
    """The number of images of the test split, from whichever file knows it."""
    if run.evaluation is not None and run.evaluation.images:
        return run.evaluation.images
    if run.metrics.test and run.metrics.test[-1].images:
        return run.metrics.test[-1].images
    return run.summary.num_test if run.summary is not None else None


def last_result(run: Run, name: str) -> float | None:
    """A result of the final evaluation: of its own file, else of the summary, else of the last test line."""
    for source in (run.evaluation, run.summary, run.metrics.test[-1] if run.metrics.test else None):
        result = getattr(source, name, None)
        if result is not None:
            return float(result)
    return None


def _results(run: Run, summary: RunSummary) -> Iterator[Tile]:
    top1, top5, loss = (last_result(run, name) for name in ("top1", "top5", "loss"))
    images = num_test_images(run)
    places = units.percent_places(images)
    note = "not tested yet" if top1 is None else ""
    if top1 is not None and images:
        low, high = units.wilson(top1, images)
        note = f"95 % interval {units.decimal(100 * low, places)} to {units.percent(high, places)}"
    yield Tile("Test accuracy", units.percent(top1, places), note, main=True)
    tests = [line for line in run.metrics.test if line.top1 is not None]
    best, step = summary.best_top1, summary.best_step
    if best is None and tests:
        line = max(tests, key=lambda line: line.top1 or 0.0)
        best, step = line.top1, line.step
    if best is not None and len(tests) > 1:
        at = f"update {units.count(step)}, " if step is not None else ""
        yield Tile("Best test accuracy", units.percent(best, places), f"{at}the highest of {len(tests)} evaluations")
    if top5 is not None and (run.evaluation is None or len(run.evaluation.classes) not in range(1, 20)):
        yield Tile("Top-5 accuracy", units.percent(top5, places), "test split")
    if loss is not None:
        yield Tile("Test loss", units.significant(loss), "mean cross-entropy, nats")


def _course(run: Run, summary: RunSummary) -> Iterator[Tile]:
    """How long it was trained, and how fast."""
    lines = [*run.metrics.train, *run.metrics.test]

    def latest(known: float | None, name: str) -> float | None:
        values = column(lines, name)
        return float(np.nanmax(values)) if known is None and np.isfinite(values).any() else known

    steps, epochs = latest(summary.steps, "step"), latest(summary.epochs, "epoch")
    seconds = latest(summary.time_s, "time_s")
    if steps is not None:
        updates = units.plural(int(steps), "update")
        if summary.total_steps:
            updates = f"{units.count(int(steps))} of {units.plural(summary.total_steps, 'update')}"
        if epochs is None:
            yield Tile("Trained for", updates)
        else:
            yield Tile(
                "Trained for", f"{units.value(round(epochs, 2))} {'epoch' if epochs == 1 else 'epochs'}", updates
            )
    device = run.environment.get("device")
    if seconds is not None:
        yield Tile("Time", units.duration(seconds), f"on {device}" if device else "")
    speeds, wait = column(run.metrics.train, "images_per_s"), summary.data_wait_share
    speed = float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else summary.images_per_s
    if speed is not None:
        note = "median" if wait is None else f"median; {units.percent(wait)} of the time waiting for data"
        yield Tile("Images per second", units.count(round(speed)), note)


def _inputs(summary: RunSummary) -> Iterator[Tile]:
    """Network and data."""
    if summary.parameters is not None:
        note = "" if summary.flops is None else f"{units.prefixed(summary.flops, 'FLOP')} per image, forward"
        yield Tile("Parameters", units.count(summary.parameters), note)
    if summary.num_train is not None:
        tests = "" if summary.num_test is None else f"and {units.count(summary.num_test)} for testing"
        bad = f"{units.count(len(summary.bad_images))} unreadable, skipped" if summary.bad_images else ""
        yield Tile("Training images", units.count(summary.num_train), "; ".join(filter(None, (tests, bad))))
