"""Every format, made small: the pictures, labels, names and sizes that come out."""

import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from convoy.data.dataset import CIFAR10, CIFAR100, IMAGENET, MNIST
from convoy.data.decode import BadImage
from convoy.data.parquet import MemorySource
from convoy.data.pixels import PixelSource
from data.made import (
    encoded,
    names,
    opened,
    picture,
    pixels,
    tar_members,
    write_cifar,
    write_columns,
    write_folder,
    write_mnist,
    write_parquet,
    write_tar,
)

JPEGS = [encoded(picture(seed=seed), "JPEG", quality=95) for seed in range(12)]


def write_folders(root: Path) -> None:
    write_folder(root / "train", ("b", "a"), num=3)
    write_folder(root / "val", ("a", "b"), num=2)
    for name in ("train/a/notes.txt", "train/a/._001.jpg", "README.md"):
        (root / name).write_text("no picture")
    (root / "train" / ".cache").mkdir()


def write_shards(root: Path) -> None:
    for split in ("train", "validation", "test"):
        labels = [-1] * 10 if split == "test" else [i % 3 for i in range(10)]
        path = root / f"data/{split}-00000-of-00001.parquet"
        write_parquet(path, JPEGS[:10], labels, ("x", "y", "z"), image="img")


def write_tars(root: Path) -> None:
    for seed, (name, num) in enumerate((("train-000", 6), ("train-001", 6), ("val-000", 4))):
        write_tar(root / f"{name}.tar", tar_members(num, seed=seed))
    (root / "classes.txt").write_text("cat\ndog\n")


class Format(NamedTuple):
    """Writes itself; what comes out: numbers of samples, first classes, form, statistics, a training picture's name."""

    write: Callable[[Path], Any]
    samples: tuple[int, int]
    classes: list[str]
    form: tuple[int, int]
    statistics: Any
    name: str
    image: Any


def of_mnist(end: str) -> Format:
    name, image = f"train-images-idx3-ubyte{end}, picture 4", pixels(40, 28, 28, 1)[4, :, :, 0]
    return Format(partial(write_mnist, end=end), (40, 10), list("0123456789"), (28, 1), MNIST, name, image)


def of_cifar(version: int, binary: bool, num: int) -> Format:
    image = pixels(20, 3, 32, 32, 0).reshape(20, 3, 32, 32)[4].transpose(1, 2, 0)
    write, classes = partial(write_cifar, version=version, binary=binary), ["class0", "class1", "class2"]
    statistics = CIFAR10 if version == 10 else CIFAR100
    return Format(write, (num, 20), classes, (32, 3), statistics, "CIFAR's training pictures, picture 4", image)


def of_photos(write: Callable[[Path], Any], num: tuple[int, int], classes: str, name: str, data: bytes) -> Format:
    return Format(write, num, classes.split(), (224, 3), IMAGENET, name, Image.open(io.BytesIO(data)))


FIRST = "train-00000-of-00001.parquet, row 4"
FORMATS = {
    "mnist": of_mnist(""),
    "mnist.gz": of_mnist(".gz"),
    "cifar10": of_cifar(10, False, 100),
    "cifar10 binary": of_cifar(10, True, 100),
    "cifar100": of_cifar(100, False, 20),
    "cifar100 binary": of_cifar(100, True, 20),
    "folders": of_photos(write_folders, (6, 4), "a b", "train/b/001.jpg", JPEGS[1]),
    "parquet": of_photos(write_shards, (10, 10), "x y z", FIRST, JPEGS[4]),
    "tars": of_photos(write_tars, (12, 4), "cat dog", "train-000.tar/0-0004.jpg", tar_members(5)["0-0004.jpg"]),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_what_was_written_comes_out(kind: str, tmp_path: Path) -> None:
    wanted = FORMATS[kind]
    wanted.write(tmp_path)
    data = opened(tmp_path)
    assert (len(data.train), len(data.test)) == wanted.samples
    assert data.classes[: len(wanted.classes)] == wanted.classes
    assert (data.image_size, data.channels) == wanted.form and (data.mean, data.std) == wanted.statistics
    assert data.resize == (256 if data.image_size == 224 else data.image_size)
    assert data.train.name(4) == wanted.name
    np.testing.assert_array_equal(data.train.load(4), wanted.image)
    assert isinstance(data.train, PixelSource) == (data.image_size < 224)
    labels = [i % (6 if kind == "tars" else 20) % len(data.classes) for i in range(len(data.train))]
    assert data.train.labels.tolist() == ([0] * 3 + [1] * 3 if kind == "folders" else labels)
    assert "validation" in data.test.name(0) or kind != "parquet"


def test_mnist_mini_is_split_for_good() -> None:
    data = opened("mnist-mini")
    assert (data.name, len(data.train), len(data.test)) == ("mnist-mini", 4000, 1000)
    assert (np.bincount(data.test.labels) == 100).all() and (np.bincount(data.train.labels) == 400).all()
    assert (data.image_size, data.channels, data.mean, data.std, data.notes) == (28, 1, *MNIST, ())
    # Which digits are in the test split must never change, or results could not be compared.
    assert [int(data.test.name(i).rsplit(" ", 1)[1]) for i in range(5)] == [0, 5, 11, 15, 20]
    assert not set(names(data.train)) & set(names(data.test))


def test_parquet_files_that_are_named_and_columns_by_name_or_by_the_recipe(tmp_path: Path) -> None:
    for name, num in (("lessons-0", 4), ("deep/lessons-1", 3), ("exam", 2)):
        write_parquet(tmp_path / f"{name}.parquet", JPEGS[:num], [0, 1, 0, 1][:num])
    data = opened(tmp_path, train="lessons-*", test="exam.parquet")
    assert (len(data.train), len(data.test), data.classes) == (7, 2, ["0", "1"])
    assert len(opened(tmp_path, train="deep", test="lessons-0.parquet").train) == 3
    masks, images = ([encoded(picture(side, side)) for _ in range(6)] for side in (17, 28))
    file = tmp_path / "x.parquet"
    write_columns(file, mask=masks, Image=images, coarse_label=[0, 1] * 3, fine_label=[0, 1, 2] * 2)
    assert opened(file).notes[0] == "Image is taken of the columns mask, Image: data.image_column chooses"
    data = opened(file, image_column="mask", label_column="coarse_label")
    assert (data.image_size, len(data.classes), len(data.notes)) == (17, 2, 1)


@pytest.mark.parametrize("fits", [True, False])
def test_parquet_is_the_same_from_memory_and_by_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    monkeypatch.setattr("convoy.data.parquet.fits_in_memory", lambda _: fits)
    images = [*JPEGS[:5], None, b"", *JPEGS[7:]]
    write_parquet(tmp_path / "train.parquet", images, [i % 2 for i in range(12)])
    data, bad = opened(tmp_path, validation_fraction=0.25), set()
    assert len(data.train) == 9 and isinstance(data.train.source, MemorySource) == fits
    for source in (data.train, data.test):
        for sample, name in enumerate(names(source)):
            row = int(name.removeprefix("train.parquet, row "))
            assert source.labels[sample] == row % 2
            try:
                np.testing.assert_array_equal(source.load(sample), Image.open(io.BytesIO(images[row] or b"")))
            except BadImage as error:
                bad.add(error.name)
    assert bad == {"train.parquet, row 5", "train.parquet, row 6"}


def test_tar_names_with_dots_and_other_oddities(tmp_path: Path) -> None:
    wanted = {"22.05.jpg": 0, "22.06.jpg": 1, "photo.1.2.jpg": 0, "plain.jpg": 1, "sub.dir/x.jpg": 0}
    wanted["v1.0/22.05.jpg"] = 1
    members = {f"{name.removesuffix('.jpg')}.cls": str(label).encode() for name, label in wanted.items()}
    members |= {"y.json": b'{"label": 1}', "y.json.txt": b"", "z.cls": b" 1\n", "bell\x07.cls": b"0"}
    wanted |= {"y.jpg": 1, "z.big.jpg": 1, "bell\x07.png": 0}
    members |= dict.fromkeys([*wanted, "y.mask.png", "lone.05.jpg"], JPEGS[0])
    write_tar(tmp_path / "train.tar", members, format=tarfile.PAX_FORMAT)
    data = opened(tmp_path, validation_fraction=0.5)
    both = zip(names(data.train, data.test), [*data.train.labels, *data.test.labels], strict=True)
    assert {name.removeprefix("train.tar/").replace("\\x07", "\x07"): label for name, label in both} == wanted
    assert set(data.notes[0].removeprefix("left out: ").split(", ")) == {"1 .mask.png", "1 .json.txt", "1 .05.jpg"}
