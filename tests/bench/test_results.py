"""The numbers and sentences of a table and of curves, from documents whose numbers are known."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.made_study import (
    AUTO,
    MADE,
    RECIPE,
    add_measurement,
    document,
    new_store,
    ranks,
    write_study,
    write_trainings,
)
from convoy.bench.ask import configurations
from convoy.bench.page import write_files
from convoy.bench.records import Forecast, PlanPrediction, Store, Training
from convoy.bench.remarks import convergence_remarks, missing, remarks
from convoy.bench.results import Convergence, Results, convergence, repeatability
from convoy.bench.study import plain_recipe
from convoy.bench.table import (
    convergence_latex,
    convergence_lines,
    convergence_records,
    csv_of,
    curve_records,
    escaped,
    latex_text,
    lines,
    plus_minus,
    records,
)
from convoy.bench.training_runs import add_evaluations, recipe_for_training
from convoy.units import SPACE


def exact(folder: Path, times: dict[str, list[float]], **changes: object) -> tuple[Store, Results]:
    """A study of one device and two, with the times of its rounds by key."""
    store = new_store(folder, **changes)
    rows = {row.key: row for row in configurations([1, 2], ["sample"], ["ddp"])}
    for row in store.add([rows[key] for key in times]):
        for number, seconds in enumerate(times[row.key], 1):
            add_measurement(row, number, ranks(seconds, row.devices, peer=row.kind == "ddp"))
    store.spent(10.0, 1.0)
    return store, Results(store)


def test_speed_up_efficiency_and_days(tmp_path: Path) -> None:
    _, results = exact(tmp_path / "a", {"serial on 1": [0.2, 0.1, 0.3], "sample=2 on 2": [0.125, 0.1, 0.2]})
    one, two = results.rows
    assert (one.seconds, two.seconds) == (0.2, 0.125)
    assert (two.images_per_s, two.speedup, two.efficiency) == pytest.approx((64 / 0.125, 1.6, 0.8))
    assert two.days == pytest.approx(2 * 6400 / 512 / 86_400)
    assert (one.speedup, one.speedup_spread) == (1, None) and two.speedup_spread is not None
    assert sum(two.parts.values()) == pytest.approx(two.seconds)
    assert two.parts["communication"] == pytest.approx(0.0125)  # of the busiest rank
    assert two.memory == 10**8 + 1  # of the one that needs most
    weak = exact(tmp_path / "b", {"serial on 1": [0.2], "sample=2 on 2": [0.25]}, weak=True)[1].rows[1]
    assert (weak.batch, weak.speedup) == (128, pytest.approx(1.6))
    unequal = exact(tmp_path / "c", {"serial on 1": [0.2], "sample=2 on 2": [0.16]}, speeds=[0.8, 0.4])[1].rows[1]
    assert (unequal.ideal, unequal.efficiency) == pytest.approx((1.5, 1.25 / 1.5))


def test_speed_up_is_over_the_fastest_on_one_device_or_else_the_first_row(tmp_path: Path) -> None:
    three = exact(tmp_path / "a", {"serial on 1": [0.2], "torch on 1": [0.1], "sample=2 on 2": [0.08]})[1]
    assert three.reference is not None and three.reference.kind == "torch"
    assert [row.speedup for row in three.rows] == pytest.approx([0.5, 1, 1.25])
    store, two = exact(tmp_path / "b", {"sample=2 on 2": [0.2], "ddp on 2": [0.05]})
    assert two.reference is not None and two.reference.label == "sample=2"
    assert [row.speedup for row in two.rows] == pytest.approx([1, 4])
    assert {row.efficiency for row in two.rows} == {None}
    assert two.rows[1].parts["communication"] == pytest.approx(0.005)  # by which a peer takes longer with exchanges
    words = " ".join(remarks(store, two))
    assert "speed-up is over sample=2 on 2 devices and efficiency not known" in words and "above 100" not in words


BESIDE_ONE: list[tuple[list[float], list[float], bool, str]] = [
    ([0.2] * 3, [0.4, 0.41, 0.4], False, "Slower than one device: sample=2 on 2."),
    ([0.2] * 3, [0.21, 0.1, 0.4], False, "Not told apart from one device, by their ±: sample=2 on 2;"),
    ([0.2], [0.4], False, "Slower than one device: sample=2 on 2."),
    ([0.2], [0.09], False, "Efficiency above 100 % (sample=2 on 2): a device's smaller part of the work may fit"),
    ([0.2], [0.18], True, "Efficiency above 100 % (sample=2 on 2): one device alone was slow when it was measured"),
    ([0.2], [0.0999], False, ""),  # 100 % in the table
    ([0.2] * 3, [0.11, 0.111, 0.11], False, ""),
]


def test_slower_than_one_device_and_faster_than_the_ideal_is_said(tmp_path: Path) -> None:
    for number, (one, two, weak, sentence) in enumerate(BESIDE_ONE):
        study = exact(tmp_path / str(number), {"serial on 1": one, "sample=2 on 2": two}, weak=weak)
        words = " ".join(remarks(*study)).replace(SPACE, " ")
        starts = ("Slower than", "Not told apart", "Efficiency above")
        assert [start for start in starts if start in words] == [
            start for start in starts if sentence.startswith(start)
        ]
        assert sentence in words


def test_efficiency_is_by_the_sum_of_what_devices_do_alone(tmp_path: Path) -> None:
    store = new_store(tmp_path, speeds=[0.6, 0.6])
    rows = store.add(configurations([1, 2], ["sample"], [], ["", "auto"], alone=2))
    for row, seconds in zip(rows, (0.2, 0.4, 0.2, 0.15), strict=True):
        measured = ranks(seconds, row.devices)
        for number, rank in enumerate(measured):
            rank.microbatches = 3 - number
        add_measurement(row, 1, measured)
    results = Results(store)
    assert results.alone == pytest.approx((320, 160))
    assert results.reference is not None and results.reference.label == "one device"
    even, auto = results.rows[2:]
    assert (even.ideal, even.efficiency) == pytest.approx((1.5, 2 / 3))
    assert auto.efficiency == pytest.approx(64 / 0.15 / 480)
    words = " ".join(remarks(store, results)).replace(SPACE, " ")
    assert "480 together" in words and "sample=2 67 %, sample=2, shares auto 89 %" in words
    assert "sample=2, shares auto is 1.33 times as fast as even parts, with 3, 2 microbatches" in words


def predicted_in(seconds: float) -> PlanPrediction:
    return PlanPrediction(seconds=seconds, parts={}, memory=1)


def test_predictions_are_of_the_parts_that_ran(tmp_path: Path) -> None:
    parallel = RECIPE.parallel.model_copy(update={"shares": "auto"})
    by_speed = {"recipe": plain_recipe(RECIPE.model_copy(update={"parallel": parallel}), MADE)}
    planned = Forecast(auto="sample=2", auto_shares=[3, 1], predictions={"auto": predicted_in(0.05)})
    without, own = (
        "not predicted: sample=2, shares auto on 2",
        "that of auto of the planner's own; not predicted: sample",
    )
    for number, (changes, plans, forecast, predicted, words) in enumerate((
        ({}, ["sample"], Forecast(), [None, 0.06, None], f"of even parts of the batch; {without}"),
        (by_speed, ["sample"], Forecast(), [None, None, None], without),
        ({}, ["sample", "auto"], planned, [None, 0.06, None, 0.05, None], f"of even parts of the batch, {own}"),
    )):  # fmt: skip
        store = new_store(tmp_path / str(number), **changes)
        for row in store.add(configurations([1, 2], plans, [], ["", "auto"], alone=2)):
            add_measurement(row, 1, ranks(0.1, row.devices))
        store.put_forecast(1, Forecast(predictions={"serial": predicted_in(0.1)}))
        store.put_forecast(2, Forecast(predictions={"sample=2": predicted_in(0.06)}) | forecast)
        results = Results(store)
        assert [row.predicted for row in results.rows] == [0.1, *predicted]
        assert [row.uneven for row in results.rows[2:]] == [False, True, True, True][: len(predicted) - 1]
        assert words in " ".join(remarks(store, results))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with a row that failed and one that waits."""
    return write_study(tmp_path_factory.mktemp("study"), waiting=["sample=4 on 4"], failed=["filter=4 on 4"])


def test_tables_and_sentences_have_every_row(folder: Path) -> None:
    store = Store.read(folder)
    results = Results(store)
    rows = {row.key: row for row in results.rows}
    auto = rows["auto on 4"]
    assert (auto.plan, auto.predicted, rows["ddp on 4"].predicted) == (AUTO, pytest.approx(0.095 / 4), None)
    assert auto.error == pytest.approx(0.095 / 4 / auto.seconds - 1)
    read = list(csv.DictReader(io.StringIO(csv_of(records(results)))))
    assert len(read) == len(results.rows) == 10 and float(read[0]["step_s"]) == results.rows[0].seconds
    latex = latex_text(results, store)
    assert latex.count(r"\\") == 11 and r"100\,\%" in latex and r"$\pm$" in latex and "days" in latex
    times = [(0.0123, 0.0004), (1.5, 0.05), (2e-5, None)]
    assert [plus_minus(*time) for time in times] == ["12.3 ± 0.4 ms", "1.50 ± 0.05 s", "20.0 µs"]
    sentences = " ".join(write_files(folder).remarks).replace(SPACE, " ")
    for words in (
        "1 core of A processor", "the machine has 4, and 4 devices at most", "medians over 5 rounds",
        "The measuring took 1", "20 % planning", "the same number in all rows", "over the fastest row on one device: ",
        "filter=4 on 4 devices was not measured: a layer cannot be divided", "Not measured yet: sample=4 on 4 devices",
    ):  # fmt: skip
        assert words in sentences, sentences
    store.table.epochs = None  # days are said only when asked for
    assert "days" not in latex_text(Results(store), store) and "days" not in lines(Results(store))[0]


def test_spreadsheets_find_no_formula_and_latex_no_command() -> None:
    def read(text: str) -> dict[str, str]:
        rows = [{"configuration": text, "step_s": -0.5, "plan": None}]
        (row,) = csv.DictReader(io.StringIO(csv_of(rows), newline=""))
        return row

    for text in ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)"):
        assert read(text) == {"configuration": f"'{text}", "step_s": "-0.5", "plan": ""}
    for text in ("sample=2", "auto: conv by sample", 'a "quoted", name', "two\nlines"):
        assert read(text)["configuration"] == text
    assert csv_of([{"configuration": "\t=1\r=2\x1b"}]) == "configuration\n\\t=1\\r=2\\x1b\n"
    assert escaped(r"\input{/etc/passwd}") == r"\textbackslash{}input\{/etc/passwd\}"
    assert escaped("50% & $x_1^2$ #~") == r"50\% \& \$x\_1\textasciicircum{}2\$ \#\textasciitilde{}"
    assert escaped("a\n\nb\x1b") == r"a\textbackslash{}n\textbackslash{}nb\textbackslash{}x1b"


def test_the_same_measured_twice_differs_by_less_in_95_of_100_cases() -> None:
    for rounds in (3, 5, 20):
        random = np.random.default_rng(rounds)
        pairs = random.normal(100, 3, (1000, 2, rounds))
        within = [abs(np.diff(np.median(pair, 1))[0]) < (repeatability(list(pair[0])) or 0) for pair in pairs]
        assert 0.90 < np.mean(within) < 0.99
    assert repeatability([1.0]) is None and repeatability([2.0, 2.0]) == 0


# How far the curves of a study are from each other.


def curves_of(
    folder: Path, change: Callable[[list[dict[str, Any]]], None] = lambda trainings: None, **changes: Any
) -> Convergence:
    """Curves of one device, sample=2 and filter=2, after a change of what is written of their trainings."""
    if not folder.exists():
        write_trainings(write_study(folder, devices=(1, 2), plans=("sample", "filter"), peers=()), **changes)
    written = document(folder)
    change([row["training"] for row in written["configurations"]])
    (folder / "bench.json").write_text(json.dumps(written))
    curves = convergence(Store.read(folder))
    assert curves is not None
    return curves


def test_the_largest_distance_is_over_all_evaluations_and_rows(tmp_path: Path) -> None:
    curves = curves_of(tmp_path / "study")
    assert curves.reference is not None and curves.reference.label == "one device"
    (_, distance) = max(curves.compared, key=lambda pair: pair[1].error)
    assert [curve.label for curve, _ in curves.compared] == ["sample=2", "filter=2"]
    assert (distance.error, distance.error_at) == (pytest.approx(2e-3), 500)
    assert (distance.loss, distance.loss_at) == (pytest.approx(4e-3), 400)
    words = " ".join(convergence_remarks(curves)).replace(SPACE, " ")
    assert "never farther from the serial run's than 0.20 points (filter=2, after 500 updates)" in words
    assert "the test loss never farther than 0.0040 (filter=2, after 400), over 10 evaluations" in words
    assert "No final weights are the reference's bit for bit" in words and "one image is 0.010 points" in words
    rows = list(csv.DictReader(io.StringIO(csv_of(convergence_records(curves)))))
    assert [float(row["distance_error"] or 0) for row in rows] == pytest.approx([0, 1e-3, 2e-3])
    assert len(curve_records(curves)) == 30
    assert convergence_latex(curves, Store.read(tmp_path / "study")).count(r"\\") == 4


def test_bits_are_said_as_such(tmp_path: Path) -> None:
    def same_curves(trainings: list[dict[str, Any]]) -> None:
        for training in trainings:
            training["evaluations"] = trainings[0]["evaluations"]

    same = curves_of(tmp_path / "same", same=["sample=2 on 2", "filter=2 on 2"])
    one = curves_of(tmp_path / "one", same=["sample=2 on 2"])
    alike = curves_of(tmp_path / "alike", same_curves, apart=1e-15)
    for curves, weights, sentences in (
        (same, ["the same bits"] * 2, ("to the last bit, distance 0", f"are the same bit for bit: SHA-256 {0:064x}")),
        (one, ["the same bits", "other bits"], ("weights of sample=2 are the ref", "those of filter=2 are not")),
        (alike, ["other bits"] * 2, ("No final weights are the reference's",)),
    ):  # fmt: skip
        assert [line["final weights"] for line in convergence_lines(curves)] == ["the reference", *weights]
        words = " ".join(convergence_remarks(curves))
        assert all(sentence in words for sentence in sentences), words


def test_only_curves_that_share_evaluations_are_compared(tmp_path: Path) -> None:
    def between(trainings: list[dict[str, Any]]) -> None:
        for evaluation in trainings[2]["evaluations"]:
            evaluation["step"] += 50

    def fewer(trainings: list[dict[str, Any]]) -> None:
        trainings[2]["evaluations"] = trainings[1]["evaluations"][:4]

    words = " ".join(
        convergence_remarks(curves_of(tmp_path / "study", between, same=["sample=2 on 2", "filter=2 on 2"]))
    )
    assert "in all 10 evaluations of 2 configurations" in words
    assert "Not compared, as no evaluation was after as many updates: filter=2." in words
    words = " ".join(convergence_remarks(curves_of(tmp_path / "study", fewer)))
    assert "in all 4 to 10 evaluations of all 3 configurations" in words
    unfinished = curves_of(tmp_path / "other", finished=False, failed=["filter=2 on 2"])
    first, second = missing(unfinished)
    assert first == "filter=2 on 2 devices was not trained: a layer is odd: use another."
    assert "one device on 1 device, sample=2 on 2 devices; the same command goes on" in second
    assert [curve.label for curve in unfinished.curves] == ["one device", "sample=2"]


def test_trainings_are_timed_without_evaluations_and_short_ones_evaluated_often(tmp_path: Path) -> None:
    metrics = [
        {"split": "train", "step": 10, "images_per_s": 100.0, "time_s": 5.0},
        {"split": "test", "step": 15, "top1": 0.5, "loss": 1.0, "images": 40, "time_s": 50.0},
        {"split": "train", "step": 20, "images_per_s": 50.0, "time_s": 90.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    training = Training()
    add_evaluations(training, tmp_path, batch=20)
    (evaluation,) = training.evaluations
    assert (evaluation.step, evaluation.error, evaluation.loss, evaluation.train_s) == (15, 0.5, 1.0, 4.0)
    assert (training.images, training.sha256) == (40, "")
    recipes = [recipe_for_training(RECIPE, *args) for args in ((3, False), (3, True), (30, False), (0.5, True))]
    assert [str(recipe.evaluate_every) for recipe in recipes[:3]] == ["5%", "1ep", "1ep"]
    assert str(recipes[3].epochs) == "0.5ep"
