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
