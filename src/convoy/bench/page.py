"""The files of a study beside bench.json: the report as one HTML page, the tables, the pictures; and the
sentences beside the tables: devices and work, certainty, cost, distances between curves, and gaps."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy import units
from convoy.bench.plots import convergence_panels, panels
from convoy.bench.records import CONVOY, Store, StudyFacts, TrainingStudy
from convoy.bench.results import (
    Convergence,
    ErrorCurve,
    Named,
    Results,
    Table,
    convergence,
    of_trainings,
    of_updates,
    points,
)
from convoy.bench.study import too_coarse
from convoy.documents import dump
from convoy.files import csv_of, write_atomically, writing
from convoy.report import pages
from convoy.report.pages import KINDS, Download, Panel, Tile, data_uri

_PICTURES: dict[str, dict[str, None]] = {"svg": {"Date": None}, "png": {"Software": None}}  # without what changes


@dataclass(frozen=True)
class Written:
    """A study's tables, by their names in JSON, the sentences on them, and the report."""

    tables: dict[str, Table]
    remarks: list[str]
    report: Path


def write_files(folder: Path) -> Written:
    """Write all files of the study in a folder, as far as it was measured."""
    store = Store.read(folder)
    results, trained = Results(store), convergence(store)
    tables = {"configurations": of_updates(results, store)}
    drawn: list[Panel] = []
    texts: dict[str, str] = {}
    warnings, gaps, of_times, of_trained, untrained = doubts(results), missing(results), [], [], []
    if is_timed := bool(results.rows) or trained is None:
        drawn += panels(results)
        texts["table.csv"] = tables["configurations"].csv()
        of_times = remarks(store, results)
    if trained is not None:
        table = tables["convergence"] = of_trainings(trained, store)
        drawn += convergence_panels(trained)
        curves = csv_of([test for curve in trained.curves for test in curve.records])
        texts |= {"convergence.csv": table.csv(), "curves.csv": curves}
        of_trained, untrained = list(convergence_remarks(trained)), missing(trained)
    content = {
        **_content(store, results, trained),
        "timed": is_timed,
        "table": tables["configurations"],
        "remarks": of_times,
        "trained_remarks": of_trained,
        "missing": [*warnings, *gaps, *untrained],
    }
    report = render(folder, Store.NAME, content, drawn, texts, tables.get("convergence"))
    return Written(tables, [*warnings, *of_times, *gaps, *of_trained, *untrained], report)


def write_trainings(
    study: TrainingStudy, rows: Table, panels: Sequence[Panel], missing: list[str], remarks: list[str], **content: Any
) -> Written:
    """Write all files of a study of trainings, which has one table."""
    name = study.NAME.removesuffix(".json")
    about: dict[str, Any] = {"title": units.shorten(rows.note, 60), "missing": missing, "trained_title": "Table"}
    about |= {"trained_remarks": remarks, "machine": study.machine, "commands": study.commands}
    report = render(study.folder, study.NAME, about | content, panels, {f"{name}.csv": rows.csv()}, rows)
    return Written({name: rows}, [*missing, *remarks], report)


def render(
    folder: Path,
    name: str,
    content: dict[str, Any],
    drawn: Sequence[Panel],
    texts: dict[str, str],
    trained: Table | None = None,
) -> Path:
    """Write the page of a study, whose file has a name, its pictures and its tables into its folder."""
    status, kind = ("incomplete", "warn") if content["missing"] else ("complete", "good")
    content = {"timed": False, "cluster": "", "status": status, "status_kind": kind, **content}
    files = {key: text.encode() for key, text in texts.items()}
    downloads = [Download.of(key, raw) for key, raw in {name: (folder / name).read_bytes(), **files}.items()]
    figures = []
    for panel in drawn:
        kinds = _PICTURES if panel.figure is not None else {}  # on white, with the text as text
        pictures = {f"{panel.name}.{kind}": panel.file(kind, dpi=300, metadata=of) for kind, of in kinds.items()}
        files |= pictures
        uris = [(name, data_uri(content, KINDS[name.rpartition(".")[2]])) for name, content in pictures.items()]
        figures.append((panel, uris))
    html = pages.render(
        "bench.html.jinja",
        ("report.css", "bench.css"),
        ("copy.js",),
        **content,
        trained=trained,
        panels=figures,
        downloads=downloads,
    )
    files["report.html"] = html.encode("utf-8", errors="replace")
    with writing(folder, "free space there, or copy it"):
        for key, raw in files.items():
            write_atomically(folder / key, lambda path, raw=raw: path.write_bytes(raw))  # type: ignore[misc]
    return folder / "report.html"


def _content(store: Store, results: Results, trained: Convergence | None) -> dict[str, Any]:
    study, table = store.study, store.table
    whole = not any((part.waiting or part.failed) for part in (results, trained) if part is not None)
    numbers = sorted({row.devices for row in store.configurations})
    own_plans = {row.devices: row.found_plan for row in results.rows if "\n" in row.found_plan}
    return {
        "name": "scaling study",
        "title": units.shorten(study.model, 60),
        "subject": f"{', '.join(map(str, numbers))} device{'s' * (numbers != [1])}",
        "status": "complete" if whole else "incomplete",
        "status_kind": "good" if whole else "warn",
        "facts": _facts(store),
        "tiles": [*_tiles(results), *(_convergence_tiles(trained) if trained else ())],
        "epochs": None if table.epochs is None else units.value(table.epochs),
        "dataset_size": table.dataset_size,
        "chosen": [(units.plural(devices, "device"), plan.strip()) for devices, plan in own_plans.items()],
        "commands": list(dict.fromkeys(session.command for session in store.sessions)),
        "machine": store.machine,
        "cluster": study.cluster.strip(),
        "recipe": dump(study.recipe).rstrip(),
    }


def _facts(store: Store) -> list[str]:
    study, machine = store.study, store.machine
    batch = f"batch {units.count(study.batch)}{' a device' if study.weak else ''}"
    started = next((session.started[:16].replace("T", " ") for session in store.sessions), "")
    facts = ["weak scaling" if study.weak else "strong scaling", batch, f"{machine['machine']}"]
    return [*facts, f"PyTorch {machine['torch']}", *([f"started {started} UTC"] if started else [])]


def _tiles(results: Results) -> list[Tile]:
    reference = results.reference
    if reference is None:
        return []
    rows = [row for row in results.rows if row.kind == CONVOY] or results.rows
    best = max([row for row in rows if row.devices > 1] or rows, key=lambda row: row.speedup)
    where = f"{units.shorten(best.name, 40)} on {units.plural(best.devices, 'device')}"
    if best.efficiency is None:
        where += f", over {units.shorten(reference.name, 40)} on {reference.devices}"
    spread = "" if best.speedup_spread is None else f"± {best.speedup_spread:.2f}, "
    tiles = [Tile("Best speed-up", f"{best.speedup:.2f}{units.SPACE}×", f"{spread}{where}", main=True)]
    if best.efficiency is not None:
        ideal = f"of {units.significant(best.ideal)} times one device"
        tiles.append(Tile("Efficiency", units.percent(best.efficiency, 0), ideal))
    if best.days is not None:
        base = f"{units.significant(reference.days)} on {units.plural(reference.devices, 'device')}"
        tiles.append(Tile("Days of training", units.significant(best.days), base))
    return tiles


def _convergence_tiles(trained: Convergence) -> list[Tile]:
    reference = trained.reference
    if not trained.compared or reference is None:
        return []
    of = "of test error from one device" if reference.devices == 1 else f"of test error from {reference.name}"
    return [Tile("Largest distance", points(max(curve.distance_error or 0.0 for curve in trained.compared)), of)]


# Part of its time by which a configuration, measured again, may differ before nothing follows from a study.
_RESTLESS = 0.25


def remarks(store: Store, results: Results) -> list[str]:
    """Sentences on how the table came to be, the most important first."""
    return [
        _devices(store),
        *_measuring(store.study, results),
        *(_unequal(store.study, results) if results.alone else ()),
        *_predictions(results),
        *_reference(results),
    ]


def doubts(results: Results) -> list[str]:
    """A warning where the same configuration took very different times, because of a busy machine."""
    spreads = [row.spread_s / row.step_s for row in results.rows if row.spread_s is not None]
    typical = statistics.median(spreads) if spreads else 0.0
    if typical < _RESTLESS:
        return []
    by = f"by {units.percent(typical, 0)}" if typical < 1 else "by more than its own time"
    return [
        "The machine was busy with other work, or too few rounds were measured: the same configuration, measured "
        f"again, may differ {by}. Neither speed-ups nor predictions can be judged by this study: measure again when "
        "nothing else runs, or with more --rounds."
    ]


def missing(outcome: Results | Convergence) -> list[str]:
    """Sentences on rows that could not be measured or trained, or have not been."""
    done, yet = ("measured", "measured") if isinstance(outcome, Results) else ("trained", "trained to the end")
    sentences = [f"{label} was not {done}: {reason.rstrip('.')}." for label, reason in outcome.failed]
    if outcome.waiting:
        sentences.append(f"Not {yet} yet: {', '.join(outcome.waiting)}; the same command goes on.")
    return sentences


def _devices(store: Store) -> str:
    study, machine = store.study, store.machine
    if study.cluster:
        speeds = ", ".join(units.significant(speed, 2) for speed in study.speeds)
        return f"The devices are emulated, each with a share of a core of this machine: {speeds}."
    if study.device_type != "cpu":
        return f"A device is a {machine['machine']}."
    cores = study.cores_per_device
    largest = max((row.devices for row in store.configurations), default=1)
    return (
        f"A device is {units.plural(cores, 'core')} of {machine['machine']}, also where it is alone: the machine has "
        f"{machine['cores']}, and {units.plural(largest, 'device')} at most."
    )


def _to(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _names(rows: Sequence[Named]) -> str:
    return ", ".join(row.where for row in rows)


def _measuring(study: StudyFacts, results: Results) -> Iterator[str]:
    batch = f"{units.count(study.batch)} images {'on each device' if study.weak else 'on all devices together'}"
    source = study.recipe["data"].get("path")
    if study.images is not None:
        source = f"made-up ones of {'×'.join(map(str, study.images.shape))} in memory"
    yield f"An update is {batch}, in microbatches of {_microbatch(study)} at most; the images are {source}."
    rounds = [row.rounds for row in results.rows]
    if max(rounds, default=0) < 2:
        yield "± needs two rounds at least."
    else:
        yield (
            f"Times are medians over {_to(rounds)} rounds, each in fresh processes and of the slowest rank. ± is what "
            "the same configuration, measured again, differs by at most in 95 of 100 cases (repeatability limit, ISO "
            "5725-6)."
        )
    if results.wall > 0:
        overhead = max((row.overhead_s / row.step_s for row in results.rows), default=0.0)
        yield (
            f"The measuring took {units.duration(results.wall)}: {units.percent(results.timed / results.wall, 0)} were "
            f"updates that count, {units.percent(results.planning / results.wall, 0)} planning, the rest starting, "
            f"building and warming up. Taking the time of parts makes an update at most {units.percent(overhead, 2)} "
            "longer."
        )
    difference = results.loss_difference
    if difference is not None:
        by = f"differs by {units.significant(difference, 2)} of itself at most" if difference else "is the same number"
        yield f"The first update's loss {by} in all rows of Convoy: they do the same work."


def _microbatch(study: StudyFacts) -> int:
    recipe = study.recipe
    return int(recipe["microbatch"] or -(-recipe["batch"] // recipe["microbatches"]))


def _unequal(study: StudyFacts, results: Results) -> Iterator[str]:
    speeds = results.alone
    rates = ", ".join(units.significant(speed) for speed in speeds)
    rows = [row for row in results.rows if row.kind == CONVOY and row.devices == len(speeds)]
    reached = ", ".join(f"{row.plan_label} {units.percent(row.images_per_s / sum(speeds), 0)}" for row in rows)
    yield (
        f"Alone the devices train {rates} images/s, {units.significant(sum(speeds))} together, which efficiency is "
        f"measured by{f': of that {reached}' if reached else ''}."
    )
    if coarse := too_coarse(study.batch, study.recipe["microbatches"] or -(-study.batch // _microbatch(study)), speeds):
        yield coarse


def _predictions(results: Results) -> Iterator[str]:
    """How good predictions were."""
    errors = [abs(row.prediction_error) for row in results.rows if row.prediction_error is not None]
    if not errors:
        return
    doubt = ", as far as times so different can tell" if doubts(results) else ""
    yield (
        f"The planner's {units.plural(len(errors), 'prediction')} of an update were off by "
        f"{units.percent(statistics.mean(errors))} in the mean, by {units.percent(max(errors), 0)} at most{doubt}; "
        "they were made before anything was measured, as if nothing else ran here."
    )


def _reference(results: Results) -> Iterator[str]:
    """What speed-up is over, where that is not the only row on one device."""
    reference = results.reference
    ones = [row for row in results.rows if row.devices == 1 and not row.place]
    if reference is None or ones == [reference]:
        return
    where = f"the fastest row on one device: {reference.plan_label}"
    if reference.devices > 1:
        where = (
            f"{reference.plan_label} on {reference.devices} devices, as nothing was measured on one, and efficiency is "
            "not known: a 1 in --devices adds it"
        )
    yield f"Speed-up is over {where}."


def convergence_remarks(convergence: Convergence) -> Iterator[str]:
    """Sentences on how far the curves are from each other, the most important first."""
    reference, compared = convergence.reference, convergence.compared
    if reference is None:
        return
    everyone = len(compared) + 1 == len(convergence.curves) and not convergence.failed and not convergence.waiting
    count = f"{'all ' if everyone else ''}{len(compared) + 1} configurations"
    if compared:
        yield _distance(convergence, reference, count)
    finished = [curve for curve in convergence.curves if curve.finished and curve is not reference]
    if reference.weights_sha256 and finished:
        yield _bits(convergence, reference, finished, count)
    if convergence.images and any(curve.distance_error for curve in compared):
        share = reference.test_error
        deviation = math.sqrt(share * (1 - share) / convergence.images)
        yield (
            f"To compare: {units.percent(share, units.percent_places(convergence.images))} of "
            f"{units.count(convergence.images)} test images is known to ± {points(deviation)} (one standard "
            f"deviation), and one image is {points(1 / convergence.images)}."
        )
    yield (
        f"Each configuration was trained once, for {units.value(convergence.epochs)} epochs from the same seed, by the "
        "trainer itself; its run is in the folder training. Time is that of the updates; evaluations and checkpoints "
        "are left out."
    )


def _distance(convergence: Convergence, reference: ErrorCurve, count: str) -> str:
    compared = convergence.compared
    curve = max(compared, key=lambda curve: curve.distance_error or 0.0)
    of_loss = max(compared, key=lambda curve: curve.distance_loss or 0.0)
    number = _to([curve.compared for curve in compared])
    base = "the serial run's" if reference.devices == 1 else f"those of {reference.where}"
    if not curve.distance_error and not of_loss.distance_loss:
        return (
            f"Over updates the curves are one: in all {number} evaluations of {count} test error and test loss are "
            f"{base} to the last bit, distance 0."
        )
    return (
        f"Over updates the test error is never farther from {base} than {points(curve.distance_error or 0.0)} "
        f"({curve.where}, after {units.count(curve.distance_error_at or 0)} updates), the test loss never farther than "
        f"{units.significant(of_loss.distance_loss, 2)} ({of_loss.where}, after "
        f"{units.count(of_loss.distance_loss_at or 0)}), over {number} "
        f"evaluations of {units.plural(len(compared), 'other configuration')}."
    )


def _bits(convergence: Convergence, reference: ErrorCurve, finished: Sequence[ErrorCurve], count: str) -> str:
    same = [curve for curve in finished if convergence.same_weights(curve)]
    if not same:
        return (
            "No final weights are the reference's bit for bit; reproducible=true makes them so under plans by sample."
        )
    checksum, unlike = f"SHA-256 {reference.weights_sha256}", [curve for curve in finished if curve not in same]
    if not unlike:
        return f"The final weights of {count} are the same bit for bit: {checksum}."
    return (
        f"The final weights of {_names(same)} are the reference's bit for bit, {checksum}; those of {_names(unlike)} "
        "are not."
    )
