"""Archives and pickles made to do harm: they write nothing, and take no more memory than their data do."""

import gzip
import io
import pickle
import tarfile
import tracemalloc
import zlib
from pathlib import Path

import pytest

from convoy.data.cifar import read_pickle
from convoy.data.config import DataConfig
from convoy.data.mnist import read_idx
from convoy.data.webdataset import open_tars
from convoy.errors import ConvoyError
from data.made import encoded, picture

PNG = encoded(picture(8, 8))


def member(name: str, content: bytes = PNG, **changes: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, content


def write(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize(
    "place", ["../../escaped", "/tmp/convoy-escaped", "a/../../../escaped", "C:\\escaped", "~/escaped"]
)
def test_a_tar_writes_nothing_wherever_its_members_point(place: str, tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write(
        inner / "train.tar",
        member(f"{place}.png"),
        member(f"{place}.cls", b"0"),
        member("link.png", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("hard.png", b"", type=tarfile.LNKTYPE, linkname="../../../etc/passwd"),
        member("pipe.png", b"", type=tarfile.FIFOTYPE),
        member("device.png", b"", type=tarfile.CHRTYPE),
    )
    opened = open_tars(inner / "train.tar", DataConfig())
    assert len(opened.train) == 1  # links, pipes and devices are no pictures
    assert opened.train.read(0) == PNG
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


NEGATIVE = b"\xff" + (-512).to_bytes(11, "big", signed=True)
HUGE = b"\x80" + (2**60).to_bytes(11, "big")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("size", "kind"),
    [(NEGATIVE, b"0"), (NEGATIVE, b"x"), (NEGATIVE, b"L"), (HUGE, b"0"), (HUGE, b"x"), (HUGE, b"L"), (HUGE, b"g")],
)
def test_sizes_that_cannot_be_end_with_a_sentence(size: bytes, kind: bytes, tmp_path: Path) -> None:
    """A member of fewer bytes than none keeps Python's tarfile busy for ever (CVE-2025-8194)."""
    path = tmp_path / "train.tar"
    path.write_bytes(header("a.png", size, kind) + PNG.ljust(1024, b"\0") + bytes(1024))
    with pytest.raises(ConvoyError, match=r"train\.tar"):
        open_tars(path, DataConfig())


def test_a_label_is_read_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "train.tar"
    write(path, member("a.png"), member("a.cls", b"0" + b" " * 2**22))
    tracemalloc.start()
    open_tars(path, DataConfig())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * 2**20


def bomb(path: Path, claimed: int, content: int) -> None:
    """A gzip file of `content` zero bytes behind a header that claims `claimed` pictures of one pixel."""
    head = b"".join(number.to_bytes(4, "big") for number in (0x803, claimed, 1, 1))
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        file.write(packer.compress(head))
        for _ in range(content >> 20):
            file.write(packer.compress(bytes(2**20)))
        file.write(packer.flush())


@pytest.mark.parametrize(("claimed", "content"), [(2**31, 2**20), (2**10, 2**26)])
def test_a_gzip_bomb_takes_no_memory(claimed: int, content: int, tmp_path: Path) -> None:
    """One claims more than its bytes can hold, the other holds more than it claims."""
    path = tmp_path / "train-images-idx3-ubyte.gz"
    bomb(path, claimed, content)
    tracemalloc.start()
    with pytest.raises(ConvoyError, match=r"train-images-idx3-ubyte\.gz"):
        read_idx(path, 0x803)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**22


def test_what_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    bomb(path, 2**24, 2**24)
    assert read_idx(path, 0x803).nbytes == 2**24
    monkeypatch.setattr("convoy.data.mnist.host_memory", lambda: 2**24)
    with pytest.raises(ConvoyError, match="more than half of this machine's memory"):
        read_idx(path, 0x803)


def test_a_pickle_takes_no_memory_for_places_it_does_not_need(tmp_path: Path) -> None:
    """Ten bytes for which Python's own unpickler takes gigabytes: its table of objects grows to the place named."""
    path = tmp_path / "data_batch_1"
    for code in (b"r" + (2**31 - 1).to_bytes(4, "little"), b"p2000000000\n"):
        path.write_bytes(b"\x80\x02}" + code + b".")
        tracemalloc.start()
        assert read_pickle(path) == {}
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 2**20


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_honest_pickles_of_every_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    content = {"labels": list(range(300)), "filenames": [f"{number}.png" for number in range(300)]}
    path.write_bytes(pickle.dumps(content, protocol))
    assert read_pickle(path)["labels"] == content["labels"]


def test_a_compressed_tar_is_not_unpacked(tmp_path: Path) -> None:
    write(tmp_path / "plain", member("a.png"), member("a.cls", b"0"))
    path = tmp_path / "train.tar"
    path.write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    with pytest.raises(ConvoyError, match="is compressed"):
        open_tars(path, DataConfig())


def test_a_file_of_a_gigabyte_is_no_picture(tmp_path: Path) -> None:
    from convoy.data.decode import BadImage
    from convoy.data.folder import open_folder

    (tmp_path / "cat").mkdir()
    with (tmp_path / "cat" / "a.png").open("wb") as file:
        file.truncate(2**30 + 1)  # a hole: it takes no space
    source = open_folder(tmp_path, DataConfig()).train
    with pytest.raises(BadImage, match="has more than 1073741824 bytes"):
        source.read(0)
