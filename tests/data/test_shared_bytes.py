import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from convoy.data import AugmentConfig, DataConfig, Order, open_data, training_batches
from convoy.data.decode import BadImage
from convoy.data.memory import SharedBytes
from convoy.data.parquet import MemorySource, fits_in_memory
from convoy.errors import ConvoyError
from data.made import encoded, picture, write_parquet

IMAGES = [encoded(picture(seed=i), "JPEG", quality=95) for i in range(12)]


def write(path, images=IMAGES):
    return write_parquet(path / "train.parquet", images, [i % 2 for i in range(len(images))])


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_pieces_come_back_as_they_were():
    pieces = [b"a", b"", b"bcd" * 1000, b""]
    shared = SharedBytes(pieces)
    assert [shared[i] for i in range(len(shared))] == pieces
    assert len(SharedBytes([])) == 0
    assert SharedBytes([b""])[0] == b""


def test_the_memory_is_given_back():
    before = num_open_files()
    shared = SharedBytes([b"x" * 10_000])
    assert num_open_files() > before
    del shared
    assert num_open_files() == before

    def broken() -> Iterator[bytes]:
        yield b"x"
        raise ConvoyError("the file is cut off")

    with pytest.raises(ConvoyError):
        SharedBytes(broken())
    assert num_open_files() == before


@pytest.mark.parametrize("fits", [True, False])
def test_parquet_is_the_same_from_memory_and_by_row_groups(tmp_path, monkeypatch, fits):
    monkeypatch.setattr("convoy.data.parquet.fits_in_memory", lambda _: fits)
    write(tmp_path)
    section = DataConfig(path=str(tmp_path), image_size=24, validation_fraction=0.25)
    data = open_data(section)
    sources = {data.train.name(i): data.train.load(i) for i in range(len(data.train))}
    assert len(sources) == 9
    for name, image in sources.items():
        row = int(name.removeprefix("train.parquet, row "))
        assert image.tobytes() == Image.open(io.BytesIO(IMAGES[row])).tobytes()
    order = Order(9, 3, seed=0)
    in_worker, here = (
        list(
            training_batches(
                data, section.model_copy(update={"workers": workers}), order, first_update=0, num_updates=3, seed=0
            )
        )
        for workers in (1, 0)
    )
    assert [batch.images.tolist() for batch in in_worker] == [batch.images.tolist() for batch in here]


@pytest.mark.parametrize("fits", [True, False])
def test_a_row_without_a_picture_is_a_bad_one(tmp_path, monkeypatch, fits):
    monkeypatch.setattr("convoy.data.parquet.fits_in_memory", lambda _: fits)
    write(tmp_path, [*IMAGES[:5], None, b"", *IMAGES[7:]])
    data = open_data(DataConfig(path=str(tmp_path), augment=AugmentConfig(flip=True)))
    names = {}
    for source in (data.train, data.test):
        for i in range(len(source)):
            try:
                source.load(i)
            except BadImage as bad:
                names[bad.name] = bad.reason
    assert set(names) == {"train.parquet, row 5", "train.parquet, row 6"}


def test_a_damaged_row_group_is_refused(tmp_path):
    path = write(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 200] = b"\xff" * 200
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    with pytest.raises(ConvoyError, match=r"train.parquet .*damaged"):
        open_data(DataConfig(path=str(path)))


def test_a_disk_that_fails_meanwhile_is_named(tmp_path, monkeypatch):
    def fail(*_: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = write(tmp_path)
    for method in ("read", "read_row_group"):
        with monkeypatch.context() as patch, pytest.raises(ConvoyError, match=r"train\.parquet cannot be read: Input"):
            patch.setattr(pq.ParquetFile, method, fail)
            open_data(DataConfig(path=str(path)))


def test_what_fits(monkeypatch):
    monkeypatch.setattr("convoy.data.parquet.host_memory", lambda: 2**33)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert fits_in_memory(2**30)
    assert not fits_in_memory(2**30 + 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not fits_in_memory(2**29)
    monkeypatch.delattr(os, "memfd_create")
    assert not fits_in_memory(1)


def test_the_memory_source_keeps_names_and_labels(tmp_path):
    write(tmp_path)
    data = open_data(DataConfig(path=str(tmp_path)))
    assert isinstance(data.train.source, MemorySource)
    assert data.train.labels.tolist() == [int(data.train.name(i).split()[-1]) % 2 for i in range(len(data.train))]
