"""How far the curves of a study are from each other, from trainings whose numbers are known."""

import csv
import io
import json
from pathlib import Path

import pytest

from bench.made_study import study, write_study, write_trainings
from convoy.bench.curves import Convergence, convergence
from convoy.bench.records import Training
from convoy.bench.remarks import convergence_remarks, missing
from convoy.bench.store import Store
from convoy.bench.table import convergence_latex, convergence_lines, convergence_records, csv_of, curve_records
from convoy.bench.training_runs import add_evaluations, recipe_for_training
from convoy.errors import ConvoyError
from convoy.training import load_recipe

PLANS = ("sample", "filter")


def found(folder: Path, **changes: object) -> Convergence:
    write_trainings(write_study(folder, devices=(1, 2), plans=PLANS, peers=()), **changes)  # type: ignore[arg-type]
    curves = convergence(Store.read(folder))
    assert curves is not None
    return curves


def test_the_largest_distance_is_over_all_evaluations_and_rows(tmp_path: Path) -> None:
    curves = found(tmp_path)
    assert curves.reference is not None and curves.reference.label == "one device"
    (_, distance) = max(curves.compared, key=lambda one: one[1].error)
    assert [curve.label for curve, _ in curves.compared] == ["sample=2", "filter=2"]
    assert (distance.error, distance.error_at) == (pytest.approx(2e-3), 500)
    assert (distance.loss, distance.loss_at) == (pytest.approx(4e-3), 400)
    said = " ".join(convergence_remarks(curves)).replace("\u202f", " ")
    assert "never farther from the serial run's than 0.20 points (filter=2, after 500 updates)" in said
    assert "the test loss never farther than 0.0040 (filter=2, after 400), over 10 evaluations" in said
    assert "No final weights are the reference's bit for bit" in said
    assert "one image is 0.010 points" in said


def test_bits_are_said_as_such(tmp_path: Path) -> None:
    curves = found(tmp_path, same=["sample=2 on 2", "filter=2 on 2"])
    said = " ".join(convergence_remarks(curves))
    assert "distance 0" in said and "to the last bit" in said
    assert f"The final weights of all 3 configurations are the same bit for bit: SHA-256 {0:064x}" in said
    assert "To compare" not in said


def test_only_curves_that_share_evaluations_are_compared(tmp_path: Path) -> None:
    found(tmp_path, same=["sample=2 on 2", "filter=2 on 2"])
    path = tmp_path / "bench.json"
    written = json.loads(path.read_text())
    _, _, filtered = (row["training"] for row in written["configurations"])
    for one in filtered["evaluations"]:
        one["step"] += 50  # between those of the others
    path.write_text(json.dumps(written))
    curves = convergence(Store.read(tmp_path))
    assert curves is not None
    said = " ".join(convergence_remarks(curves))
    assert "in all 10 evaluations of 2 configurations" in said
    assert "Not compared, as no evaluation was after as many updates: filter=2." in said
    assert [line["final weights"] for line in convergence_lines(curves)].count("the reference") == 1
    for one in filtered["evaluations"]:
        one["step"] -= 50
    del filtered["evaluations"][4:]
    path.write_text(json.dumps(written))
    curves = convergence(Store.read(tmp_path))
    assert curves is not None
    assert "in all 4 to 10 evaluations of all 3 configurations" in " ".join(convergence_remarks(curves))


def test_a_training_without_any_number_has_no_curve(tmp_path: Path) -> None:
    found(tmp_path)
    path = tmp_path / "bench.json"
    written = json.loads(path.read_text())
    for one in written["configurations"][2]["training"]["evaluations"]:
        one["loss"] = None  # as one that was infinite
    path.write_text(json.dumps(written))
    curves = convergence(Store.read(tmp_path))
    assert curves is not None
    assert len(convergence_lines(curves)) == len(curves.curves) == 2


def test_rows_with_other_bits_are_named(tmp_path: Path) -> None:
    curves = found(tmp_path, same=["sample=2 on 2"])
    said = " ".join(convergence_remarks(curves))
    assert "The final weights of sample=2 are the reference's bit for bit" in said
    assert "those of filter=2 are not" in said
    assert [line["final weights"] for line in convergence_lines(curves)] == [
        "the reference",
        "the same bits",
        "other bits",
    ]


def test_equal_curves_with_other_weights_are_not_called_the_same_bits(tmp_path: Path) -> None:
    found(tmp_path, apart=1e-15)
    path = tmp_path / "bench.json"
    written = json.loads(path.read_text())
    evaluations = written["configurations"][0]["training"]["evaluations"]
    for row in written["configurations"]:
        row["training"]["evaluations"] = evaluations
    path.write_text(json.dumps(written))
    curves = convergence(Store.read(tmp_path))
    assert curves is not None
    assert "are the same bit for bit" not in " ".join(convergence_remarks(curves))
    assert not any(curves.same_weights(curve) for curve, _ in curves.compared)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    curves = found(tmp_path, finished=False, failed=["filter=2 on 2"])
    first, second = missing(curves)
    assert first == "filter=2 on 2 devices was not trained: a layer is odd: use another."
    assert "one device on 1 device, sample=2 on 2 devices; the same command goes on" in second
    assert [curve.label for curve in curves.curves] == ["one device", "sample=2"]


def test_tables(tmp_path: Path) -> None:
    curves = found(tmp_path)
    rows = list(csv.DictReader(io.StringIO(csv_of(convergence_records(curves)))))
    assert [float(row["distance_error"] or 0) for row in rows] == pytest.approx([0, 1e-3, 2e-3])
    assert len(curve_records(curves)) == 30
    assert convergence_latex(curves, Store.read(tmp_path)).count(r"\\") == 4


def test_time_is_that_of_training_alone(tmp_path: Path) -> None:
    lines = [
        {"split": "train", "step": 10, "images_per_s": 100.0, "time_s": 5.0},
        {"split": "test", "step": 15, "top1": 0.5, "loss": 1.0, "images": 40, "time_s": 50.0},
        {"split": "train", "step": 20, "images_per_s": 50.0, "time_s": 90.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    kept = Training()
    add_evaluations(kept, tmp_path, batch=20)
    (evaluation,) = kept.evaluations
    assert (evaluation.step, evaluation.error, evaluation.loss, evaluation.train_s) == (15, 0.5, 1.0, 4.0)
    assert (kept.images, kept.sha256) == (40, "")


def test_another_length_is_refused(tmp_path: Path) -> None:
    write_trainings(write_study(tmp_path))
    store = Store.open(tmp_path, study(), {})
    store.begin_training(5.0)
    with pytest.raises(ConvoyError, match="trainings of 5 epochs, which --train-epochs 6"):
        store.begin_training(6.0)


def test_short_trainings_are_evaluated_often() -> None:
    recipe = load_recipe("default", ["model.name=lenet", "data.path=mnist-mini"])
    assert str(recipe_for_training(recipe, 3, said=False).evaluate_every) == "5%"
    assert str(recipe_for_training(recipe, 3, said=True).evaluate_every) == "1ep"
    assert str(recipe_for_training(recipe, 30, said=False).evaluate_every) == "1ep"
    assert str(recipe_for_training(recipe, 0.5, said=True).epochs) == "0.5ep"
