"""Which rows a command asks for."""

import pytest

from convoy.bench.configuration import configurations
from convoy.bench.records import Made
from convoy.bench.study import assumed
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan
from convoy.training import load_recipe


def named(*arguments: object) -> list[str]:
    return [f"{row.label}/{row.devices}" for row in configurations(*arguments)]  # type: ignore[arg-type]


def test_a_plan_without_a_size_is_on_all_devices() -> None:
    found = named([1, 2, 4], ["sample", "sample=2,filter=2", "owt", "auto"], [])
    assert found == [
        "one device/1",
        "sample=2/2", "owt=2/2", "auto/2",
        "sample=4/4", "sample=2,filter=2/4", "owt=4/4", "auto/4",
    ]  # fmt: skip


def test_the_planner_is_asked_for_one_number_of_devices_only() -> None:
    rows = configurations([1, 2, 4], ["sample", "auto=4"], [], ["", "auto"])
    assert [(row.label, row.devices) for row in rows] == [
        ("one device", 1),
        ("sample=2", 2), ("sample=2, shares auto", 2),
        ("sample=4", 4), ("sample=4, shares auto", 4), ("auto", 4), ("auto, shares auto", 4),
    ]  # fmt: skip
    assert [row.plan for row in rows if row.label.startswith("auto")] == ["auto", "auto"]


def test_peers_come_with_plain_pytorch_on_one_device() -> None:
    found = named([1, 2], ["sample"], ["ddp", "accelerate"])
    assert found == ["one device/1", "plain PyTorch/1", "sample=2/2", "DistributedDataParallel/2", "accelerate/2"]


def test_what_is_given_twice_is_two_rows() -> None:
    rows = configurations([1, 1, 2], ["sample", "sample=2"], [])
    assert [row.label for row in rows] == ["one device", "one device (row 2)", "sample=2", "sample=2 (row 2)"]
    assert len({row.key for row in rows}) == 4


def test_plans_that_divide_samples_have_a_row_for_each_share() -> None:
    rows = configurations([1, 2, 3], ["sample", "filter"], ["ddp"], ["", "auto", "3,2,1"])
    assert [row.label for row in rows] == [
        "one device", "plain PyTorch",
        "sample=2", "sample=2, shares auto", "filter=2", "DistributedDataParallel",
        "sample=3", "sample=3, shares auto", "sample=3, shares 3,2,1", "filter=3", "DistributedDataParallel",
    ]  # fmt: skip
    assert len({row.key for row in rows}) == len(rows)
    assert rows[3].series != rows[2].series


def test_numbers_are_for_plans_with_so_many_parts() -> None:
    rows = configurations([4], ["sample", "sample=2,filter=2", "filter=2,owt=2"], [], ["3,1", "3,3,2,2"])
    assert [row.label for row in rows] == [
        "sample=4, shares 3,3,2,2", "sample=2,filter=2, shares 3,1", "filter=2,owt=2, shares 3,1"
    ]  # fmt: skip


def test_numbers_for_devices_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "parts", property(lambda self: self.mesh.num_devices))
    with pytest.raises(AssertionError):
        test_numbers_are_for_plans_with_so_many_parts()


def test_the_planner_can_be_bound_to_numbers_that_some_plan_has() -> None:
    rows = configurations([4], ["auto"], [], ["3,1", "3,3,2,2", "3,2,1", "1"])
    assert [row.label for row in rows] == ["auto, shares 3,1", "auto, shares 3,3,2,2"]


def test_a_file_is_a_plan(tmp_path: object) -> None:
    path = f"{tmp_path}/mine.yaml"
    with open(path, "w") as file:  # noqa: PTH123
        file.write("mesh: {a: 2, b: 2}\nlayers:\n  conv: {a: filter}\n  '*': {a: sample, b: filter}\n")
    row = configurations([1, 4], [path], [])[1]
    assert row.devices == 4 and "mesh" in (row.plan or "")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("sample=3", "--devices has no 3"),
        ("auto=3", "--devices has no 3"),
        ("auto=0", "write auto, or auto=4"),
        ("auto=two", "write auto, or auto=4"),
        ("smaple", "smaple"),
        ("sample,filter", "sample needs a number"),
    ],
)
def test_mistakes(plan: str, words: str) -> None:
    with pytest.raises(ConvoyError, match=words):
        configurations([1, 2], [plan], [])


def test_what_is_assumed_of_pictures_is_said() -> None:
    own = load_recipe("default", ["model.name=tiny:TinyNet", "data.path=mnist-mini"])
    small, large = (Made(shape=(1, size, size), classes=10) for size in (28, 224))
    assert "1×224×224 and 10 classes are assumed (--image-size" in assumed(own, large, None)
    assert assumed(own, small, 28) == ""
    known = load_recipe("default", ["model.name=lenet", "data.path=mnist-mini"])
    assert assumed(known, small, None) == ""


def test_devices_of_unequal_speed_are_measured_alone() -> None:
    rows = configurations([1, 3], ["sample"], [], ["", "auto"], alone=3)
    assert [(row.label, row.place) for row in rows] == [
        ("one device", 0), ("device 2 alone", 1), ("device 3 alone", 2), ("sample=3", 0), ("sample=3, shares auto", 0),
    ]  # fmt: skip
    assert configurations([2], ["sample"], [], [""], alone=2)[0].label == "sample=2"
