"""The rows that a command asks for, the file that keeps what was measured, and the course of a study."""

from pathlib import Path
from typing import Any

import pytest

from bench.made_study import MACHINE, MADE, RECIPE, document, new_store, study, write_study, write_trainings
from convoy.bench import course
from convoy.bench.ask import configurations
from convoy.bench.processes import Places, RankFailed
from convoy.bench.records import RankTimes, Store
from convoy.bench.study import plain_recipe
from convoy.errors import ConvoyError

ROWS: dict[str, tuple[tuple[Any, ...], str]] = {
    "a plan without a size is on all devices, one with a size where it fits": (
        ([1, 2, 4], ["sample", "sample=2,filter=2", "owt", "auto=4"], []),
        "one device/1; sample=2/2; owt=2/2; sample=4/4; sample=2,filter=2/4; owt=4/4; auto/4",
    ),
    "what stands there twice is two rows, and peers come with plain PyTorch on one device": (
        ([1, 2], ["sample", "sample=2"], ["ddp"]),
        "one device/1; plain PyTorch/1; sample=2/2; sample=2 (row 2)/2; DistributedDataParallel/2",
    ),
    "plans that divide samples have a row for each share": (
        ([2, 3], ["sample", "filter"], [], ["", "auto", "3,2,1"]),
        "sample=2/2; sample=2, shares auto/2; filter=2/2; "
        "sample=3/3; sample=3, shares auto/3; sample=3, shares 3,2,1/3; filter=3/3",
    ),
}


@pytest.mark.parametrize(("arguments", "labels"), ROWS.values(), ids=ROWS)
def test_the_rows_of_a_study(arguments: tuple[Any, ...], labels: str) -> None:
    rows = configurations(*arguments)
    assert "; ".join(f"{row.label}/{row.devices}" for row in rows) == labels
    assert len({row.key for row in rows}) == len(rows)


def test_a_study_goes_on_where_it_was_and_another_is_refused(tmp_path: Path) -> None:
    before = document(write_trainings(write_study(tmp_path, failed=["filter=2 on 2"])))
    store = Store.open(tmp_path, study=study(updates=None), machine={})
    store.save()
    assert document(tmp_path) == before and store.study.updates == 4
    _, failed, _ = store.add(configurations([2], ["sample", "filter", "owt"], []))
    assert failed.failed is None  # it is tried again
    keys = [row["key"] for row in before["configurations"]]
    assert [row.key for row in store.configurations] == [*keys, "owt=2 on 2"]
    other_seed = plain_recipe(RECIPE.model_copy(update={"seed": 7}), MADE)
    for changes, machine, words in (
        ({"weak": True}, {}, "weak=False and not True"),
        ({"updates": 5}, {}, "updates=4 and not 5"),
        ({"recipe": other_seed}, {}, "recipe.seed=0 and not 7"),
        ({}, {"torch": "2.14.0"}, "measured with torch=2.13.0 and not 2.14.0: give another --out"),
    ):
        with pytest.raises(ConvoyError, match=words):
            Store.open(tmp_path, study=study(**changes), machine=MACHINE | machine)
    with pytest.raises(ConvoyError, match="trainings of 5 epochs, which --train-epochs 6"):
        Store.open(tmp_path, study=study(), machine=MACHINE | {"timm": "1.0"}).begin_training(6.0)


WRONG = {"sample=2": ConvoyError("too few microbatches: give more"), "serial": RankFailed("rank 0 failed: full\nmore")}
TIMES = RankTimes(seconds=[0.1], communication=[0.0], input=[0.0], optimizer=[0.0], memory=1, overhead=0.0, loss=1.0)


def test_rows_that_do_not_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(function: Any, slots: Any, task: Any, *_: Any, **__: Any) -> Any:
        plan = str(task.recipe.parallel.plan or f"sample={len(slots)}")
        if plan in WRONG:
            raise WRONG[plan]
        return [TIMES] * len(slots)

    def outcomes(devices: list[int], plans: list[str], updates: int | None) -> Any:
        """Updates of the study, and of each row how often it was measured, or why it was not, which is told."""
        store, lines = new_store(tmp_path / f"{devices} {plans} {updates}", updates=updates), list[str]()
        rows = store.add(configurations(devices, plans, []))
        course.Course(RECIPE, rows, store, Places(1), tell=lines.append).measure(predict=False)
        assert lines == [f"{row.where}: {row.failed}" for row in rows if row.failed]
        return store.study.updates, [(row.key, len(row.visits), row.failed) for row in rows]

    monkeypatch.setattr(course, "run_ranks", run_ranks)
    rows = [("serial on 1", 0, "rank 0 failed: full"), ("sample=2 on 2", 0, "too few microbatches: give more")]
    for updates, number in ((None, course.UNPREDICTED), (7, 7)):
        assert outcomes([1, 2], ["sample", "filter"], updates) == (number, [*rows, ("filter=2 on 2", 1, None)])
    with pytest.raises(ConvoyError, match="give more"):
        outcomes([2], ["sample"], None)
