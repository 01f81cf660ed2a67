"""The numbers and sentences of a table and of curves, from documents whose numbers are known."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from bench.made_study import document, measure, new_store, rewrite, write_study, write_trainings
from convoy.bench.ask import configurations
from convoy.bench.page import convergence_remarks
from convoy.bench.records import Store
from convoy.bench.results import Convergence, Results, convergence, of_trainings
from convoy.errors import ConvoyError
from convoy.files import csv_of
from convoy.units import SPACE


def exact(folder: Path, times: dict[str, list[float]], **changes: object) -> Results:
    """Of a study of one device and two, with the times of its rounds by key."""
    store = new_store(folder, **changes)
    rows = {row.key: row for row in configurations([1, 2], ["sample"], ["ddp"])}
    for row in store.add([rows[key] for key in times]):
        for number, seconds in enumerate(times[row.key], 1):
            measure(row, number, seconds)
    return Results(store)


def test_speed_up_efficiency_and_days(tmp_path: Path) -> None:
    one, two = exact(tmp_path / "a", {"serial on 1": [0.2, 0.1, 0.3], "sample=2 on 2": [0.125, 0.1, 0.2]}).rows
    assert (one.step_s, two.step_s) == (0.2, 0.125)
    assert (two.images_per_s, two.speedup, two.efficiency) == pytest.approx((64 / 0.125, 1.6, 0.8))
    assert two.days == pytest.approx(2 * 6400 / 512 / 86_400)
    assert (one.speedup, one.speedup_spread) == (1, None) and two.speedup_spread is not None
    assert sum(two.parts.values()) == pytest.approx(two.step_s)
    assert two.parts["communication"] == pytest.approx(0.0125)  # of the busiest rank
    assert two.memory_bytes == 10**8 + 1  # of the one that needs most
    weak = exact(tmp_path / "b", {"serial on 1": [0.2], "sample=2 on 2": [0.25]}, weak=True).rows[1]
    assert (weak.batch, weak.speedup) == (128, pytest.approx(1.6))
    unequal = exact(tmp_path / "c", {"serial on 1": [0.2], "sample=2 on 2": [0.16]}, speeds=[0.8, 0.4]).rows[1]
    assert (unequal.ideal, unequal.efficiency) == pytest.approx((1.5, 1.25 / 1.5))


def test_spreadsheets_find_no_formula() -> None:
    for text in ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)"):
        (row,) = csv.DictReader(io.StringIO(csv_of([{"configuration": text, "step_s": "-0.500000"}]), newline=""))
        assert row == {"configuration": f"'{text}", "step_s": "-0.500000"}
    assert csv_of([{"configuration": "\t=1\r=2\x1b"}]) == "configuration\n\\t=1\\r=2\\x1b\n"


# How far the curves of a study are from each other.


def curves_of(folder: Path, **changes: Any) -> tuple[Convergence, str]:
    """Curves of one device, sample=2 and filter=2, and what is said of them."""
    write_trainings(write_study(folder, devices=(1, 2), plans=("sample", "filter"), peers=()), **changes)
    curves = convergence(Store.read(folder))
    assert curves is not None
    return curves, " ".join(convergence_remarks(curves)).replace(SPACE, " ")


def test_the_largest_distance_is_over_all_evaluations_and_rows(tmp_path: Path) -> None:
    curves, words = curves_of(tmp_path / "study")
    furthest = max(curves.compared, key=lambda curve: curve.distance_error or 0.0)
    assert [curve.name for curve in curves.compared] == ["sample=2", "filter=2"]
    assert (furthest.distance_error, furthest.distance_error_at) == (pytest.approx(2e-3), 500)
    assert (furthest.distance_loss, furthest.distance_loss_at) == (pytest.approx(4e-3), 400)
    assert "never farther from the serial run's than 0.20 points (filter=2, after 500 updates)" in words
    assert "the test loss never farther than 0.0040 (filter=2, after 400), over 10 evaluations" in words
    assert "No final weights are the reference's bit for bit" in words
    rows = list(csv.DictReader(io.StringIO(of_trainings(curves, Store.read(tmp_path / "study")).csv())))
    assert [float(row["distance_error"] or 0) for row in rows] == pytest.approx([0, 1e-3, 2e-3])
    assert sum(len(curve.records) for curve in curves.curves) == 30
    _, words = curves_of(tmp_path / "same", same=["sample=2 on 2", "filter=2 on 2"])
    assert "in all 10 evaluations of all 3 configurations test error and test loss are the serial run's" in words
    assert f"The final weights of all 3 configurations are the same bit for bit: SHA-256 {0:064x}." in words
    _, words = curves_of(tmp_path / "one", same=["sample=2 on 2"])
    assert "final weights of sample=2 are the reference's bit for bit" in words and "filter=2 are not" in words


def test_what_is_no_study_is_said_with_what_it_lacks(tmp_path: Path) -> None:
    whole, words = document(write_study(tmp_path)), "is no study of convoy bench, or damaged"
    refused: list[tuple[Any, str]] = [([], f"{words}: name")]
    refused += [(whole | {"format": "other"}, "of another kind or version")]
    refused += [(whole | {"schema": 2}, r"\({'schema': 2}\): use the Convoy that wrote it")]
    refused += [({key: whole[key] for key in whole if key != "study"}, rf"{words} \(study: Field required\)")]
    refused += [(whole | {"configurations": [{}]}, rf"{words} \(configurations.0.key: Field required\)")]
    for content, sentence in refused:
        with pytest.raises(ConvoyError, match=sentence):
            rewrite(tmp_path, content)
