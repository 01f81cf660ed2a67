"""Data sets that are missing, folders of pictures that are none, and options that do not fit the data."""

import gzip
import os
from pathlib import Path

import pytest

from data.made import encoded, picture, tar_members, write_folder, write_mnist, write_tar
from data.wrong import Cases, check_refusal

wrong = Cases()


@wrong("does not exist")
def missing_path(root: Path):
    return root / "nowhere"


@wrong("did you mean .*photos")
def mistyped_path(root: Path):
    (root / "photos").mkdir()
    return root / "photo"


@wrong("is an empty folder")
def empty_folder(root: Path): ...


@wrong("no data set in a known format")
def folder_of_loose_files(root: Path):
    (root / "a.txt").write_text("x")


@wrong("a data set is a folder, a .parquet or a .tar")
def some_other_file(root: Path):
    (root / "a.csv").write_text("x")
    return root / "a.csv"


@wrong("unpack it")
def packed_archive(root: Path):
    (root / "cifar-10-python.tar.gz").write_bytes(gzip.compress(b"x"))
    return root / "cifar-10-python.tar.gz"


@wrong("data.format=folder needs a folder", format="folder")
def file_for_a_folder_format(root: Path):
    return write_tar(root / "x.tar", tar_members(4))


@wrong("neither a file nor a folder")
def pipe(root: Path):
    os.mkfifo(root / "pipe")
    return root / "pipe"


@wrong(r"only 1 class \(cat\).*left out: dog/ without pictures")
def class_without_pictures(root: Path):
    write_folder(root)
    for file in (root / "dog").iterdir():
        file.unlink()


@wrong(r"only 1 class \(cat\)")
def only_one_class(root: Path):
    write_folder(root, ("cat",))


@wrong("zebra is a class that train/ does not have")
def class_only_in_the_test(root: Path):
    write_folder(root / "train")
    write_folder(root / "val", ("cat", "zebra"))


@wrong("has val/ but no train/")
def held_out_split_only(root: Path):
    write_folder(root / "val")


@wrong("holds no class folders")
def training_folder_without_classes(root: Path):
    (root / "train").mkdir()
    (root / "train" / "a.jpg").write_bytes(encoded(picture(), "JPEG"))
    write_folder(root / "val")


@wrong("val holds no class folders")
def held_out_folder_without_classes(root: Path):
    write_folder(root / "train")
    (root / "val").mkdir()


@wrong(r"dog/001.jpg is an empty file: .*data.bad_images=skip \(--bad-images skip\)")
def small_picture_that_is_empty(root: Path):
    write_folder(root, width=20, height=20)
    (root / "dog" / "001.jpg").write_bytes(b"")


@wrong("validation_fraction would be ignored", validation_fraction=0.2)
def a_split_that_is_there_already(root: Path):
    write_mnist(root)


@wrong("data.train would be ignored", train="train")
def a_split_of_what_names_none(root: Path):
    write_mnist(root)


@wrong("data.label_column would be ignored", label_column="label")
def a_column_of_folders(root: Path):
    write_folder(root)


@wrong("split_seed would be ignored", split_seed=3)
def a_split_seed_for_nothing(root: Path):
    write_mnist(root)


@wrong("has 3 numbers, but the pictures of mnist have 1 channels|have 3 numbers", mean=(0.5,) * 3, std=(0.5,) * 3)
def statistics_of_other_channels(root: Path):
    write_mnist(root)


@wrong("pca_noise needs colors, but the pictures of mnist are grey", augment={"pca_noise": 0.1})
def color_noise_on_grey(root: Path):
    write_mnist(root)


@wrong("interpolation would be ignored", augment={"interpolation": "bicubic"})
def interpolation_for_nothing(root: Path):
    write_mnist(root)


@wrong("resize=20 is smaller than the image size 28", resize=20)
def no_center_to_take(root: Path):
    write_mnist(root)


@pytest.mark.parametrize(("make", "message", "options"), wrong)
def test_it_is_refused_in_one_sentence(make, message, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refusal(tmp_path, make, message, options)
