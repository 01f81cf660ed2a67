"""Folders of pictures: which of them are splits, classes or neither, and which files are pictures."""

import io
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image, ImageFile

from convoy.data import DataConfig, decode, open_data
from convoy.data.decode import BadImage, suffixes
from convoy.data.files import split_of
from convoy.errors import ConvoyError
from data.made import encoded, picture, write_folder

SMALL = {"width": 12, "height": 12}


def opened(path: Path, **options):
    return open_data(DataConfig(path=str(path), **options))


def make(root: Path, *folders: str, classes: tuple[str, ...] = ("cat", "dog"), num: int = 2) -> Path:
    for folder in folders:
        write_folder(root / folder, classes, num=num, **SMALL)
    return root


def numbers(data) -> tuple[int, int, list[str]]:
    return len(data.train), len(data.test), data.classes


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "val"),
        ("Training", "Testing"),
        ("TRAIN", "TEST"),
        ("Train", "Valid"),
        ("training_set", "test_set"),
        ("seg_train", "seg_test"),
        ("train_images", "val_images"),
        ("TrainSet", "TestSet"),
        ("trainset", "testset"),
        ("train2017", "val2017"),
        ("trainings", "tests"),
        ("training data", "validation data"),
        ("train", "eval"),
        ("Train", "Evaluation"),
        ("train", "dev"),
        ("train", "holdout"),
        ("train", "hold-out"),
        ("my-train-pictures", "my-held_out-pictures"),
        ("train/train", "test/test"),  # as some archives are unpacked
    ],
)
def test_splits_have_their_usual_names(tmp_path, train, test):
    make(tmp_path, train, num=3)
    make(tmp_path, test, num=1)
    data = opened(tmp_path)
    assert numbers(data) == (6, 2, ["cat", "dog"])
    assert not data.notes
    assert {data.train.name(i).split("/")[0] for i in range(6)} == {train.split("/")[0]}


def test_a_set_one_folder_down_is_found(tmp_path):
    make(tmp_path, "cars/Train", num=3)
    make(tmp_path, "cars/Test", num=1)
    assert numbers(opened(tmp_path)) == (6, 2, ["cat", "dog"])


def test_validation_comes_before_test_and_what_is_not_used_is_named(tmp_path):
    make(tmp_path, "train", "val", "test")
    make(tmp_path, "drawings", classes=("a", "b"))
    data = opened(tmp_path)
    assert data.test.name(0).startswith("val/")
    assert data.notes == ("left out: drawings/, test/",)


@pytest.mark.parametrize("name", ["strain", "trained", "invalid", "contest", "device", "test-train", "cat", "2017"])
def test_other_words_are_no_splits(name):
    assert split_of(name) is None


@pytest.mark.parametrize("name", ["test", "train", "Validation"])
def test_a_class_among_others_may_be_called_like_a_split(tmp_path, name):
    data = opened(make(tmp_path, ".", classes=("bus", "car", name), num=10))
    assert numbers(data) == (27, 3, sorted(("bus", "car", name)))
    assert f"{name}/ is a class here, not a split" in data.notes[0]


@pytest.mark.parametrize(
    "folders",
    [
        ("lessons", "exam"),
        ("train", "unseen"),
        ("train", "test", "more"),
        ("train", "training"),
        ("train", "val", "dev"),
        ("unseen", "test"),
        ("cars/train", "cars/test", "planes/train", "planes/test"),
        ("cat/train", "cat/test", "dog/train", "dog/test"),
        (".", "test"),  # classes beside a folder of the same ones
    ],
)
def test_what_is_not_clear_is_asked(tmp_path, folders):
    make(tmp_path, *folders)
    with pytest.raises(ConvoyError, match=r"which to train on is not clear: say so, as by --set data.train="):
        opened(tmp_path)


def test_the_options_settle_it(tmp_path):
    make(tmp_path, "lessons", num=3)
    make(tmp_path, "exam", num=1)
    assert numbers(opened(tmp_path, train="lessons", test="exam")) == (6, 2, ["cat", "dog"])
    assert numbers(opened(tmp_path, train="lessons", validation_fraction=0.5)) == (3, 3, ["cat", "dog"])
    assert opened(tmp_path, train=".").classes == ["exam", "lessons"]
    make(tmp_path / "flat", ".", "test", num=3)
    assert numbers(opened(tmp_path / "flat", train=".", test="test")) == (6, 6, ["cat", "dog"])
    for wrong in ({"train": "nowhere"}, {"train": "../elsewhere"}, {"train": "lessons", "test": "nowhere"}):
        with pytest.raises(ConvoyError, match=r"no folder below .* which holds exam/"):
            opened(tmp_path, **wrong)


def test_what_each_class_has_is_no_split(tmp_path):
    make(tmp_path, "cat", "dog", classes=("images",), num=10)
    assert numbers(opened(tmp_path)) == (18, 2, ["cat", "dog"])


@pytest.mark.parametrize("train", ["train", "Training"])
def test_splits_without_class_folders_are_not_classes(tmp_path, train):
    make(tmp_path, ".", classes=(train, "test"))
    with pytest.raises(ConvoyError, match=f"{train} holds no class folders"):
        opened(tmp_path)


def test_a_test_split_without_classes_can_be_left_out(tmp_path):
    make(tmp_path, "train", num=10)
    write_folder(tmp_path, ("test",))
    with pytest.raises(ConvoyError, match=r"go without by --set data.train=train"):
        opened(tmp_path)
    assert numbers(opened(tmp_path, train="train")) == (18, 2, ["cat", "dog"])


def test_a_folder_without_pictures_is_no_class(tmp_path):
    make(tmp_path, "train", "val")
    (tmp_path / "train" / "annotations").mkdir()
    (tmp_path / "train" / "annotations" / "all.xml").write_text("<a/>")
    (tmp_path / "train" / "ant").mkdir()
    (tmp_path / "val" / "ant").mkdir()
    data = opened(tmp_path)
    assert data.classes == ["cat", "dog"]
    assert data.notes == ("left out: annotations/, ant/ without pictures", "left out: 1 .xml")


def test_files_that_are_no_pictures_are_counted_by_kind(tmp_path):
    make(tmp_path, ".", num=5)
    for name in ("a.txt", "b.TXT", "c.csv", "README", "d.HEIC", "._hidden.jpg"):
        (tmp_path / "cat" / name).write_bytes(b"x")
    (tmp_path / "loose.jpg").write_bytes(b"x")
    needs = "" if ".heic" in suffixes() else " (read after pip install pillow-heif)"
    said = "left out: 2 .txt, 1 .csv, 1 without an ending, 1 .heic, 1 .jpg beside the class folders"
    note = opened(tmp_path, bad_images="skip").notes[0]
    assert Counter(note.removesuffix(needs).removeprefix("left out: ").split(", ")) == Counter(
        said.removeprefix("left out: ").split(", ")
    )
    assert note.endswith(needs)


def test_a_class_of_pictures_that_cannot_be_read_is_refused(tmp_path):
    make(tmp_path, ".", num=5)
    (tmp_path / "ant").mkdir()
    (tmp_path / "ant" / "a.jxl").write_bytes(b"x")
    with pytest.raises(ConvoyError, match=r"ant is a class without pictures that can be read .*pillow-jxl-plugin"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("end", "form"),
    [
        *((".jfif", "JPEG"), (".jpe", "JPEG"), (".JPG", "JPEG"), (".gif", "GIF"), (".apng", "PNG"), (".tga", "TGA")),
        *((".jpx", "JPEG2000"), (".avif", "AVIF"), (".ico", "ICO"), (".pnm", "PPM"), (".dib", "DIB"), (".qoi", "QOI")),
        *((".sgi", "SGI"), (".pcx", "PCX"), (".dds", "DDS"), (".mpo", "JPEG")),
        *((".png", "JPEG"), (".jpg", "PNG"), (".bmp", "WEBP")),  # contents that belong to other endings
    ],
)
def test_what_pillow_reads_is_a_picture(tmp_path, end, form):
    image = picture(16, 16)
    try:
        content = encoded(image, form)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow writes no {form}")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}{end}").write_bytes(content)
    data = opened(tmp_path)
    assert numbers(data) == (5, 1, ["cat", "dog"])
    with Image.open(io.BytesIO(content)) as whole:
        assert data.train.load(0).tobytes() == whole.convert("RGB").tobytes()


HEIC = b"\0\0\0\x18ftypheic" + bytes(16)


@pytest.fixture
def fresh_formats(monkeypatch):
    """Formats as a new process finds them, before and after."""
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    monkeypatch.setattr(Image, "EXTENSION", dict(Image.EXTENSION))
    ids = list(Image.ID)
    for found in (decode._formats, decode.suffixes):
        found.cache_clear()
    yield
    Image.ID[:] = ids
    for found in (decode._formats, decode.suffixes):
        found.cache_clear()


def test_heic_is_read_where_its_package_is_installed(tmp_path, monkeypatch, fresh_formats):
    class Heif(ImageFile.ImageFile):
        format = "HEIF"

        def _open(self) -> None:
            self._size, self._mode, self.tile = (12, 12), "RGB", []

        def load(self):
            self.im = Image.core.fill("RGB", self.size, (1, 2, 3))
            return super(ImageFile.ImageFile, self).load()

    def register() -> None:
        Image.register_open("HEIF", Heif, lambda prefix: prefix[4:12] == b"ftypheic")
        Image.register_extensions("HEIF", [".heic", ".hif"])

    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=register, __spec__=object()))
    make(tmp_path, ".", num=2)
    (tmp_path / "cat" / "IMG_1.HEIC").write_bytes(HEIC)
    data = opened(tmp_path)
    assert len(data.train) + len(data.test) == 5


def test_heic_by_another_name_says_what_it_is(monkeypatch, fresh_formats):
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    with pytest.raises(BadImage, match=r"a.jpg is HEIC, .*pip install pillow-heif") as error:
        decode.open_picture(HEIC, "a.jpg")
    assert error.value.name == "a.jpg"
