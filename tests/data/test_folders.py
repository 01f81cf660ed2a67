"""Folders of pictures: which of them are splits, classes or neither, and which files are pictures."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from convoy.data.config import DataConfig
from convoy.data.dataset import DataSet, difference, open_data
from convoy.data.sources import split_of
from convoy.errors import ConvoyError
from data.made import encoded, names, opened, picture, write_folder


def make(root: Path, *folders: str, classes: tuple[str, ...] = ("cat", "dog"), num: int = 2) -> Path:
    for folder in folders:
        write_folder(root / folder, classes, num=num, width=12, height=12)
    return root


def numbers(data: DataSet) -> tuple[int, int, list[str]]:
    return len(data.train), len(data.test), data.classes


SPLITS = """train val, seg_train seg_test, TrainSet TestSet, train2017 val2017, train hold-out, train/train test/test,
cars/Train cars/Test, training_data validation_data"""
UNCLEAR = """lessons exam, train unseen, train test more, train training, train val dev,
cars/train cars/test planes/train planes/test, cat/train cat/test dog/train dog/test, . test"""


def test_splits_have_their_usual_names_and_what_is_not_clear_is_asked(tmp_path: Path) -> None:
    """Also twice in each other, as some archives are unpacked, or one folder further down."""
    for number, pair in enumerate(SPLITS.split(",")):
        root, (train, test) = tmp_path / str(number), pair.split()
        if "data" in train:
            train, test = train.replace("_", " "), test.replace("_", " ")
        data = opened(make(make(root, train, num=3), test, num=1))
        assert numbers(data) == (6, 2, ["cat", "dog"]) and not data.notes, pair
        assert {name.split("/")[0] for name in names(data.train)} <= set(train.split("/")), pair
    assert not any(map(split_of, ("strain", "invalid", "contest", "device", "test-train", "cat", "2017")))
    for number, folders in enumerate(UNCLEAR.split(",")):
        root = make(tmp_path / f"unclear{number}", *folders.split())
        with pytest.raises(ConvoyError, match=r"which to train on is not clear: say so, as by --set data.train="):
            opened(root)


def test_a_tree_is_split_by_a_seed_and_its_links_lead_nowhere_twice(tmp_path: Path) -> None:
    root = make(tmp_path / "set", ".", classes=("a", "b"), num=9)
    (root / "a" / "more").mkdir()
    (root / "a" / "more" / "x.PNG").write_bytes(encoded(picture(12, 12)))
    (root / "a" / "more" / "loop").symlink_to(root / "a", target_is_directory=True)
    (root / "a" / "up").symlink_to("..", target_is_directory=True)
    (root / "a" / "dead.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "elsewhere.jpg").write_bytes((root / "b" / "000.jpg").read_bytes())
    (root / "b" / "linked.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    one, same, other = opened(root), opened(root), opened(root, split_seed=1)
    assert names(one.test) == names(same.test) != names(other.test) and one.test.labels.tolist() == [0, 1]
    wanted = [f"{c}/{i:03d}.jpg" for c in "ab" for i in range(9)] + ["a/more/x.PNG", "b/linked.jpg"]
    assert sorted(names(one.train, one.test)) == sorted(wanted)
    assert "2 of its 20 samples are held out" in "".join(one.notes) and "left out: 1 by dead links" in one.notes
    assert len(opened(root, validation_fraction=0.5).test) == 10


def test_three_splits_are_told_apart(tmp_path: Path) -> None:
    three = opened(make(tmp_path / "three", "train", "val", "test", classes=("a", "b"), num=4))
    assert (three.split, three.at_end().split) == ("validation", "test") and three.final is three.at_end().test
    assert [len(source) for source in (three.train, three.test, three.final or [])] == [8, 8, 8]
    had = three.fingerprint
    shutil.copytree(tmp_path / "three", tmp_path / "less", ignore=shutil.ignore_patterns("test"))
    less = opened(tmp_path / "less").fingerprint
    assert difference(less, had, later=True) == difference(less, had) == ("the number of final samples", "0", "8")
    assert difference(had, had, later=True) is None and difference(had, less) is not None
    assert difference(had, less, later=True) is None  # a run of before has not noted it
    two = opened(root := make(tmp_path / "two", "train", "test", classes=("a", "b"), num=10))
    assert (two.split, two.final, two.at_end()) == ("test", None, two)
    chosen = open_data(DataConfig(path=str(root)), selects=True)  # training samples are held out to choose by
    assert chosen.final is not None
    assert (chosen.split, len(chosen.train), len(chosen.test), len(chosen.final)) == ("validation", 18, 2, 20)
    (tmp_path / "three" / "test" / "c").mkdir()
    picture(20, 20).save(tmp_path / "three" / "test" / "c" / "0.png")
    with pytest.raises(ConvoyError, match="c is a class that train/ does not have pictures of"):
        opened(tmp_path / "three")


def test_choices_can_be_made_without_the_test_split(tmp_path: Path) -> None:
    root = make(tmp_path, "train", "test", classes=("a", "b"), num=8)
    plain, held_out = opened(root), opened(root, validation_fraction=0.25)
    assert len(held_out.test) == 4 and sorted(names(held_out.train, held_out.test)) == sorted(names(plain.train))
    assert "4 of the 16 training samples are held out for validation" in held_out.notes[0]


def test_a_bad_picture_hides_no_other_size_wherever_it_lies(tmp_path: Path) -> None:
    write_folder(tmp_path, num=60, width=28, height=28)
    (tmp_path / "cat" / "003.jpg").write_bytes(b"no picture")
    assert opened(tmp_path, bad_images="skip").image_size == 28
    (tmp_path / "dog" / "031.jpg").write_bytes(encoded(picture(40, 30), "JPEG"))
    assert opened(tmp_path, bad_images="skip").image_size == 224


def test_one_colored_picture_among_grey_ones_is_enough(tmp_path: Path) -> None:
    write_folder(tmp_path, num=60, width=28, height=28)
    for file in tmp_path.rglob("*.jpg"):
        if file != tmp_path / "cat" / "003.jpg":  # where nothing is looked at to begin with
            file.write_bytes(encoded(picture(28, 28, "L"), "JPEG"))
    data = opened(tmp_path)
    assert (data.channels, data.image_size) == (3, 28) and np.ptp(data.train.pixels, axis=3).any()
