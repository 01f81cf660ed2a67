"""Ranks with other data than rank 0, and a run that goes on with other data, are refused at once, in a sentence."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from convoy.data import DataConfig, pack
from convoy.data.dataset import open_files
from convoy.data.pack_format import PackOptions
from convoy.errors import ConvoyError
from data.made import tar_members, write_parquet, write_tar
from ranks import run_ranks
from tiny import write_mnist, write_pictures
from whole_runs import train_here

SETTINGS = {"epochs": "1ba", "data.image_size": "28", "data.augment.crop": "none", "data.workers": "0"}


def repaint(folder: Path, pattern: str = "train/*/*.png") -> None:
    """Other pictures under the same names."""
    for number, file in enumerate(sorted(folder.glob(pattern))):
        Image.new("RGB", (40, 30), (number, 9, 9)).save(file)


def pack_it(folder: Path) -> None:
    kind, opened = open_files(DataConfig(path=str(folder)))
    pack.pack(kind, opened, folder / "packed", PackOptions(), None, 1)
    for name in ("train", "val"):
        shutil.rmtree(folder / name)
    for file in (folder / "packed").iterdir():
        file.rename(folder / file.name)


def pack_others(folder: Path) -> None:
    repaint(folder)
    pack_it(folder)


def mnist(folder: Path, num: int) -> None:
    shutil.rmtree(folder)
    write_mnist(folder, num)


def tars(folder: Path, size: int) -> None:
    shutil.rmtree(folder)
    write_tar(folder / "train.tar", tar_members(40, width=size))


def parquet(folder: Path, size: int) -> None:
    shutil.rmtree(folder)
    members = tar_members(40, width=size)
    images = [content for name, content in members.items() if name.endswith(".jpg")]
    write_parquet(folder / "train.parquet", images, [number % 2 for number in range(40)])


def changed_byte(folder: Path, file: str) -> None:
    content = bytearray((folder / file).read_bytes())
    content[-1] ^= 1
    (folder / file).write_bytes(content)


Change = Callable[[Path], object]


def nothing(folder: Path) -> None:
    pass


# What is done to the data of rank 0 and of rank 1, and what is said of them; None: they are the same.
HOSTS: dict[str, tuple[Change, Change, str | None]] = {
    "same": (nothing, nothing, None),
    "fewer": (
        nothing,
        lambda data: (data / "train/a/7.png").unlink(),
        r"the number of training samples is 23 for rank 1 on \S+, and 24 for rank 0 on \S+",
    ),
    "fewer to test on": (nothing, lambda data: (data / "val/c/0.png").unlink(), "number of test samples is 11"),
    "renamed": (nothing, lambda data: (data / "train/a/7.png").rename(data / "train/a/00.png"), "names or the order"),
    "another class": (
        nothing,
        lambda data: [(data / s / "b").rename(data / s / "bb") for s in ("train", "val")],
        "names",
    ),
    "repainted": (nothing, repaint, "the sizes of the training files differ"),
    "tests repainted": (nothing, lambda data: repaint(data, "val/*/*.png"), "the sizes of the test files"),
    "packed": (nothing, pack_it, "the format is pack for rank 1"),
    "packs": (pack_it, pack_it, None),
    "packed from others": (pack_it, pack_others, "the contents of the training samples"),
    "mnist": (lambda data: mnist(data, 96), lambda data: mnist(data, 96), None),
    "other pixels": (
        lambda data: mnist(data, 96),
        lambda data: [mnist(data, 96), changed_byte(data, "train-images-idx3-ubyte")],
        "the contents of the training samples differ between rank 1",
    ),
    "other labels": (
        lambda data: mnist(data, 96),
        lambda data: [mnist(data, 96), changed_byte(data, "t10k-labels-idx1-ubyte")],
        "the labels of the test samples",
    ),
    "tars": (lambda data: tars(data, 40), lambda data: tars(data, 41), "the sizes of the training files"),
    "parquet": (lambda data: parquet(data, 40), lambda data: parquet(data, 41), "the sizes of the training files"),
}


def train_on_hosts(folder: Path) -> dict[str, str]:
    """What is said where the same path leads to other files, as on another host."""
    said, before = {}, Path.cwd()
    for name in HOSTS:
        os.chdir(folder / name / f"host-{os.environ['RANK']}")
        try:
            train_here(Path("data"), folder / name / "run", SETTINGS)
            said[name] = "trained"
        except ConvoyError as error:
            said[name] = str(error)
        finally:
            os.chdir(before)
    return said


def test_other_data_on_another_host_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    for name, (*changes, _) in HOSTS.items():
        for rank, change in enumerate(changes):
            change(shutil.copytree(data, tmp_path / name / f"host-{rank}" / "data"))
    first, second = run_ranks(train_on_hosts, 2, tmp_path, timeout=170)
    assert first == second
    for name, (*_, words) in HOSTS.items():
        assert re.search(words or "^trained$", first[name]), (name, first[name])
        assert words is None or re.match("the data are not the same everywhere: .*: give all hosts the", first[name])
        assert (tmp_path / name / "run").exists() == (words is None)


RESUMED: dict[str, tuple[Change, str | None]] = {
    "renamed": (lambda data: (data / "train/a/7.png").rename(data / "train/a/00.png"), "names or the order .*changed"),
    "repainted": (repaint, "the sizes of the training files have changed"),
    "packed": (pack_it, None),
    "mended": (lambda data: repaint(data, "train/a/0.png"), None),
}


def test_a_run_goes_on_with_the_same_data_or_not_at_all(tmp_path: Path) -> None:
    data, out = write_pictures(tmp_path / "data"), tmp_path / "run"
    train_here(data, out, SETTINGS)
    before = (out / "environment.json").read_bytes()
    for name, (change, words) in RESUMED.items():
        changed = shutil.copytree(data, tmp_path / name)
        change(changed)
        (out / "summary.json").unlink(missing_ok=True)
        shutil.rmtree(out / "checkpoints", ignore_errors=True)  # as at its beginning
        (out / "weights.safetensors").unlink(missing_ok=True)
        if words is None:
            said = train_here(changed, out, SETTINGS, resume=True).said
            sentence = "1 of 36 files that were looked at have another size than when the run was begun"
            assert (sentence in said) == (name == "mended"), said
        else:
            with pytest.raises(ConvoyError, match=rf"not those that {out} was begun on \(.*{words}"):
                train_here(changed, out, SETTINGS, resume=True)
            assert (out / "environment.json").read_bytes() == before
