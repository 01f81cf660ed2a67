"""Archives and pickles made to do harm: they write nothing, and take no more memory than their data do."""

import io
import pickle
import tarfile
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from convoy.data.config import DataConfig
from convoy.data.decode import BadImage
from convoy.data.folder import open_folder
from convoy.data.pixels import read_idx, read_pickle
from convoy.data.webdataset import open_tars
from convoy.errors import ConvoyError
from data.made import encoded, picture, write_tar

PNG = encoded(picture(8, 8))


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def test_a_tar_writes_nothing_wherever_its_members_point(tmp_path: Path) -> None:
    places = ("../../escaped", "/tmp/convoy-escaped", "a/../../../escaped")
    kinds = {"link.png": tarfile.SYMTYPE, "hard.png": tarfile.LNKTYPE, "pipe.png": tarfile.FIFOTYPE}
    kinds["device.png"] = tarfile.CHRTYPE
    members = {f"{place}.{end}": content for place in places for end, content in (("png", PNG), ("cls", b"0"))}
    changes = {name: {"type": kind, "linkname": "../../../etc/passwd"} for name, kind in kinds.items()}
    path = write_tar(tmp_path / "a" / "b" / "train.tar", members | dict.fromkeys(kinds, b""), changes=changes)
    source = open_tars(path, DataConfig()).train
    assert len(source) == len(places)  # links, pipes and devices are no pictures
    assert all(source.read(sample) == PNG for sample in range(len(places)))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "train.tar"]
    assert not Path("/tmp/convoy-escaped.png").exists()


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header of GNU's with any size, in the form for large and negative numbers if need be."""
    fields = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    fields[124:136] = size
    fields[156:157] = kind
    fields[148:156] = b" " * 8
    fields[148:156] = b"%06o\0 " % sum(fields)
    return bytes(fields)


@pytest.mark.timeout(60)
def test_sizes_that_cannot_be_end_with_a_sentence_and_what_is_read_has_a_limit(tmp_path: Path) -> None:
    """A member of fewer bytes than none keeps Python's tarfile busy for ever (CVE-2025-8194)."""
    path = tmp_path / "train.tar"
    negative, huge = b"\xff" + (-512).to_bytes(11, "big", signed=True), b"\x80" + (2**60).to_bytes(11, "big")
    for size, kinds in ((negative, b"0xL"), (huge, b"0xLg")):
        for kind in kinds:
            path.write_bytes(header("a.png", size, bytes([kind])) + PNG.ljust(1024, b"\0") + bytes(1024))
            with pytest.raises(ConvoyError, match=r"train\.tar"):
                open_tars(path, DataConfig())
    write_tar(path, {"a.png": PNG, "a.cls": b"0" + b" " * 2**22})
    with memory_below(3 * 2**20):
        open_tars(path, DataConfig())
    (tmp_path / "cat").mkdir()
    with (tmp_path / "cat" / "a.png").open("wb") as file:
        file.truncate(2**30 + 1)  # a hole: it takes no space
    with pytest.raises(BadImage, match="has more than 1073741824 bytes"):
        open_folder(tmp_path, DataConfig()).train.read(0)


def bomb(path: Path, claimed: int, content: int) -> None:
    """A gzip file of `content` zero bytes behind a header that claims `claimed` pictures of one pixel."""
    head = b"".join(number.to_bytes(4, "big") for number in (0x803, claimed, 1, 1))
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    chunks = [packer.compress(head), *(packer.compress(bytes(2**20)) for _ in range(content >> 20)), packer.flush()]
    path.write_bytes(b"".join(chunks))


def test_a_gzip_bomb_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    for claimed, content in ((2**31, 2**20), (2**10, 2**26)):  # more than it holds, and less
        bomb(path, claimed, content)
        with memory_below(2**22), pytest.raises(ConvoyError, match=r"train-images-idx3-ubyte\.gz"):
            read_idx(path, 0x803)
    bomb(path, 2**24, 2**24)
    assert read_idx(path, 0x803).nbytes == 2**24
    monkeypatch.setattr("convoy.data.pixels.host_memory", lambda: 2**24)
    with pytest.raises(ConvoyError, match="more than half of this machine's memory"):
        read_idx(path, 0x803)


HOSTILE = {
    "system": b"cos\nsystem\n(S'touch harmed'\ntR.",
    "numpy": b"cnumpy\nload\n(S'x'\ntR.",
    "nested name": pickle.dumps({})[:2] + b"\x8c\x05numpy\x8c\x0bload.__init__\x93.",
    "persistent": b"Pid\n.",
    "memory": b"\x80\x04\x96" + (2**62).to_bytes(8, "little") + b"x.",
    "build": b"cnumpy\nndarray\n(tR(dS'__class__'\nS'x'\nsb.",
    "key of 2^60 tuples": b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
    "set of 2^60 tuples": b"\x80\x04})" + b"q\x00h\x00\x86" * 60 + b"0(h\x00\x91s.",
    "named class": b"cnumpy\nndarray\n)\x81.",
    "long name": b"c" + b"x" * 100_000 + b"\n\x1b[2J\n.",
    "no dictionary": b"]K\x01K\x02s.",
}


@pytest.mark.timeout(60)
def test_hostile_pickles_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data_batch_1"
    for name, content in HOSTILE.items():
        file.write_bytes(content)
        with pytest.raises(ConvoyError, match="data_batch_1") as error:
            read_pickle(file)
        assert len(str(error.value)) < 400 and str(error.value).isprintable(), name
        assert not (tmp_path / "harmed").exists(), name
    pickle.load(io.BytesIO(HOSTILE["system"]))
    assert (tmp_path / "harmed").exists()  # the control: an ordinary reader does what it says
    # Ten bytes for which Python's own unpickler takes gigabytes: its table of objects grows to the place named.
    for code in (b"r" + (2**31 - 1).to_bytes(4, "little"), b"p2000000000\n"):
        file.write_bytes(b"\x80\x02}" + code + b".")
        with memory_below(2**20):
            assert read_pickle(file) == {}
    # A text of a megabyte, and a hundred times the wish to have it in bytes.
    text = b"X" + (2**20).to_bytes(4, "little") + b"x" * 2**20
    file.write_bytes(b"\x80\x02}]" + text + b"q\x000" + b"c_codecs\nencode\nh\x00X\x06\0\0\0latin1\x86Ra" * 100 + b"0.")
    with memory_below(2**24):
        read_pickle(file)
