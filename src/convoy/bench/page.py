"""The files of a study beside bench.json: the report as one HTML page, the tables, the pictures."""

import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

import convoy
from convoy import units
from convoy.bench.configuration import CONVOY, short
from convoy.bench.curves import Convergence, convergence
from convoy.bench.measurement import COMMUNICATION, INPUT, OPTIMIZER
from convoy.bench.plots import convergence_panels, panels
from convoy.bench.remarks import doubts, missing, remarks
from convoy.bench.results import Results, StudyRow, results
from convoy.bench.store import NAME, read
from convoy.bench.table import (
    CONVERGENCE_NUMBERS,
    convergence_csv,
    convergence_latex,
    convergence_lines,
    convergence_missing,
    convergence_remarks,
    csv_text,
    curves_csv,
    latex_text,
    plus_minus,
    points,
    signed,
)
from convoy.documents import dump
from convoy.errors import ConvoyError
from convoy.files import write_atomically
from convoy.report import axes, pages
from convoy.report.pages import data_uri, inline_svg
from convoy.report.plots import Panel
from convoy.report.report import COMPRESS_FROM, Download
from convoy.report.tiles import Tile
from convoy.units import seconds as time_of
from convoy.units import size

_KINDS = {"png": "image/png", "svg": "image/svg+xml", "csv": "text/csv", "tex": "application/x-tex"}


@dataclass(frozen=True)
class Drawn:
    """A picture, and the files of it: name and content."""

    panel: Panel
    files: Mapping[str, bytes]


def page(
    document: Mapping[str, Any],
    found: Results,
    trained: Convergence | None,
    pictures: Sequence[Drawn],
    files: Mapping[str, bytes],
) -> str:
    """The page as HTML.

    Args:
        document: of the study.
        found: its results.
        trained: its trainings, where there are any.
        pictures: in their order.
        files: others that are to be downloaded from the page: name and content.
    """
    return pages.render(
        "bench.html.jinja",
        ("report.css", "bench.css"),
        "report.js",
        **_content(document, found, trained, pictures, files),
    )


def _content(
    document: Mapping[str, Any],
    found: Results,
    trained: Convergence | None,
    pictures: Sequence[Drawn],
    files: Mapping[str, bytes],
) -> dict[str, Any]:
    study, table = document["study"], document["table"]
    numbers = sorted({row["devices"] for row in document["configurations"]})
    whole = not found.waiting and not found.failed and not (trained and (trained.waiting or trained.failed))
    return {
        "model": units.shorten(study["model"], 60),
        "devices": _devices(numbers),
        "status": "complete" if whole else "incomplete",
        "status_kind": "good" if whole else "warn",
        "facts": _facts(document, found),
        "tiles": [*_tiles(found), *(_convergence_tiles(trained) if trained else ())],
        "reference": _reference(found),
        "panels": [(one.panel, _inline(one.panel), _links(one.files)) for one in pictures],
        "rows": [_cells(row, found) for row in found.rows],
        "epochs": None if table["epochs"] is None else units.value(table["epochs"]),
        "dataset_size": table["dataset_size"],
        "timed": bool(found.rows) or trained is None,
        "remarks": remarks(document, found) if found.rows or trained is None else [],
        "trained": convergence_lines(trained) if trained else None,
        "trained_numbers": CONVERGENCE_NUMBERS,
        "trained_remarks": convergence_remarks(trained) if trained else [],
        "missing": [*doubts(found), *missing(found), *(convergence_missing(trained) if trained else ())],
        "notes": list(found.notes),
        "chosen": _chosen(found),
        "commands": list(dict.fromkeys(session["command"] for session in document["sessions"])),
        "machine": document["machine"],
        "cluster": study["cluster"].strip(),
        "downloads": [_download(name, content) for name, content in files.items()],
        "recipe": dump(study["recipe"]).rstrip(),
        "version": convoy.__version__,
    }


def _devices(numbers: Sequence[int]) -> str:
    if len(numbers) < 2:
        return units.plural(numbers[0] if numbers else 1, "device")
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]} devices"


def _facts(document: Mapping[str, Any], found: Results) -> list[str]:
    study, machine = document["study"], document["machine"]
    batch = f"batch {units.count(study['batch'])}{' a device' if study['weak'] else ''}"
    started = next((session["started"][:16].replace("T", " ") for session in document["sessions"]), "")
    facts = ["weak scaling" if study["weak"] else "strong scaling", batch, f"{machine['machine']}"]
    facts += [f"PyTorch {machine['torch']}", f"started {started} UTC" if started else ""]
    return [fact for fact in facts if fact]


def _reference(found: Results) -> str:
    if found.reference is None:
        return "one device"
    if sum(row.devices == 1 and not row.place for row in found.rows) == 1:
        return "one device"
    if found.reference.devices == 1:
        return f"the fastest row on one device ({short(found.reference.label)})"
    return f"{short(found.reference.label)}, as nothing was measured on one device"


def _tiles(found: Results) -> list[Tile]:
    """The best row, and what it means."""
    if not found.rows:
        return []
    own = [row for row in found.rows if row.kind == CONVOY] or found.rows
    best = max([row for row in own if row.devices > 1] or own, key=lambda row: row.speedup)
    where = f"{units.shorten(short(best.label), 40)} on {units.plural(best.devices, 'device')}"
    one = found.reference
    if best.efficiency is None and one is not None:
        where += f", over {units.shorten(short(one.label), 40)} on {one.devices}"
    spread = "" if best.speedup_spread is None else f"± {best.speedup_spread:.2f}, "
    tiles = [Tile("Best speed-up", f"{best.speedup:.2f}{units.SPACE}×", f"{spread}{where}", main=True)]
    if best.efficiency is not None:
        ideal = f"of {units.significant(best.ideal)} times one device"
        tiles.append(Tile("Efficiency", units.percent(best.efficiency, 0), ideal))
    tiles.append(Tile("Images per second", units.significant(best.images_per_s), where))
    if best.days is not None:
        alone = f"{units.significant(one.days)} on {units.plural(one.devices, 'device')}" if one is not None else ""
        tiles.append(Tile("Days of training", units.significant(best.days), alone))
    return tiles


def _convergence_tiles(trained: Convergence) -> list[Tile]:
    """How far the curves are from each other."""
    worst, reference = trained.worst_error, trained.reference
    if worst is None or worst.distance is None or reference is None:
        return []
    of = "of test error from one device" if reference.devices == 1 else f"of test error from {short(reference.label)}"
    if all(trained.same_weights(curve) for curve in trained.others):
        of += ", and the same weights bit for bit"
    return [Tile("Largest distance", points(worst.distance.error), of)]


def _cells(row: StudyRow, found: Results) -> dict[str, Any]:
    best = max(found.rows, key=lambda one: one.speedup)
    step, _, spread = plus_minus(row.seconds, row.spread).partition(" ± ")
    if spread:
        step = f"{step} {spread.partition(' ')[2]}"
    look = [word for word, holds in (("best", row is best), ("peer", row.kind != CONVOY)) if holds]
    previous = found.rows[found.rows.index(row) - 1] if row is not found.rows[0] else row
    look += ["group"] if previous.devices != row.devices else []
    return {
        "look": " ".join(look),
        "label": short(row.label),
        "plan": _own_plan(row),
        "devices": row.devices,
        "step": step,
        "spread": spread.partition(" ")[0],
        "images": units.significant(row.images_per_s),
        "speedup": f"{row.speedup:.2f}",
        "speedup_spread": "" if row.speedup_spread is None else f"{row.speedup_spread:.2f}",
        "efficiency": units.percent(row.efficiency, 0),
        "days": None if row.days is None else units.significant(row.days),
        "exposed": _or_none(row.parts[COMMUNICATION]),
        "wait": _or_none(row.parts[INPUT]),
        "optimizer": _or_none(row.parts[OPTIMIZER]),
        "memory": size(row.memory),
        "predicted": units.UNKNOWN if row.predicted is None else time_of(row.predicted),
        "error": "" if row.error is None else signed(row.error),
    }


def _own_plan(row: StudyRow) -> str:
    """The plan that the planner took, where it has a line of its own."""
    if row.plan is None or not row.label.startswith("auto"):
        return ""
    return "layer by layer, below" if "\n" in row.plan else row.plan


def _chosen(found: Results) -> list[tuple[str, str]]:
    """The plans of `auto` that are too long for the table, by devices."""
    plans = {
        row.devices: row.plan for row in found.rows if row.plan is not None and "\n" in row.plan and _own_plan(row)
    }
    return [(units.plural(devices, "device"), plan.strip()) for devices, plan in plans.items()]


def _or_none(seconds: float) -> str:
    return units.UNKNOWN if seconds <= 0 else time_of(seconds)


def _inline(panel: Panel) -> Markup | None:
    if panel.figure is None:
        return None
    return Markup(inline_svg(panel.figure, panel.name, panel.title, panel.description))  # markup of our own making


def _links(files: Mapping[str, bytes]) -> list[tuple[str, str]]:
    return [(name, data_uri(content, _KINDS[name.rpartition(".")[2]])) for name, content in files.items()]


def _download(name: str, content: bytes) -> Download:
    length = units.prefixed(len(content), "B")
    if len(content) >= COMPRESS_FROM:
        return Download(
            f"{name}.gz", f"{length}, packed", data_uri(gzip.compress(content, mtime=0), "application/gzip")
        )
    return Download(name, length, data_uri(content, _KINDS.get(name.rpartition(".")[2], "application/json")))


DPI = 300


@dataclass(frozen=True)
class Written:
    """A study's results, what its trainings came to, what is to be said of them, and the report."""

    results: Results
    convergence: Convergence | None
    remarks: list[str]
    report: Path


def write_files(folder: Path) -> Written:
    """Write all files of the study in a folder, as far as it was measured.

    Raises:
        ConvoyError: there is no study, or they cannot be written.
    """
    document = read(folder)
    table = document["table"]
    found = results(document, table["epochs"], table["dataset_size"])
    trained = convergence(document)
    timed = bool(found.rows) or trained is None
    drawn = [*(panels(found) if timed else ()), *(convergence_panels(trained) if trained is not None else ())]
    pictures = [_drawn(panel) for panel in drawn]
    tables = {"table.csv": csv_text(found), "table.tex": latex_text(found, document)} if timed else {}
    said = [*doubts(found), *remarks(document, found), *missing(found)] if timed else missing(found)
    if trained is not None:
        tables |= {
            "convergence.csv": convergence_csv(trained),
            "convergence.tex": convergence_latex(trained, document),
            "curves.csv": curves_csv(trained),
        }
        said += [*convergence_remarks(trained), *convergence_missing(trained)]
    encoded = {name: text.encode() for name, text in tables.items()}
    raw = {NAME: (folder / NAME).read_bytes(), **encoded}
    html = page(document, found, trained, pictures, raw)
    files = {**encoded, "report.html": html.encode("utf-8", errors="replace")}
    for one in pictures:
        files |= one.files
    try:
        _write(folder, files)
    except OSError as error:
        raise ConvoyError(f"{folder} cannot be written ({error.strerror}): free space there, or copy it") from error
    return Written(found, trained, said, folder / "report.html")


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        write_atomically(folder / name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]


def _drawn(panel: Panel) -> Drawn:
    if panel.figure is None:
        return Drawn(panel, {})
    return Drawn(panel, {f"{panel.name}.{kind}": _saved(panel.figure, kind) for kind in ("svg", "png")})


def _saved(figure: Figure, kind: str) -> bytes:
    """A picture as a file: on white, with the text as text."""
    written = io.BytesIO()
    about: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with axes.house_style():
        figure.savefig(written, format=kind, dpi=DPI, metadata=about)
    return written.getvalue()
