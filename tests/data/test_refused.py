"""Data sets that are missing, incomplete or contradict themselves: each is refused in one sentence, and nothing is
written. What is damaged: `tests/test_fuzz.py`."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from convoy.errors import ConvoyError
from data.made import (
    encoded,
    opened,
    picture,
    tar_members,
    write_cifar,
    write_folder,
    write_mnist,
    write_parquet,
    write_tar,
)

Make = Callable[[Path], Any]
"""Makes a data set in a folder."""


def folders(**classes: str) -> Make:
    """Class folders with pictures, by split."""
    return lambda root: [write_folder(root / split, names.split(), num=2) for split, names in classes.items()]


def changed(write: Make, file: str, change: Callable[[bytes], bytes] | None) -> Make:
    """With other bytes in a file, or without it."""

    def make(root: Path) -> None:
        write(root)
        (path,) = root.rglob(file)
        path.write_bytes(change(path.read_bytes())) if change else path.unlink()

    return make


def beside(write: Make, file: str, content: str = "") -> Make:
    """With another file among those of the data set."""
    return lambda root: [write(root), (root / file).write_text(content)]


JPEGS = [encoded(picture(seed=seed), "JPEG") for seed in range(4)]
LABELED = [0, 1, 0, 1]


def parquet(**labels: list[Any]) -> Make:
    """Files with these labels, by their names."""
    return lambda root: [write_parquet(root / f"{file}.parquet", JPEGS, of, "ab") for file, of in labels.items()]


def tar(mode: str = "w", **changes: bytes | None) -> Make:
    """Four samples, with other members in place of some: `cls2` is that of the third sample."""
    members = tar_members(4) | {f"0-000{name[-1]}.{name[:-1]}": content for name, content in changes.items()}
    return lambda root: write_tar(root / "x.tar", {name: data for name, data in members.items() if data}, mode)


small = partial(write_folder, num=2, width=20, height=20)
PICTURES = "train-images-idx3-ubyte"
HUGE = b"".join(n.to_bytes(4, "big") for n in (0x803, 2**32 - 1, 65535, 65535))
REFUSED: list[tuple[Any, ...]] = [  # words of the sentence, what makes the data set, and keys of the recipe
    ("does not exist", lambda root: None, {"path": "nowhere"}),
    ("neither a file nor a folder", lambda root: os.mkfifo(root / "pipe"), {"path": "pipe"}),
    ("zebra is a class that train/ does not have", folders(train="cat dog", val="cat zebra")),
    (r"1.jpg is an empty file: .*skip \(--bad-images skip\)", changed(small, "dog/001.jpg", lambda _: b"")),
    ("split_seed would be ignored", write_mnist, {"split_seed": 2}),
    ("should hold 31360 bytes of pictures but has only", changed(write_mnist, PICTURES, lambda data: data[:-100])),
    ("says it holds 4294967295 x 65535 x 65535 bytes", changed(write_mnist, PICTURES, lambda _: HUGE)),
    ("data_batch_3 is missing", changed(lambda root: write_cifar(root, 10, False), "data_batch_3", None)),
    ("no multiple of 3073", changed(lambda root: write_cifar(root, 10, True), "data_batch_2.bin", lambda d: d[:-5])),
    ("label -1, out of range.*withheld", parquet(train=LABELED, test=[-1] * 4)),
    ("1 rows without a label", parquet(x=[0, 1, None, 1])),
    ("no parquet file, or is cut off", changed(parquet(x=LABELED), "x.parquet", lambda data: data[:-100])),
    ("has no label for 0-0002.jpg: a sample needs 0-0002.cls", tar(cls2=None)),
    ("is compressed", tar(mode="w:gz")),
    ("say which to read by --set data.format=webdataset or --set data.format=folder", beside(small, "train.tar")),
    ("say which to read by --set data.format=parquet", beside(folders(train="a b"), "train/x.parquet")),
    ("begins with 'id, what', no picture.*set data.format=folder", beside(small, "labels.csv", "id,what\n1,2\n")),
    ("has only 1 class .*to read .*train.csv, set data.path to it", beside(folders(images="a"), "train.csv")),
    ("or labels.csv; to read .*train.csv, set data.path to it", beside(lambda _: None, "train.csv")),
]


def test_what_is_wrong_is_refused_in_one_sentence_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = []
    for number, (words, make, *options) in enumerate(REFUSED):
        root = tmp_path / f"{number}"
        root.mkdir()
        make(root)
        section = options[0] if options else {}
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConvoyError) as error:
            opened(**section | {"path": root / section.get("path", "")})
        sentence = str(error.value)
        is_right = re.search(words, sentence) and len(sentence) < 400 and sentence.isprintable()
        answers += [] if is_right and sorted(tmp_path.rglob("*")) == before else [f"{words}: {sentence}"]
    assert not answers, "\n".join(answers)
