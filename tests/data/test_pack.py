"""Packing: the same samples in the same order, whole or not there, and never read before it is finished."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from convoy.data import DataConfig, open_data, pack
from convoy.data.dataset import open_files
from convoy.data.decode import open_picture, suffix_of
from convoy.data.files import Opened
from convoy.data.packed import INDEX, UNFINISHED, Pack, PackOptions
from convoy.errors import ConvoyError, MachineError
from data.made import (
    Listed,
    encoded,
    opened,
    packed,
    picture,
    same,
    tar_members,
    trained,
    turned,
    write_cifar,
    write_folder,
    write_mnist,
    write_parquet,
    write_tar,
)


def is_same(pack_folder: Path, source: Path, **options: Any) -> bool:
    """Whether training on both is the same; the pack is read by so many `workers`."""
    section = {"workers": 0, "augment": {"flip": True}, "image_size": 24} | options
    sections = {"path": str(pack_folder), **section}, {"path": str(source), **section, "workers": 0}
    return same(*(trained(DataConfig(**keys), num=6, batch=4) for keys in sections))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def write_split(folder: Path) -> None:
    write_folder(folder / "train", ("a", "b"), num=8)
    write_folder(folder / "val", ("a", "b"), num=2)


def write_rows(folder: Path) -> None:
    images = [encoded(picture(seed=i), "JPEG") for i in range(20)]
    write_parquet(folder / "x.parquet", images, [i % 3 for i in range(20)])


def write_odd(folder: Path) -> None:
    """Files that are not just RGB in eight bits, which a pack keeps under names that say what they are."""
    deep = Image.fromarray(np.linspace(0, 65535, 60 * 50).astype(np.uint16).reshape(50, 60))
    clear = picture().convert("RGBA")
    clear.putalpha(100)
    files = {
        "cmyk.jpg": encoded(picture(mode="CMYK"), "JPEG"),
        "grey.jpg": encoded(picture(mode="L"), "JPEG"),
        "turned.jpg": encoded(picture(), "JPEG", exif=turned(6)),
        "several.jpg": encoded(picture(seed=1), "MPO", save_all=True, append_images=[picture(seed=2)]),
        "deep.png": encoded(deep),
        "clear.png": encoded(clear),
        "palette.gif": encoded(picture().convert("P"), "GIF"),
        "bits.tif": encoded(picture().convert("1"), "TIFF"),
        "new.webp": encoded(picture(), "WEBP"),
    }
    for name, content in files.items():
        assert name.endswith(suffix_of(open_picture(content, name)))
        for kind in ("a", "b", "c"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            (folder / kind / name).write_bytes(content)


BOX, IN_MEMORY = {"augment": {"crop": "random-resized", "flip": True}}, {"augment": {"crop": "pad"}, "image_size": None}
SOURCES: dict[str, tuple[Callable[[Path], Any], bool, dict[str, Any]]] = {  # raw: parts of JPEGs may be decoded smaller
    "split folder": (write_split, True, {"workers": 2}),
    "odd pictures": (write_odd, True, {}),
    "parquet": (write_rows, False, BOX),
    "tar": (lambda folder: write_tar(folder / "x.tar", tar_members(20)), True, {}),
    "mnist": (write_mnist, False, IN_MEMORY),
    "cifar": (lambda folder: write_cifar(folder, 10, binary=True), True, IN_MEMORY),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_on_a_pack_sees_every_pixel_of_the_original_in_its_order(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, raw, options = SOURCES[kind]
    write(tmp_path / "source")
    packed(tmp_path / "source", tmp_path / "packed", PackOptions(raw=raw))
    assert is_same(tmp_path / "packed", tmp_path / "source", **options)
    source, data = (opened(tmp_path / name) for name in ("source", "packed"))
    for fact in ("name", "classes", "image_size", "channels", "mean", "std", "resize"):
        assert getattr(data, fact) == getattr(source, fact)
    assert data.train.labels.tolist() == source.train.labels.tolist()
    assert data.test.labels.tolist() == source.test.labels.tolist()
    if kind != "split folder":
        return
    (tmp_path / "plain").mkdir()  # any reader of tars
    for name in ("train-000000.tar", "test-000000.tar", "classes.txt"):
        shutil.copy(tmp_path / "packed" / name, tmp_path / "plain" / name)
    assert opened(tmp_path / "plain").format == "webdataset" and is_same(tmp_path / "plain", tmp_path / "source")
    with tarfile.open(tmp_path / "plain" / "train-000000.tar") as tar:
        assert tar.getnames()[:4] == ["000000000.ppm", "000000000.cls", "000000001.ppm", "000000001.cls"]
    arrays = pack.index_arrays  # the control: shards whose samples are numbered backwards
    monkeypatch.setattr(pack, "index_arrays", lambda *of: {k: v[::-1].copy() for k, v in arrays(*of).items()})
    with pytest.raises((AssertionError, ConvoyError)):
        packed(tmp_path / "source", tmp_path / "backwards")
        assert is_same(tmp_path / "backwards", tmp_path / "source")


@pytest.mark.parametrize("raw", [False, True])
def test_a_smaller_pack_says_what_it_is_and_knows_its_pixels(tmp_path: Path, photos: Path, raw: bool) -> None:
    statistics = packed(photos, tmp_path / "packed", PackOptions(short_side=35, raw=raw))["train"]
    data = opened(tmp_path / "packed", image_size=38)
    images = [data.train.load(i) for i in range(len(data.train))]
    assert {min(image.size) for image in images} == {35} and {max(image.size) for image in images} == {40}
    pixels = np.concatenate([np.asarray(image).reshape(-1, 3) for image in images]) / 255
    tolerance = 1e-4 if raw else 6e-3  # of JPEG the pixels before they were encoded
    assert np.allclose([statistics.mean, statistics.std], [pixels.mean(0), pixels.std(0)], atol=tolerance)
    assert (statistics.images, statistics.smallest, statistics.largest) == (15, 70, 80)
    assert statistics.original_bytes == sum(file.stat().st_size for file in (photos / "train").rglob("*.jpg"))
    known = Pack.open(tmp_path / "packed")
    assert (known.name, known.classes, known.options) == (photos.name, ["a", "b", "c"], PackOptions(35, raw))
    description = "folder; raw pixels, short side at most 35" if raw else "folder; short side at most 35, JPEG of qu"
    assert str(known).startswith(f"a pack of {photos.name} ({description}")
    assert data.notes[0] == f"{tmp_path / 'packed'} is {known}; its samples come in the order of the original"
    assert data.notes[1].startswith("pictures are enlarged to 38 pixels, as the")


def test_after_a_broken_picture_or_damaged_notes_it_goes_on_with_what_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PER_SHARD", 2)
    source, target = write_folder(tmp_path / "source", ("a", "b"), num=5), tmp_path / "packed"
    broken = source / "b" / "004.jpg"
    good = broken.read_bytes()
    broken.write_bytes(good[:500])
    with pytest.raises(ConvoyError, match=r"^b/004.jpg cannot be decoded .*: mend it, and pack again to go on; or rem"):
        packed(source, target)
    broken.write_bytes(good)
    for reader in (open_data, open_files):
        with pytest.raises(ConvoyError, match="is a pack that was interrupted: finish it by the same convoy data pack"):
            reader(DataConfig(path=str(target)))
    with pytest.raises(ConvoyError, match=r"something else \(other options: it was begun with files and size as in th"):
        packed(source, target, PackOptions(raw=True))
    what = target / UNFINISHED / "what.json"
    before = what.read_text()
    for damage in (before[:40], "[1, 2]", "null"):
        what.write_text(damage)
        with pytest.raises(ConvoyError, match=r"what\.json is damaged\): remove it"):
            packed(source, target)
    what.unlink()
    files = sorted(target.rglob("*"))
    with pytest.raises(ConvoyError, match=r"\.packing does not say what is packed there .*: remove it"):
        packed(source, target)
    assert sorted(target.rglob("*")) == files and not (target / INDEX).exists()
    what.write_text(before)
    first, second, third, *rest = sorted((target / UNFINISHED).glob("data-*.json"))
    first.write_bytes(first.read_bytes()[:20])
    second.write_bytes(b"")
    third.write_bytes(third.read_bytes().replace(b"1", b"2"))
    times = {notes.stem: (target / notes.stem).stat().st_mtime_ns for notes in rest}
    packed(source, target)
    packed(source, tmp_path / "whole")
    assert times.items() <= {file.name: file.stat().st_mtime_ns for file in target.glob("*.tar")}.items()
    assert contents(target) == contents(tmp_path / "whole") and not (target / UNFINISHED).exists()


def test_a_finished_pack_stays_as_it_is(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "packed"

    def stopped(folder: Path, ignore_errors: bool = False) -> None:
        """A network file system, where the folder of notes is not empty."""
        next(file for file in Path(folder).iterdir() if file.name != "lock").unlink()
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "of a network file system")

    with monkeypatch.context() as patch:
        patch.setattr(pack.shutil, "rmtree", stopped)
        packed(photos, target)  # it is finished before its notes are removed
    assert is_same(target, photos)
    before = contents(target)
    (target / UNFINISHED).mkdir()  # somebody came second: both have seen that there is none
    (tmp_path / "file").write_text("x")
    for words, path in (("a finished pack", target), ("is a file", tmp_path / "file"), ("is not empty", tmp_path)):
        with pytest.raises(ConvoyError, match=words):
            packed(photos, path, PackOptions(short_side=20))
    assert contents(target) == before


KILLED = """
import sys, time
from pathlib import Path
from convoy.data import DataConfig, pack
from convoy.data.dataset import open_files

if __name__ == "__main__":
    pack.PER_SHARD = 3
    kind, opened = open_files(DataConfig(path=sys.argv[1]))

    def said(what, done, total):
        if done:
            print(done, flush=True)
            time.sleep(60)

    pack.pack(kind, opened, Path(sys.argv[2]), pack.PackOptions(), said, 1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pack_that_was_ended_goes_on_and_is_what_it_would_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source, killed = write_folder(tmp_path / "source", ("a", "b"), num=6), tmp_path / "killed"
    (tmp_path / "script.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "script.py"), str(source), str(killed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert int(process.stdout.readline()) == 3
        process.send_signal(number)
        errors = process.stderr.read()  # up to the end of the last process that has it
    assert (b"KeyboardInterrupt" in errors) if number == signal.SIGINT else errors == b""
    (killed / ".train-000009.tar.1.tmp").write_bytes(b"half")
    monkeypatch.setattr(pack, "PER_SHARD", 3)
    for name in ("killed", "whole"):
        packed(source, tmp_path / name)
    assert contents(killed) == contents(tmp_path / "whole") and len(contents(killed)) == 4 + 2


class Deadly(Listed):
    """Ends whoever reads it."""

    def read(self, sample: int) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    files = Opened("x", ["a", "b"], Deadly([b""] * 4))
    with pytest.raises(MachineError, match=r"a process that packs died, .*run the same again to go on"):
        pack.pack("folder", files, tmp_path / "packed", PackOptions(), None, 1)


def test_a_full_disk_is_named_and_packing_goes_on_afterwards(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for writes in ("write_json", "index_file"):  # as packing begins, and at its end
        with (
            monkeypatch.context() as patch,
            pytest.raises(ConvoyError, match=r"packed cannot be written \(No space lef"),
        ):
            patch.setattr(pack, writes, full)
            packed(photos, tmp_path / "packed")
    assert not (tmp_path / "packed" / INDEX).exists()
    assert packed(photos, tmp_path / "packed")["train"].images == 15
