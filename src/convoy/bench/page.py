"""The files of a study beside bench.json: the report as one HTML page, the tables, the pictures."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy import units
from convoy.bench.plots import convergence_panels, panels
from convoy.bench.records import COMMUNICATION, CONVOY, INPUT, NAME, OPTIMIZER, Store
from convoy.bench.remarks import convergence_remarks, doubts, missing, remarks
from convoy.bench.results import Convergence, Results, StudyRow, convergence
from convoy.bench.table import (
    NUMBERS,
    Table,
    csv_of,
    curve_records,
    of_trainings,
    of_updates,
    points,
    signed,
    with_spread,
)
from convoy.documents import dump
from convoy.errors import ConvoyError
from convoy.files import write_atomically
from convoy.report import axes, pages
from convoy.report.pages import KINDS, Download, Panel, Tile, data_uri
from convoy.units import seconds as time_of

DPI = 300
_SHOWN_PARTS = (COMMUNICATION, INPUT, OPTIMIZER)


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
    warnings, gaps, training_gaps = doubts(results), missing(results), list[str]()
    timed_remarks, trained_remarks = list[str](), list[str]()
    if is_timed := bool(results.rows) or trained is None:
        drawn += panels(results)
        texts |= {"table.csv": tables["configurations"].csv(), "table.tex": tables["configurations"].latex()}
        timed_remarks = remarks(store, results)
    if trained is not None:
        table = tables["convergence"] = of_trainings(trained, store)
        drawn += convergence_panels(trained)
        texts |= {"convergence.csv": table.csv(), "convergence.tex": table.latex()}
        texts["curves.csv"] = csv_of(curve_records(trained))
        trained_remarks, training_gaps = list(convergence_remarks(trained)), missing(trained)
    rows = tables["convergence"].rows if trained is not None else None
    files = {name: text.encode() for name, text in texts.items()}
    downloads = [Download.of(name, one) for name, one in {NAME: store.path.read_bytes(), **files}.items()]
    shown = []
    for panel in drawn:
        pictures = _files(panel)
        files |= pictures
        uris = [(name, data_uri(one, KINDS[name.rpartition(".")[2]])) for name, one in pictures.items()]
        shown.append((panel, panel.svg(), uris))
    html = pages.render(
        "bench.html.jinja",
        ("report.css", "bench.css"),
        ("copy.js",),
        **_content(store, results, trained),
        timed=is_timed,
        remarks=timed_remarks,
        trained=rows,
        trained_columns=[f"{'#' if word in NUMBERS else ''}{word.capitalize()}" for word in (rows or [{}])[0]],
        trained_remarks=trained_remarks,
        missing=[*warnings, *gaps, *training_gaps],
        panels=shown,
        downloads=downloads,
    )
    files["report.html"] = html.encode("utf-8", errors="replace")
    try:
        for name, one in files.items():
            write_atomically(folder / name, lambda path, one=one: path.write_bytes(one))  # type: ignore[misc]
    except OSError as error:
        raise ConvoyError(f"{folder} cannot be written ({error.strerror}): free space there, or copy it") from error
    sentences = [*warnings, *timed_remarks, *gaps, *trained_remarks, *training_gaps]
    return Written(tables, sentences, folder / "report.html")


def _files(panel: Panel) -> dict[str, bytes]:
    """A picture as files: on white, with the text as text."""
    files = {}
    about: Mapping[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {"Software": None}}
    for kind, metadata in about.items() if panel.figure is not None else ():
        assert panel.figure is not None
        written = io.BytesIO()
        with axes.house_style():
            panel.figure.savefig(written, format=kind, dpi=DPI, metadata=metadata)
        files[f"{panel.name}.{kind}"] = written.getvalue()
    return files


def _content(store: Store, results: Results, trained: Convergence | None) -> dict[str, Any]:
    study, table = store.study, store.table
    whole = not any((one.waiting or one.failed) for one in (results, trained) if one is not None)
    own_plans = {row.devices: row.found_plan for row in results.rows if "\n" in row.found_plan}
    return {
        "name": "scaling study",
        "title": units.shorten(study.model, 60),
        "subject": _devices(sorted({row.devices for row in store.configurations})),
        "status": "complete" if whole else "incomplete",
        "status_kind": "good" if whole else "warn",
        "facts": _facts(store),
        "tiles": [*_tiles(results), *(_convergence_tiles(trained) if trained else ())],
        "reference": _reference(results),
        "rows": [(row, _cells(row, results)) for row in results.rows],
        "epochs": None if table.epochs is None else units.value(table.epochs),
        "dataset_size": table.dataset_size,
        "notes": results.notes,
        "chosen": [(units.plural(devices, "device"), plan.strip()) for devices, plan in own_plans.items()],
        "commands": list(dict.fromkeys(session.command for session in store.sessions)),
        "machine": store.machine,
        "cluster": study.cluster.strip(),
        "recipe": dump(study.recipe).rstrip(),
    }


def _devices(numbers: list[int]) -> str:
    if len(numbers) < 2:
        return units.plural(numbers[0] if numbers else 1, "device")
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]} devices"


def _facts(store: Store) -> list[str]:
    study, machine = store.study, store.machine
    batch = f"batch {units.count(study.batch)}{' a device' if study.weak else ''}"
    started = next((session.started[:16].replace("T", " ") for session in store.sessions), "")
    facts = ["weak scaling" if study.weak else "strong scaling", batch, f"{machine['machine']}"]
    return [*facts, f"PyTorch {machine['torch']}", *([f"started {started} UTC"] if started else [])]


def _reference(results: Results) -> str:
    reference = results.reference
    if reference is None or results.has_one_reference:
        return "one device"
    if reference.devices == 1:
        return f"the fastest row on one device ({reference.name})"
    return f"{reference.name}, as nothing was measured on one device"


def _tiles(results: Results) -> list[Tile]:
    if not results.rows:
        return []
    rows = [row for row in results.rows if row.kind == CONVOY] or results.rows
    best = max([row for row in rows if row.devices > 1] or rows, key=lambda row: row.speedup)
    where = f"{units.shorten(best.name, 40)} on {units.plural(best.devices, 'device')}"
    one = results.reference
    if best.efficiency is None and one is not None:
        where += f", over {units.shorten(one.name, 40)} on {one.devices}"
    spread = "" if best.speedup_spread is None else f"± {best.speedup_spread:.2f}, "
    tiles = [Tile("Best speed-up", f"{best.speedup:.2f}{units.SPACE}×", f"{spread}{where}", main=True)]
    if best.efficiency is not None:
        ideal = f"of {units.significant(best.ideal)} times one device"
        tiles.append(Tile("Efficiency", units.percent(best.efficiency, 0), ideal))
    tiles.append(Tile("Images per second", units.significant(best.images_per_s), where))
    if best.days is not None:
        base = f"{units.significant(one.days)} on {units.plural(one.devices, 'device')}" if one is not None else ""
        tiles.append(Tile("Days of training", units.significant(best.days), base))
    return tiles


def _convergence_tiles(trained: Convergence) -> list[Tile]:
    reference = trained.reference
    if not trained.compared or reference is None:
        return []
    of = "of test error from one device" if reference.devices == 1 else f"of test error from {reference.name}"
    if all(trained.same_weights(curve) for curve, _ in trained.compared):
        of += ", and the same weights bit for bit"
    return [Tile("Largest distance", points(max(distance.error for _, distance in trained.compared)), of)]


def _cells(row: StudyRow, results: Results) -> dict[str, Any]:
    best = max(results.rows, key=lambda one: one.speedup)
    number, spread, unit = with_spread(row.seconds, row.spread)
    before = results.rows[max(0, results.rows.index(row) - 1)]
    looks = {"best": row is best, "peer": row.kind != CONVOY, "group": before.devices != row.devices}
    return {
        "look": " ".join(look for look, holds in looks.items() if holds),
        "plan": "layer by layer, below" if "\n" in row.found_plan else row.found_plan,
        "step": f"{number} {unit}",
        "spread": spread,
        "parts": [time_of(row.parts[name]) if row.parts[name] > 0 else units.UNKNOWN for name in _SHOWN_PARTS],
        "error": "" if row.error is None else signed(row.error),
    }
