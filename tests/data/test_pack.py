"""Packs: the same samples in the same order, whole or not there; damage is named, and nothing of strangers leads
anywhere."""

import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from convoy.data import pack
from convoy.data.config import DataConfig
from convoy.data.dataset import difference, open_files
from convoy.data.packed import INDEX, Pack, PackOptions, damaged, unpack
from convoy.errors import ConvoyError
from data.made import encoded, opened, packed, same, trained, write_folder, write_mnist, write_tar


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs") / "packed"
    packed(photos, folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A pack to damage."""
    return shutil.copytree(whole, tmp_path / "packed")


def is_same(pack_folder: Path, source: Path, **options: Any) -> bool:
    """Whether training on both is the same; the pack is read by so many `workers`."""
    section = {"workers": 0, "augment": {"flip": True}, "image_size": 24} | options
    sections = {"path": str(pack_folder), **section}, {"path": str(source), **section, "workers": 0}
    return same(*(trained(DataConfig(**keys), num=6, batch=4) for keys in sections))


def write_split(folder: Path) -> None:
    write_folder(folder / "train", ("a", "b"), num=8)
    write_folder(folder / "val", ("a", "b"), num=2)
    write_folder(folder / "test", ("a", "b"), num=3)


IN_MEMORY = {"augment": {"crop": "pad"}, "image_size": None}
SOURCES: dict[str, tuple[Callable[[Path], Any], bool, dict[str, Any]]] = {  # raw: parts of JPEGs may be decoded smaller
    "split folder": (write_split, True, {"workers": 2}),
    "mnist": (write_mnist, False, IN_MEMORY),
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
    assert difference(data.fingerprint, source.fingerprint, later=True) is None
    for found, wanted in ((data, source), (data.at_end(), source.at_end())):
        assert (found.split, found.test.labels.tolist()) == (wanted.split, wanted.test.labels.tolist())
    if kind != "split folder":
        return
    (tmp_path / "plain").mkdir()  # any reader of tars
    for name in ("train-000000.tar", "validation-000000.tar", "test-000000.tar", "classes.txt"):
        shutil.copy(tmp_path / "packed" / name, tmp_path / "plain" / name)
    assert opened(tmp_path / "plain").format == "webdataset" and is_same(tmp_path / "plain", tmp_path / "source")
    with tarfile.open(tmp_path / "plain" / "train-000000.tar") as tar:
        assert tar.getnames()[:4] == ["000000000.ppm", "000000000.cls", "000000001.ppm", "000000001.cls"]
    arrays = pack.index_arrays  # the control: shards whose samples are numbered backwards
    monkeypatch.setattr(pack, "index_arrays", lambda *of: {k: v[::-1].copy() for k, v in arrays(*of).items()})
    with pytest.raises((AssertionError, ConvoyError)):
        packed(tmp_path / "source", tmp_path / "backwards")
        assert is_same(tmp_path / "backwards", tmp_path / "source")


def test_damage_is_named(copy: Path, tmp_path: Path) -> None:
    whole, tar = Pack.open(copy), copy / "train-000000.tar"
    assert list(damaged(whole, None)) == []
    places, content = whole.source("train")._places.array.tolist(), bytearray(tar.read_bytes())
    content[places[7][1] + places[7][2] // 2] ^= 1
    tar.write_bytes(content)
    words = "train-000000.tar/train/b/002.jpg is not what was packed: its checksum differs"
    assert list(damaged(Pack.open(copy), None)) == [words]
    with pytest.raises(ConvoyError, match=r"b/002.jpg is not what was packed"):
        unpack(whole, tmp_path / "unpacked", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]
    tar.unlink()
    with pytest.raises(ConvoyError, match=r"train-000000.tar is missing"):
        opened(copy)


def another_label(index: Path) -> bytes:
    labels, content = Pack.open(index.parent).arrays("train", "label")[0].tobytes(), index.read_bytes()
    assert content.count(labels) == 1
    return content.replace(labels, labels[:-4] + b"\1" + labels[-3:])


def test_an_index_with_another_label_is_refused(copy: Path) -> None:
    """Others, also such whose checksums fit, are in `tests/test_fuzz.py`."""
    (copy / INDEX).write_bytes(another_label(copy / INDEX))
    with pytest.raises(ConvoyError, match="is cut off or damaged: pack the data again"):
        opened(copy)


def test_unpacking_gives_the_folder_back_under_the_originals_names(tmp_path: Path, whole: Path, photos: Path) -> None:
    back = tmp_path / "back"
    assert unpack(Pack.open(whole), back, None) == 21
    for split, name, count in (("train", "train", 15), ("validation", "val", 6)):
        files = [path for path in (back / split).rglob("*") if path.is_file()]
        assert len(files) == count
        for file in files:
            assert file.read_bytes() == (photos / name / file.relative_to(back / split)).read_bytes()
    with pytest.raises(ConvoyError, match="is not an empty folder"):
        unpack(Pack.open(whole), back, None)


def test_names_of_strangers_lead_nowhere_and_no_picture_takes_the_place_of_another(tmp_path: Path) -> None:
    """Classes and files whose names would be paths, or hidden, or alike, or longer than a file's may be."""
    stems = ["cat-000000002", "cat", "CAT", "é" * 160, "é" * 160 + "2", "a.parquet, row 1", "b", "c"]
    members = {}
    for i, stem in enumerate(stems):
        members |= {f"../{stem}.png": encoded(Image.new("L", (8, 8), i)), f"../{stem}.cls": str(max(i - 3, 0)).encode()}
    write_tar(tmp_path / "x.tar", members)
    kind, files = open_files(DataConfig(path=str(tmp_path / "x.tar")))
    files.classes = ["../up", "..", "a", "A", "/etc"]
    pack.pack(kind, files, tmp_path / "packed", PackOptions(), None, 1)
    back = tmp_path / "back"
    assert unpack(Pack.open(tmp_path / "packed"), back, None) == len(stems)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "packed", "x.tar"]
    folders = ["000000 _up", "000001", "000002 a", "000003 A", "000004 _etc"]
    assert sorted(path.name for path in back.iterdir()) == folders
    pictures = list(back.rglob("*.png"))
    assert sorted(Image.open(file).getpixel((0, 0)) for file in pictures) == list(range(len(stems)))


PREPARED: dict[str, Callable[[Path, Path], Any]] = {
    "a link under such a name": lambda dest, victim: (dest / ".unpacking-x").symlink_to(victim),
    "a link to notes": lambda dest, victim: (dest / ".packing").symlink_to(victim),
    "somebody's notes": lambda dest, victim: shutil.copytree(victim, dest / ".packing"),
    "links inside of them": lambda dest, victim: shutil.copytree(victim, dest / ".packing", symlinks=True),
    "files that end alike": lambda dest, victim: [(dest / name).write_bytes(b"") for name in (".packing", ".my.tmp")],
}


def test_nothing_of_strangers_is_followed_written_or_removed(tmp_path: Path, whole: Path, photos: Path) -> None:
    """Whoever may write to the folder has put something there before."""
    for number, (prepared, prepare) in enumerate(PREPARED.items()):
        dest, victim = tmp_path / f"{number}" / "dest", tmp_path / f"{number}" / "victim"
        for folder in (dest, victim / "inner"):
            folder.mkdir(parents=True)
        for file in ("mine.json", "inner/mine", ".mine.1.tmp"):
            (victim / file).write_bytes(b"mine")
        (victim / f".train-000000.tar.json.{os.getpid()}.tmp").symlink_to(victim / "mine.json")
        prepare(dest, victim)
        files = [path for path in (*victim.rglob("*"), *dest.rglob("*")) if not path.is_symlink()]
        before = {path: path.is_dir() or path.read_bytes() for path in files}
        with pytest.raises(ConvoyError, match=re.escape(str(dest))):
            if any(path.name.startswith(".unpacking") for path in dest.iterdir()):
                unpack(Pack.open(whole), dest, None)
            else:
                packed(photos, dest)
        assert {path: path.is_dir() or path.read_bytes() for path in before} == before, prepared
