"""What a run amounts to: sentences on its numbers, on gaps in them and its speed-up; and tiles, a few numbers."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convoy import units
from convoy.planner.comparison import Comparison, difference, shown
from convoy.report.pages import Tile
from convoy.report.run import Run, column, counts_of
from convoy.run.records import MetricsLine
from convoy.tasks.metric import metric_in_words

# Speed-ups that are none, and errors of the plan's own prediction from which on nothing follows from a comparison.
_ALIKE, _DOUBTFUL = 0.03, 0.25
_ONE_LINE = re.compile(r"[a-z]+(=\d+)?(,[a-z]+=\d+)*")  # plans that a command line can name: a strategy on each axis


def remarks(run: Run) -> list[str]:
    """The sentences, the most important first; none for a run that is complete and healthy."""
    sentences = [
        _status(run),
        *_not_finite("training", run.metrics.train),
        *_not_finite(run.metrics.split, run.metrics.test),
        *_gaps(run),
        _soft_targets(run),
    ]
    if run.metrics.cut:
        sentences.append("The last line of metrics.jsonl was cut off in the middle of writing and is left out.")
    return [sentence for sentence in sentences if sentence]


def about(run: Run) -> list[str]:
    """The outcome of a run: its result, its devices and plan, and whether several were faster than one."""
    summary, devices = run.summary, num_devices(run)
    top1, images = last_result(run, "top1"), num_test_images(run)
    model, epochs, split = summary.model or "The network", summary.epochs, summary.split or run.metrics.split
    length = f" after {_epochs(epochs)}" if epochs else ""
    time = "" if summary.time_s is None else f" in {units.duration(summary.time_s)}"
    plan = f", plan {units.shorten(_plan(run), 90)}" if devices > 1 and _plan(run) else ""
    where = f" on {units.plural(devices, 'device')}{plan}"
    if run.decides:
        best, value = next(iter(run.results.items()))
        of = f" on {units.plural(images, f'{split} image')}" if images else ""
        sentences = [f"{model} has {metric_in_words(best, value)}{of}{length}{time}{where}."]
        return [*sentences, *([run.diagnosis.brief] if run.diagnosis is not None else [])]
    if top1 is None:
        return [f"{model} has not been tested yet{length}{time}{where}."]
    right = units.percent(top1, units.percent_places(images))
    of = f" of {units.plural(images, f'{split} image')}" if images else f" of the {split} images"
    sentences = [f"{model} recognizes {right}{of}{length}{time}{where}."]
    of_classes = counts_of(run.evaluation).sum(1)
    if len(of_classes) and images and top1 <= of_classes.max() / images:
        sentences.append(f"That is no better than always answering {run.evaluation.classes[of_classes.argmax()]}.")
    if run.diagnosis is not None:
        sentences.append(run.diagnosis.brief)
    scales = [units.significant(line.noise_scale, 2) for line in run.metrics.train if line.noise_scale is not None]
    if scales:
        first = f"about {scales[-1]} images at the end, {scales[0]} where it was first measured"
        sentences.append(f"The gradient noise scale was {first}: batches up to about {scales[-1]} still help now.")
    if devices > 1:  # last, as the command that measures it stands below
        how = " This measures it:" if bench_command(run) else " It takes convoy bench to measure it."
        sentences.append(f"{_speed_up(run.prediction, devices)}{'' if _is_settled(run) else how}")
    return sentences


def _epochs(number: float) -> str:
    return f"{units.value(round(number, 2))} {'epoch' if number == 1 else 'epochs'}"


def bench_command(run: Run) -> str:
    """The command that measures how fast the devices of a run are beside one; empty where one ran, or it is known."""
    devices, plan = num_devices(run), _plan(run)
    model, data = run.setting("model.name"), run.setting("data.path")
    if devices < 2 or _is_settled(run) or not model or not data:
        return ""
    folder = Path(str(run.environment.get("run") or run.path.resolve().name))
    plan = plan if plan and _ONE_LINE.fullmatch(plan) else str(folder / "plan.yaml")
    words = ["convoy", "bench", str(model), "--data", str(data), "--recipe", str(folder / "config.yaml")]
    return shlex.join([*words, "--devices", f"1,{devices}", "--plans", plan])


def num_devices(run: Run) -> int:
    """The number of devices on which the run was last."""
    noted = run.environment.get("devices")
    return run.summary.devices or (noted if isinstance(noted, int) else 1)


def _plan(run: Run) -> str:
    return run.summary.plan or str(run.environment.get("plan") or "")


def _pace(comparison: Comparison) -> float | None:
    measured = comparison.update.measured_s
    return comparison.one_device_s / measured if comparison.one_device_s and measured else None


def _is_settled(run: Run) -> bool:
    prediction = run.prediction
    return prediction is not None and _pace(prediction) is not None and not _is_doubtful(prediction)


def _is_doubtful(comparison: Comparison) -> bool:
    return comparison.error is not None and abs(comparison.error) > _DOUBTFUL


def _speed_up(comparison: Comparison | None, devices: int) -> str:
    pace = _pace(comparison) if comparison is not None else None
    if comparison is None or pace is None:
        return f"Whether {devices} devices were faster than one was not measured."
    how = f"{pace:.2f} times as fast as one"
    if abs(pace - 1) < _ALIKE:
        how = "as fast as one"
    elif pace < 1:
        how = f"slower than one, which would need {units.percent(pace, 0)} of the time"
    sentence = (
        f"An update took {shown(comparison.update.measured_s)}, and {shown(comparison.one_device_s)} were predicted of "
        f"one device: {devices} devices were {how}."
    )
    if comparison.error is not None and _is_doubtful(comparison):
        off = difference(comparison.error)
        return f"{sentence} That is in doubt: the prediction of the plan itself was off by {off}."
    return sentence


_STATUS = {
    "finished": ("Finished", "good"),
    "stopped": ("Stopped early", "warn"),
    "failed": ("Failed", "warn"),
    "running": ("Running", "open"),
}


def status(run: Run) -> tuple[str, str]:
    """A word for the state of the run, and its kind: good, warn or open."""
    if run.summary.status == "running" and run.training is False:
        return "Broken off", "warn"
    return _STATUS.get(run.summary.status or "", ("No summary", "warn"))


def _status(run: Run) -> str:
    summary, goes_on = run.summary, "--resume goes on from its last checkpoint"
    if summary.status is None:
        return (
            "There is no summary: the run is still going on, or it ended without being able to write one. "
            "What is shown is what it had written."
        )
    if summary.status == "finished":
        return ""
    if summary.status == "running" and run.training is False:
        return f"The run has ended without a word, as one does that is killed; {goes_on}."
    if summary.status == "running":
        doubt = "" if run.training else f", or had been killed: then {goes_on}"
        return f"The run was still going on when this page was written{doubt}."
    steps, total, why = summary.steps, summary.total_steps, f": {summary.error}" if summary.error else ""
    if "--resume" not in why:  # many reasons say how to go on
        why += f"; {goes_on}"
    when = "before its end"
    if steps is not None and total:
        when = f"after {units.count(steps)} of {units.plural(total, 'update')} ({units.percent(steps / total, 0)})"
    return f"The run {'failed' if summary.status == 'failed' else 'was stopped'} {when}{why}."


def _not_finite(split: str, lines: list[MetricsLine]) -> list[str]:
    lost = np.isnan(column(lines, "loss"))
    if not lost.any():
        return []
    first = lines[int(lost.argmax())].step
    return [
        f"The {split} loss was not a finite number (NaN or infinite) in {units.count(int(lost.sum()))} of "
        f"{units.plural(len(lines), 'line')} of the record, first at update {units.count(first)}; "
        "the curves have a gap there."
    ]


def _gaps(run: Run) -> Iterator[str]:
    if not run.metrics.train and not run.metrics.test:
        yield "No metrics have been recorded yet: the run ended, or was looked at, before its first line."
    elif not run.metrics.test and run.evaluation.top1 is None and not run.results:
        yield "The net has not been evaluated yet, so there is no curve of that and no accuracy."
    if number := len(run.summary.bad_images):
        yield f"{units.plural(number, 'image')} could not be read and {'was' if number == 1 else 'were'} skipped."


_LOSSES = {"bce": "binary cross-entropy", "mse": "mean squared error", "mae": "mean absolute error"}


def _soft_targets(run: Run) -> str:
    usual, name = {"multi-label": "bce", "regression": "mse"}.get(run.task, "cross-entropy"), run.setting("loss.name")
    other = run.setting("loss.function") or (name if name not in (None, "cross-entropy", usual) else "")
    if not other and run.setting("loss.class_weights"):
        other = f"{_LOSSES.get(usual, usual)} with class weights"
    if other:
        return (
            f"The training loss is {_LOSSES.get(other, other)}, that of evaluations plain {_LOSSES.get(usual, usual)}: "
            "they cannot be compared."
        )
    mixing = [name for name in ("mixup", "cutmix") if _positive(run.setting(f"data.mix.{name}"))]
    if mixing:
        return (
            f"Training images are blended ({' and '.join(mixing)}), so training loss and error "
            f"cannot be compared with those of the {run.metrics.split} split."
        )
    if _positive(smoothing := run.setting("loss.label_smoothing")):
        return f"Label smoothing of {units.value(smoothing)} keeps the training loss above zero even for a perfect net."
    return ""


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


_FOR = {"test": "testing", "validation": "validation"}


def result_tiles(run: Run) -> list[Tile]:
    """The tiles of a run; numbers that the run has not got are left out, except the accuracy."""
    return [*_results(run), *_course(run), *_inputs(run)]


def num_test_images(run: Run) -> int | None:
    """The number of images of the test split."""
    return run.evaluation.images or run.summary.num_test


def last_result(run: Run, name: str) -> float | None:
    """A result of the final evaluation: of its own file, else of the summary, else of the last test line."""
    for source in (run.evaluation, run.summary, run.metrics.test[-1] if run.metrics.test else None):
        result = getattr(source, name, None)
        if result is not None:
            return float(result)
    return None


def _results(run: Run) -> Iterator[Tile]:
    summary, images = run.summary, num_test_images(run)
    top1, top5, loss = (last_result(run, name) for name in ("top1", "top5", "loss"))
    split, of_evaluations = (summary.split or run.metrics.split).capitalize(), run.metrics.split
    named = list[Tile]()
    for name, value in run.results.items():
        words, _, figure = metric_in_words(name, value).rpartition(" ")
        named.append(Tile(f"{split} {words}", figure, f"{split.lower()} split", main=run.decides and not named))
    yield from named[: run.decides]
    if run.task != "classification":
        yield from named[1:]
        return
    places = units.percent_places(images)
    note = "not tested yet" if top1 is None else ""
    if top1 is not None and images:
        low, high = units.wilson(top1, images)
        note = f"95 % interval {units.decimal(100 * low, places)} to {units.percent(high, places)}"
    yield Tile(f"{split} accuracy", units.percent(top1, places), note, main=not run.decides)
    yield from named[run.decides :]
    number = sum(line.top1 is not None for line in run.metrics.test)
    if summary.best_top1 is not None and number > 1:
        at = f"update {units.count(summary.best_step)}, " if summary.best_step is not None else ""
        best = units.percent(summary.best_top1, places)
        yield Tile(f"Best {of_evaluations} accuracy", best, f"{at}the highest of {number} evaluations")
    if top5 is not None and "top5" not in run.results and len(run.evaluation.classes) not in range(1, 20):
        yield Tile("Top-5 accuracy", units.percent(top5, places), f"{split.lower()} split")
    if (error := run.evaluation.calibration_error) is not None:
        yield Tile("Calibration error", units.percent(error), "expected, over 15 ranges of probability")
    if loss is not None:
        yield Tile(f"{split} loss", units.significant(loss), "mean cross-entropy, nats")


def _course(run: Run) -> Iterator[Tile]:
    """How long it was trained, and how fast."""
    summary, device, wait = run.summary, run.environment.get("device"), run.summary.data_wait_share
    if summary.steps is not None:
        updates, total = units.plural(summary.steps, "update"), summary.total_steps
        if total:
            updates = f"{units.count(summary.steps)} of {units.plural(total, 'update')}"
        length = _epochs(summary.epochs) if summary.epochs is not None else ""
        yield Tile("Trained for", length or updates, updates if length else "")
    if summary.time_s is not None:
        start = f"{units.duration(summary.start_s)} of it the first update" if (summary.start_s or 0) > 5 else ""
        yield Tile("Time", units.duration(summary.time_s), "; ".join(filter(None, (device and f"on {device}", start))))
    speeds = column(run.metrics.train, "images_per_s")
    speed = float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else summary.images_per_s
    if speed is not None:
        note = "median" if wait is None else f"median; {units.percent(wait)} of the time waiting for data"
        yield Tile("Images per second", units.count(round(speed)), note)


def _inputs(run: Run) -> Iterator[Tile]:
    """Network and data."""
    summary = run.summary
    if summary.parameters is not None:
        note = "" if summary.flops is None else f"{units.prefixed(summary.flops, 'FLOP')} per image, forward"
        yield Tile("Parameters", units.count(summary.parameters), note)
    if summary.num_train is not None:
        tests = "" if summary.num_test is None else f"and {units.count(summary.num_test)} for {_FOR[run.metrics.split]}"
        bad = f"{units.count(len(summary.bad_images))} unreadable, skipped" if summary.bad_images else ""
        yield Tile("Training images", units.count(summary.num_train), "; ".join(filter(None, (tests, bad))))
