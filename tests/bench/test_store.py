"""bench.json: what may go on, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.made_study import MACHINE, MADE, RECIPE, document, study, write_study
from convoy.bench.configuration import configurations
from convoy.bench.records import Forecast
from convoy.bench.store import Store
from convoy.bench.study import plain_recipe, recipe_for
from convoy.errors import ConvoyError


def test_a_study_goes_on_where_it_was(tmp_path: Path) -> None:
    before = document(write_study(tmp_path))
    store = Store.open(tmp_path, study(), {})
    store.save()
    assert document(tmp_path) == before
    store.add(configurations([1, 2], ["sample", "owt"], []))
    keys = [row.key for row in store.configurations]
    assert keys == [*(row["key"] for row in before["configurations"]), "owt=2 on 2"]


def test_a_failed_row_is_tried_again(tmp_path: Path) -> None:
    write_study(tmp_path, failed=["filter=2 on 2"])
    store = Store.open(tmp_path, study(), {})
    (row,) = store.add(configurations([2], ["filter"], []))
    assert row.failed is None


def test_nobody_need_say_the_updates_again(tmp_path: Path) -> None:
    write_study(tmp_path)
    assert Store.open(tmp_path, study(updates=None), {}).study.updates == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weak": True}, "weak=False and not True"),
        ({"cores_per_device": 2}, "cores_per_device=1 and not 2"),
        ({"updates": 5}, "updates=4 and not 5"),
        ({"recipe": plain_recipe(RECIPE.model_copy(update={"seed": 7}), MADE)}, "recipe.seed=0 and not 7"),
    ],
)
def test_another_study_is_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    write_study(tmp_path)
    with pytest.raises(ConvoyError, match=words):
        Store.open(tmp_path, study(**changes), {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"machine": "Another processor"}, "machine=A processor and not Another processor"),
        ({"torch": "2.14.0"}, "torch=2.13.0 and not 2.14.0"),
        ({"cores": 8}, "cores=4 and not 8"),
    ],
)
def test_another_machine_is_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    write_study(tmp_path)
    with pytest.raises(ConvoyError, match=f"measured with {words}: give another --out"):
        Store.open(tmp_path, study(), MACHINE | changes)
    Store.open(tmp_path, study(), MACHINE | {"timm": "1.0"})


def test_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConvoyError, match="holds a training run"):
        Store.open(tmp_path, study(), MACHINE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "corrupt"),
        ("[]", "no study of convoy bench"),
        (json.dumps({"format": "convoy-bench", "schema": 99}), "schema 99"),
    ],
)
def test_what_is_no_study_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ConvoyError, match=words):
        Store.read(tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (["study"], "it has no study"),
        (["study", "recipe", "microbatch"], r"it has no study\.recipe\.microbatch"),
        (["sessions", 0, "wall_s"], r"it has no sessions\[0\]\.wall_s"),
        (
            ["configurations", 1, "visits", 0, "ranks", 0, "memory"],
            r"no configurations\[1\]\.visits\[0\]\.ranks\[0\]\.m",
        ),
    ],
)
def test_what_is_missing_is_said(path: list[str | int], words: str, tmp_path: Path) -> None:
    whole = document(write_study(tmp_path))
    holder: Any = whole
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    (tmp_path / "bench.json").write_text(json.dumps(whole))
    with pytest.raises(ConvoyError, match=words):
        Store.read(tmp_path)


def test_no_study_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConvoyError, match="give the folder of a study"):
        Store.read(tmp_path)


def test_the_planners_shares_are_those_of_its_own_row_alone(tmp_path: Path) -> None:
    store = Store.open(tmp_path, study(), {})
    rows = {row.key: row for row in store.add(configurations([4], ["sample", "auto"], [], ["", "auto", "3,1"]))}
    keys = [
        "sample=4 on 4",
        "sample=4 on 4, shares auto",
        "auto on 4",
        "auto on 4, shares auto",
        "auto on 4, shares 3,1",
    ]
    assert list(rows) == keys
    runs = [(store.plan_of(row), store.shares_of(row)) for row in rows.values()]
    assert runs == [("sample=4", ""), ("sample=4", "auto"), ("sample=4", ""), ("sample=4", "auto"), ("sample=4", "3,1")]
    store.put_forecast(4, Forecast(auto="sample=4", auto_shares=[3, 2, 2, 1], bound={"3,1": "sample=2,filter=2"}))
    store.put_forecast(4, Forecast(notes=["another call, which chose nothing"]))
    runs = [(store.plan_of(row), store.shares_of(row)) for row in rows.values()]
    assert runs[:2] == [("sample=4", ""), ("sample=4", "auto")]
    assert runs[2:] == [("sample=4", "3,2,2,1"), ("sample=4", "auto"), ("sample=2,filter=2", "3,1")]
    recipes = [
        recipe_for(RECIPE, study(), row, *run).parallel.shares for row, run in zip(rows.values(), runs, strict=True)
    ]
    assert recipes == [None, "auto", (3, 2, 2, 1), "auto", (3, 1)]
    store.put_forecast(4, Forecast(auto="owt=4"))
    assert (store.plan_of(rows["auto on 4"]), store.shares_of(rows["auto on 4"])) == ("owt=4", "")
