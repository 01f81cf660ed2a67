"""Data sets that are missing, damaged, incomplete or contradict themselves: each is refused in one sentence."""

import os
import re
from collections.abc import Callable, Sequence
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


def tree(*paths: str) -> Make:
    """Files and, with a slash at the end, folders."""

    def make(root: Path) -> None:
        for path in paths:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).mkdir() if path.endswith("/") else (root / path).write_bytes(b"x")

    return make


def folders(**classes: str) -> Make:
    """Class folders with pictures, by split."""
    return lambda root: [write_folder(root / split, names.split(), num=2) for split, names in classes.items()]


def several(*makes: Make) -> Make:
    """All in one folder, which is opened."""
    return lambda root: [make(root) for make in makes]


def damaged(write: Make, file: str, change: Callable[[bytes], bytes] | None) -> Make:
    """With other bytes in a file, or without it."""

    def make(root: Path) -> None:
        write(root)
        path = root / file
        path.write_bytes(change(path.read_bytes())) if change else path.unlink()

    return make


JPEGS = [encoded(picture(seed=seed), "JPEG") for seed in range(4)]


def parquet(labels: Sequence[Any], *names: Any, file: str = "x", images: int = 4, **options: Any) -> Make:
    return lambda root: write_parquet(root / f"{file}.parquet", JPEGS[:images], labels, *names, **options)


def two(labels: Sequence[Any], others: Sequence[Any], *names: Any) -> Make:
    """Files to train and to test on."""
    return several(parquet(labels, *names, file="train"), parquet(others, *names, file="test"))


def tar(file: str = "x.tar", mode: str = "w", **changes: bytes | None) -> Make:
    """Four samples, with other members in place of some: `cls2` is that of the third sample."""
    members = tar_members(4) | {f"0-000{name[-1]}.{name[:-1]}": content for name, content in changes.items()}
    members = {name: content for name, content in members.items() if content is not None}
    return lambda root: write_tar(root / file, members, mode)


def bytes_of_parquet(change: Callable[[bytes], bytes]) -> Make:
    return damaged(parquet([0, 1, 0, 1], rows=4), "x.parquet", change)


def more_rows(content: bytes) -> bytes:
    """Parquet whose only group says that it has five rows of four, as thrift writes them."""
    at = content.rindex(b"\x16\x08")
    return content[:at] + b"\x16\x0a" + content[at + 2 :]


def cifar(file: str, change: Callable[[bytes], bytes] | None, version: int = 10, binary: bool = False) -> Make:
    return lambda root: damaged(lambda _: None, file, change)(write_cifar(root, version, binary))


small = partial(write_folder, width=20, height=20)
PICTURES = "train-images-idx3-ubyte"
HUGE = b"".join(n.to_bytes(4, "big") for n in (0x803, 2**32 - 1, 65535, 65535))
LABELED = [0, 1, 0, 1]
"""A row: words of the sentence, what makes the data set, and keys of the recipe."""

REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "folders": [
        ("does not exist", tree(), {"path": "nowhere"}),
        ("no data set in a known format", tree("a.txt")),
        ("neither a file nor a folder", lambda root: os.mkfifo(root / "pipe"), {"path": "pipe"}),
        ("zebra is a class that train/ does not have", folders(train="cat dog", val="cat zebra")),
        (r"1.jpg is an empty file: .*skip \(--bad-images skip\)", damaged(small, "dog/001.jpg", lambda _: b"")),
        ("validation_fraction would be ignored", write_mnist, {"validation_fraction": 0.2}),
    ],
    "mnist": [
        ("begins with 00000999, not 00000803", damaged(write_mnist, PICTURES, lambda data: b"\0\0\x09\x99" + data[4:])),
        ("should hold 31360 bytes of pictures but has only", damaged(write_mnist, PICTURES, lambda data: data[:-100])),
        ("says it holds 4294967295 x 65535 x 65535 bytes", damaged(write_mnist, PICTURES, lambda _: HUGE)),
    ],
    "cifar": [
        ("data_batch_3 is missing", cifar("data_batch_3", None)),
        ("no multiple of 3073", cifar("data_batch_2.bin", lambda data: data[:-5], binary=True)),
        ("label 17, out of range", cifar("test_batch.bin", lambda data: b"\x11" + data[1:], binary=True)),
        ("cut off or no pickle|no plain CIFAR pickle", cifar("data_batch_1", lambda data: data[:-100])),
    ],
    "parquet": [
        ("label -1, out of range.*withheld", two(LABELED, [-1] * 4, "ab")),
        ("1 rows without a label", parquet([0, 1, None, 1])),
        ("is cut off or damaged", bytes_of_parquet(more_rows)),
        ("no parquet file, or is cut off", bytes_of_parquet(lambda data: data[:-100])),
    ],
    "tar": [
        ("has no label for 0-0002.jpg: a sample needs 0-0002.cls", tar(cls2=None)),
        ("label 99999999.*out of range", tar(cls2=b"99999999")),
        ("is no tar file, or is cut off", damaged(tar(), "x.tar", lambda data: data[:1636])),
        ("is compressed", tar(mode="w:gz")),
    ],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_wrong_is_refused_in_one_sentence_and_nothing_is_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = []
    for number, (words, make, *options) in enumerate(REFUSED[kind]):
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
