"""Folders of pictures: which of them are splits, classes or neither, and which files are pictures."""

from pathlib import Path

import pytest

from convoy.data import DataSet
from convoy.data.decode import suffixes
from convoy.data.files import split_of
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


def test_folders_that_are_neither_splits_nor_classes(tmp_path: Path) -> None:
    root = make(make(tmp_path / "more", "train", "val", "test"), "drawings", classes=("a", "b"))
    data = opened(root)  # of val and test the first
    assert data.test.name(0).startswith("val/") and data.notes == ("left out: drawings/, test/",)
    data = opened(make(tmp_path / "class", ".", classes=("bus", "car", "test"), num=10))
    assert numbers(data) == (27, 3, ["bus", "car", "test"])
    assert "test/ is a class here, not a split" in data.notes[0]
    make(tmp_path / "same", "cat", "dog", classes=("images",), num=10)
    assert numbers(opened(tmp_path / "same")) == (18, 2, ["cat", "dog"])  # what each class has is no split
    root = make(tmp_path / "empty", "train", "val")
    for folder in ("train/annotations", "train/ant", "val/ant"):
        (root / folder).mkdir()
    (root / "train" / "annotations" / "all.xml").write_text("<a/>")
    data = opened(root)
    assert data.classes == ["cat", "dog"]
    assert data.notes == ("left out: annotations/, ant/ without pictures", "left out: 1 .xml")


def test_a_tree_is_split_by_a_seed_and_its_links_lead_nowhere_twice(tmp_path: Path) -> None:
    root = make(tmp_path / "set", ".", classes=("a", "b"), num=9)
    (root / "a" / "more").mkdir()
    (root / "a" / "more" / "x.PNG").write_bytes(encoded(picture(12, 12)))
    (root / "a" / "more" / "loop").symlink_to(root / "a", target_is_directory=True)
    (tmp_path / "elsewhere.jpg").write_bytes((root / "b" / "000.jpg").read_bytes())
    (root / "b" / "linked.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    one, same, other = opened(root), opened(root), opened(root, split_seed=1)
    assert names(one.test) == names(same.test) != names(other.test) and one.test.labels.tolist() == [0, 1]
    wanted = [f"{c}/{i:03d}.jpg" for c in "ab" for i in range(9)] + ["a/more/x.PNG", "b/linked.jpg"]
    assert sorted(names(one.train, one.test)) == sorted(wanted)
    assert "2 of its 20 samples are held out" in one.notes[0]
    assert len(opened(root, validation_fraction=0.5).test) == 10


ENDS = ".jfif JPEG, .JPG JPEG, .gif GIF, .tga TGA, .avif AVIF, .mpo JPEG, .png JPEG, .jpg PNG, .bmp WEBP"


def test_what_pillow_reads_is_a_picture_whatever_it_is_called_and_the_rest_is_counted(tmp_path: Path) -> None:
    for end, form in map(str.split, ENDS.split(",")):
        try:
            content = encoded(picture(16, 16), form)
        except (KeyError, OSError):  # this Pillow writes none
            continue
        for path in (tmp_path / end / name / f"{i}{end}" for name in ("cat", "dog") for i in range(3)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        assert numbers(opened(tmp_path / end)) == (5, 1, ["cat", "dog"]), end
    root = make(tmp_path / "set", ".", num=5)
    for name in ("cat/a.txt", "cat/b.TXT", "cat/README", "cat/d.HEIC", "cat/._hidden.jpg", "loose.jpg"):
        (root / name).write_bytes(b"x")
    needs = "" if ".heic" in suffixes() else " (read after pip install pillow-heif)"
    counts = "2 .txt, 1 without an ending, 1 .heic, 1 .jpg beside the class folders"
    note = opened(root, bad_images="skip").notes[0]
    assert sorted(note.removesuffix(needs).removeprefix("left out: ").split(", ")) == sorted(counts.split(", "))
    (root / "ant").mkdir()
    (root / "ant" / "a.jxl").write_bytes(b"x")
    with pytest.raises(ConvoyError, match=r"ant is a class without pictures that can be read .*pillow-jxl-plugin"):
        opened(root)
