import json
import re
from dataclasses import asdict

import pytest

from convoy.training.derived import Derived, Quantities, derive, left_out_of_epochs, num_microbatches, resolve
from convoy.training.recipe import Recipe, load_recipe


def recipe(*overrides: str) -> Recipe:
    return load_recipe("imagenet-90", ["data.path=x", *overrides])


def rows(*overrides: str, **options: object) -> dict[str, Derived]:
    return {row.name: row for row in derive(recipe(*overrides), 1_281_167, **options)}  # type: ignore[arg-type]


def test_goyal_at_batch_8192() -> None:
    found = rows("batch=8192")
    assert found["weight updates per epoch"].value == 156
    assert found["weight updates"].value == 14_040
    assert found["microbatches"].value == 256
    assert found["samples per microbatch"].value == 32
    assert found["peak learning rate"].value == pytest.approx(3.2)
    assert found["peak learning rate"].formula == "0.1 · 8192 / 256"
    assert "Goyal" in found["peak learning rate"].source
    assert found["weight updates of warm-up"].value == 780
    assert found["learning rate drops at updates"].value == "4680, 9360, 12480"
    assert found["evaluation every"].value == 156


def test_every_row_says_how_and_why_and_fits_into_json() -> None:
    found = derive(
        recipe("ema.decay=0.999", "optimizer.name=adamw", "optimizer.base_lr=0.001", "batch=1024"),
        1_281_167,
        workers=(4, "x"),
    )
    assert json.loads(json.dumps([asdict(row) for row in found]))[0]["value"] == 1251
    assert all(row.name and row.formula and row.source for row in found)
    names = {row.name: row for row in found}
    assert names["peak learning rate"].value == pytest.approx(0.002)
    assert "timm" in names["peak learning rate"].source
    assert names["updates in the averaged weights"].value == 1000
    assert names["data workers"].value == 4


def test_unequal_microbatches_and_devices() -> None:
    found = rows("batch=100", "microbatches=3", samples=[34, 33, 33])
    assert found["samples per microbatch"].value == "1 of 34, 2 of 33"
    assert found["samples per device"].value == "1 of 34, 2 of 33"
    assert resolve(recipe("batch=100", "microbatches=3"), 1000).sizes == (34, 33, 33)


@pytest.mark.parametrize(("batch", "microbatch", "number"), [(256, 32, 8), (250, 32, 8), (16, 32, 1), (33, 32, 2)])
def test_microbatches_of_at_most_so_many_samples(batch: int, microbatch: int, number: int) -> None:
    assert num_microbatches(recipe(f"batch={batch}", f"microbatch={microbatch}")) == number


def test_threads() -> None:
    assert rows("reproducible=true")["threads"].value == 1
    assert rows("reproducible=true", "threads=3")["threads"].value == 3
    assert rows()["threads"].formula == "cores that this process may use"


def short(updates: int, *overrides: str) -> Quantities:
    settings = ["model.name=lenet", "data.path=x", f"epochs={updates}ba", *overrides]
    return resolve(load_recipe("default", settings), 60_000)


@pytest.mark.parametrize(
    ("total", "every"), [(1, 1), (49, 1), (186, 3), (620, 12), (999, 19), (1000, 20), (450_000, 20)]
)
def test_lines_of_metrics_come_often_enough_in_short_runs(total: int, every: int) -> None:
    found = short(total)
    assert found.log_every == every
    lines = [done for done in range(1, min(total, 5000) + 1) if found.logged(done)]
    assert len(lines) >= min(total, 50)


@pytest.mark.parametrize("log_every", ["auto", "20ba", "7ba", "1ba"])
def test_the_last_line_is_not_of_a_few_updates_alone(log_every: str) -> None:
    for total in (186, 187, 203, 210, 62):
        found = short(total, f"log_every={log_every}")
        lines = [done for done in range(1, total + 1) if found.logged(done)]
        assert (lines[0], lines[-1]) == (1, total)
        assert 2 * (lines[-1] - lines[-2]) >= found.log_every
        assert all(done % found.log_every == 0 for done in lines[1:-1])


@pytest.mark.parametrize(
    ("batch", "num", "said"),
    [
        (128, 231, "103 of the 231 training images are left out of every epoch.*: --batch 115 leaves out 1"),
        (128, 255, "127 of the 255 .*: --batch 127 leaves out 1"),
        (6, 11, "5 of the 11 .*: --batch 5 leaves out 1"),
        (128, 1_281_167, None),
        (10, 99, None),
        (7, 7, None),
    ],
)
def test_what_epochs_leave_out_is_said_with_a_batch_that_does_not(batch: int, num: int, said: str | None) -> None:
    found = left_out_of_epochs(batch, num)
    assert found == [] if said is None else re.fullmatch(rf".*{said}.*", found[0])
