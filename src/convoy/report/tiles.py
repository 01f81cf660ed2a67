"""The result at a glance: a few numbers, each with what one needs to judge it."""

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
    tiles = [_accuracy(run, summary), _best(run, summary), _top5(run, summary), _loss(run, summary)]
    tiles += [_length(run, summary), _time(run, summary), _speed(run, summary), _model(summary), _data(summary)]
    return [tile for tile in tiles if tile is not None]


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
        found = getattr(source, name, None)
        if found is not None:
            return float(found)
    return None


def _accuracy(run: Run, summary: RunSummary) -> Tile:
    top1, images = last_result(run, "top1"), num_test_images(run)
    if top1 is None:
        return Tile("Test accuracy", units.UNKNOWN, "not tested yet", main=True)
    places = units.percent_places(images)
    note = ""
    if images:
        low, high = units.wilson(top1, images)
        note = f"95 % interval {units.decimal(100 * low, places)} to {units.percent(high, places)}"
    return Tile("Test accuracy", units.percent(top1, places), note, main=True)


def _best(run: Run, summary: RunSummary) -> Tile | None:
    tests = [line for line in run.metrics.test if line.top1 is not None]
    top1, step = summary.best_top1, summary.best_step
    if top1 is None and tests:
        best = max(tests, key=lambda line: line.top1 or 0.0)
        top1, step = best.top1, best.step
    if top1 is None or len(tests) < 2:
        return None
    note = f"update {units.count(step)}, " if step is not None else ""
    return Tile(
        "Best test accuracy",
        units.percent(top1, units.percent_places(num_test_images(run))),
        f"{note}the highest of {len(tests)} evaluations",
    )


def _top5(run: Run, summary: RunSummary) -> Tile | None:
    top5 = last_result(run, "top5")
    if top5 is None or (run.evaluation is not None and 0 < len(run.evaluation.classes) < 20):
        return None
    return Tile("Top-5 accuracy", units.percent(top5, units.percent_places(num_test_images(run))), "test split")


def _loss(run: Run, summary: RunSummary) -> Tile | None:
    loss = last_result(run, "loss")
    return None if loss is None else Tile("Test loss", units.significant(loss), "mean cross-entropy, nats")


def _length(run: Run, summary: RunSummary) -> Tile | None:
    lines = [*run.metrics.train, *run.metrics.test]
    steps = summary.steps if summary.steps is not None else max((line.step for line in lines), default=None)
    if steps is None:
        return None
    epochs = summary.epochs
    if epochs is None:
        epochs = max((line.epoch for line in lines if line.epoch is not None), default=None)
    updates = units.plural(steps, "update")
    if summary.total_steps:
        updates = f"{units.count(steps)} of {units.plural(summary.total_steps, 'update')}"
    if epochs is None:
        return Tile("Trained for", updates)
    return Tile("Trained for", f"{units.value(round(epochs, 2))} {'epoch' if epochs == 1 else 'epochs'}", updates)


def _time(run: Run, summary: RunSummary) -> Tile | None:
    seconds = summary.time_s
    if seconds is None:
        times = [line.time_s for line in (*run.metrics.train, *run.metrics.test) if line.time_s is not None]
        seconds = max(times, default=None)
    device = run.environment.get("device")
    return None if seconds is None else Tile("Time", units.duration(seconds), f"on {device}" if device else "")


def _speed(run: Run, summary: RunSummary) -> Tile | None:
    speeds = column(run.metrics.train, "images_per_s")
    speed = float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else summary.images_per_s
    if speed is None:
        return None
    wait = summary.data_wait_share
    note = "median" if wait is None else f"median; {units.percent(wait)} of the time waiting for data"
    return Tile("Images per second", units.count(round(speed)), note)


def _model(summary: RunSummary) -> Tile | None:
    if summary.parameters is None:
        return None
    note = "" if summary.flops is None else f"{units.prefixed(summary.flops, 'FLOP')} per image, forward"
    return Tile("Parameters", units.count(summary.parameters), note)


def _data(summary: RunSummary) -> Tile | None:
    if summary.num_train is None:
        return None
    note = "" if summary.num_test is None else f"and {units.count(summary.num_test)} for testing"
    if summary.bad_images:
        note += f"; {units.count(len(summary.bad_images))} unreadable, skipped"
    return Tile("Training images", units.count(summary.num_train), note.removeprefix("; "))
