"""CIFAR's pickles cannot run anything, and must be what they say."""

import io
import pickle

import numpy as np
import pytest

from convoy.data.cifar import read_pickle
from convoy.errors import ConvoyError
from data.made import dump, pixels

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
    "new object": b"\x80\x02}X\x04\x00\x00\x00datacnumpy\nndarray\n)\x81s.",
    "key of 2^60 tuples": b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
    "the same, doubled": b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.",
    "key that is deep": b"\x80\x02})" + b"\x85" * 10_000 + b"K\x01s.",
    "key of many digits": b"\x80\x02}\x8b" + (4_000).to_bytes(4, "little") + b"\x7f" * 4_000 + b"K\x01s.",
    "long name": b"c" + b"x" * 100_000 + b"\n\x1b[2J\n.",
    "wrong mark": b"(((t.",
    "no dictionary": b"]K\x01K\x02s.",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_do_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data_batch_1"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(ConvoyError, match="data_batch_1") as error:
        read_pickle(file)
    assert len(str(error.value)) < 400 and str(error.value).isprintable()
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
    for shape in ((1,) * 70, (2**200_000,) * 300):  # more than numpy has; a product of a minute
        dump(file, {b"data": good})
        plain, odd = (pickle.dumps(each, protocol=2)[2:-1] for each in (good.shape, shape))
        file.write_bytes(file.read_bytes().replace(plain[:5], odd))
        assert read_pickle(file)["data"] is None


@pytest.mark.parametrize("protocol", range(5))
def test_what_is_read_is_what_python_reads(protocol, tmp_path):
    file = tmp_path / "train"
    content = {"data": pixels(2, 2, 2, 3).reshape(2, -1), "labels": [0, -1, 2**40], "more": ("ä", 0.5, None, True, {})}
    content |= {"names": [f"{i}.png".encode() for i in range(300)]}
    file.write_bytes(pickle.dumps(content, protocol))
    read = read_pickle(file)
    assert np.array_equal(read.pop("data"), content.pop("data")) and read == content
