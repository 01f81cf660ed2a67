"""The files of a study beside bench.json: the report as one HTML page, the tables, the pictures."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from convoy import units
from convoy.bench.plots import convergence_panels, panels
from convoy.bench.records import CONVOY, NAME, Store
from convoy.bench.remarks import convergence_remarks, doubts, missing, remarks
from convoy.bench.results import Convergence, Results, StudyRow, convergence
from convoy.bench.table import TEXTS, Table, of_trainings, of_updates, points
from convoy.documents import dump
from convoy.errors import ConvoyError
from convoy.files import csv_of, write_atomically
from convoy.report import axes, pages
from convoy.report.pages import KINDS, Download, Panel, Tile, data_uri

DPI = 300


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
        texts |= {"table.csv": tables["configurations"].csv(), "table.tex": tables["configurations"].latex()}
        of_times = remarks(store, results)
    if trained is not None:
        table = tables["convergence"] = of_trainings(trained, store)
        drawn += convergence_panels(trained)
        texts |= {"convergence.csv": table.csv(), "convergence.tex": table.latex()}
        texts["curves.csv"] = csv_of([test for curve in trained.curves for test in curve.records])
        of_trained, untrained = list(convergence_remarks(trained)), missing(trained)
    files = {name: text.encode() for name, text in texts.items()}
    downloads = [Download.of(name, content) for name, content in {NAME: store.path.read_bytes(), **files}.items()]
    figures = []
    for panel in drawn:
        pictures = _files(panel)
        files |= pictures
        uris = [(name, data_uri(content, KINDS[name.rpartition(".")[2]])) for name, content in pictures.items()]
        figures.append((panel, panel.svg(), uris))
    html = pages.render(
        "bench.html.jinja",
        ("report.css", "bench.css"),
        ("copy.js",),
        **_content(store, results, trained),
        timed=is_timed,
        table=_shown(tables["configurations"], _names(results.rows)),
        remarks=of_times,
        trained=_shown(tables["convergence"]) if trained is not None else None,
        trained_remarks=of_trained,
        missing=[*warnings, *gaps, *untrained],
        panels=figures,
        downloads=downloads,
    )
    files["report.html"] = html.encode("utf-8", errors="replace")
    try:
        for name, content in files.items():
            write_atomically(folder / name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]
    except OSError as error:
        raise ConvoyError(f"{folder} cannot be written ({error.strerror}): free space there, or copy it") from error
    return Written(tables, [*warnings, *of_times, *gaps, *of_trained, *untrained], folder / "report.html")


def _files(panel: Panel) -> dict[str, bytes]:
    """A picture as files: on white, with the text as text."""
    files = {}
    for kind, metadata in {"svg": {"Date": None}, "png": {"Software": None}}.items():
        if panel.figure is not None:
            written = io.BytesIO()
            with axes.house_style():
                panel.figure.savefig(written, format=kind, dpi=DPI, metadata=metadata)
            files[f"{panel.name}.{kind}"] = written.getvalue()
    return files


def _names(rows: Sequence[StudyRow]) -> list[tuple[str, str, str]]:
    """The name of each row on the page, the plan that stands below it, and its look."""
    best, previous_rows, names = max(rows, key=lambda row: row.speedup, default=None), rows[:1], []
    for row in rows:
        looks = {"best": row is best, "peer": row.kind != CONVOY, "group": previous_rows[0].devices != row.devices}
        plan = "layer by layer, below" if "\n" in row.found_plan else row.found_plan
        names.append((row.name, plan, " ".join(look for look, holds in looks.items() if holds)))
        previous_rows = [row]
    return names


# A number, what it may differ by, its unit, and by how much a prediction is off.
_CELL = re.compile(r"([^ ]+)(?: (± [^ ]+))?( [^ ]+)?(?: \((.*)\))?")


def _shown(table: Table, names: Sequence[tuple[str, str, str]] = ()) -> dict[str, Any]:
    """A table for the page: what is less important is small, and stands last in a cell."""

    def cell(word: str, text: str) -> tuple[str, Markup | str]:
        match = _CELL.fullmatch(units.UNKNOWN if text == "-" else text)
        if word in TEXTS or match is None:
            return "", text
        number, spread, unit, error = match.groups()
        small = Markup(" <small>{}</small>").format(spread or error) if spread or error else ""
        return f"number{' speedup' * (word == 'speed-up')}", Markup("{}{}{}").format(number, unit or "", small)

    words = list(table.rows[0]) if table.rows else []
    titles = {"step": "An update", "exposed": Markup("Exposed com&shy;munication")}
    names = names or [(next(iter(row.values())), "", "") for row in table.rows]
    rows = [(*of, [cell(word, row[word]) for word in words[1:]]) for of, row in zip(names, table.rows, strict=True)]
    return {
        "columns": [("" if word in TEXTS else "#") + titles.get(word, word.capitalize()) for word in words],
        "rows": rows,
    }


def _content(store: Store, results: Results, trained: Convergence | None) -> dict[str, Any]:
    study, table = store.study, store.table
    whole = not any((part.waiting or part.failed) for part in (results, trained) if part is not None)
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
    tiles.append(Tile("Images per second", units.significant(best.images_per_s), where))
    if best.days is not None:
        base = f"{units.significant(reference.days)} on {units.plural(reference.devices, 'device')}"
        tiles.append(Tile("Days of training", units.significant(best.days), base))
    return tiles


def _convergence_tiles(trained: Convergence) -> list[Tile]:
    reference = trained.reference
    if not trained.compared or reference is None:
        return []
    of = "of test error from one device" if reference.devices == 1 else f"of test error from {reference.name}"
    if all(map(trained.same_weights, trained.compared)):
        of += ", and the same weights bit for bit"
    return [Tile("Largest distance", points(max(curve.distance_error or 0.0 for curve in trained.compared)), of)]
