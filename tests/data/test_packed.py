"""Packs that are read and unpacked: damage is named, and nothing of strangers leads anywhere."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from convoy.data import DataConfig, pack
from convoy.data.dataset import open_files
from convoy.data.pack import index_file
from convoy.data.packed import INDEX, Pack, PackedSource, PackOptions, damaged, unpack
from convoy.errors import ConvoyError
from data.made import encoded, opened, packed, picture, trained, write_tar


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs") / "packed"
    packed(photos, folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A pack to damage."""
    return shutil.copytree(whole, tmp_path / "packed")


def test_damage_is_named(copy: Path, tmp_path: Path) -> None:
    found, tar = Pack.open(copy), copy / "train-000000.tar"
    assert list(damaged(found, None)) == [] and found.source("train").subset(np.arange(2)).is_packed
    places, content = found.source("train")._places.array.tolist(), bytearray(tar.read_bytes())
    content[places[7][1] + places[7][2] // 2] ^= 1
    tar.write_bytes(content)
    words = "train-000000.tar/train/b/002.jpg is not what was packed: its checksum differs"
    assert list(damaged(Pack.open(copy), None)) == [words]
    with pytest.raises(ConvoyError, match=r"b/002.jpg is not what was packed"):
        unpack(found, tmp_path / "unpacked", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]
    for _, offset, size in places:
        content[offset : offset + size // 2] = bytes(size // 2)
    tar.write_bytes(content)
    with pytest.raises(
        ConvoyError, match=r"jpg is no picture .*: fetch the pack again, or pack again, or set data.bad_i"
    ):
        trained(DataConfig(path=str(copy), workers=0, image_size=24))
    tar.unlink()
    with pytest.raises(ConvoyError, match=r"train-000000.tar is missing"):
        opened(copy)


def of_index(name: str, change: Callable[[Any], Any]) -> Callable[[Path], bytes]:
    """An index with another array, or another part of its document, and the right checksum."""

    def make(index: Path) -> bytes:
        with safe_open(index, "np") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            document = json.loads(file.metadata()["convoy.pack"])
        place = arrays if name in arrays else document
        place[name] = change(place[name])
        return index_file(arrays, document)

    return make


def another_label(index: Path) -> bytes:
    labels, content = Pack.open(index.parent).arrays("train", "label")[0].tobytes(), index.read_bytes()
    assert content.count(labels) == 1
    return content.replace(labels, labels[:-4] + b"\1" + labels[-3:])


INDEXES: list[Callable[[Path], bytes]] = [
    lambda index: index.read_bytes()[:50],
    lambda index: b"\xff" * 500,
    another_label,
    of_index("train.shard", lambda array: array + 2**30),
    of_index("train.size", lambda array: array + 2**30),
    of_index("train.label", lambda array: array[:-1]),
    of_index("train.label", lambda array: array[None]),
    of_index("train.name_end", lambda array: array[::-1].copy()),
    of_index("train.name_end", lambda array: array + 10**6),
    of_index("options", lambda options: options | {"quality": "x"}),
    of_index("shards", lambda shards: {"../" + name: size for name, size in shards.items()}),
    of_index("statistics", lambda splits: {"../" + split: each for split, each in splits.items()}),
    of_index("classes", lambda _: None),
]


def test_an_index_that_is_damaged_or_a_strangers_leads_nowhere_and_fills_no_memory(copy: Path) -> None:
    right = (copy / INDEX).read_bytes()
    for number, change in enumerate(INDEXES):
        (copy / INDEX).write_bytes(right)
        (copy / INDEX).write_bytes(change(copy / INDEX))
        with pytest.raises(ConvoyError, match=r"index.safetensors is cut off or damaged: pack the data again"):
            pytest.fail(f"index {number} is read: {opened(copy)}")
    (copy / INDEX).write_bytes(right)
    (copy / INDEX).write_bytes(of_index("version", lambda _: 99)(copy / INDEX))
    with pytest.raises(ConvoyError, match="later version"):
        Pack.open(copy)


def test_unpacking_gives_the_folder_back(tmp_path: Path, whole: Path, photos: Path) -> None:
    back, copies = tmp_path / "back", tmp_path / "copy"
    unpack(Pack.open(whole), back, lambda *_: shutil.copytree(next(back.iterdir()), copies))
    shutil.rmtree(back)
    shutil.copytree(copies, back / ".unpacking-x")  # what a killed one left is removed
    assert unpack(Pack.open(whole), back, None) == 21
    assert sorted(entry.name for entry in back.iterdir()) == ["test", "train"]
    for split, name, count in (("train", "train", 15), ("test", "val", 6)):
        files = [path for path in (back / split).rglob("*") if path.is_file()]
        assert len(files) == count
        for file in files:
            assert file.read_bytes() == (photos / name / file.relative_to(back / split)).read_bytes()
    with pytest.raises(ConvoyError, match="is not an empty folder"):
        unpack(Pack.open(whole), back, None)


def test_two_cannot_pack_or_unpack_into_one_folder_nor_onto_a_full_disk(
    tmp_path: Path, whole: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def second(work: Callable[[], object], words: str) -> Callable[..., None]:
        def told(*_: object) -> None:
            with pytest.raises(ConvoyError, match=words):
                work()
            refused.append(words)

        return told

    def error(number: int) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    kind, files = open_files(DataConfig(path=str(photos)))
    told = second(lambda: packed(photos, tmp_path / "packed"), "another process packs into")
    pack.pack(kind, files, tmp_path / "packed", PackOptions(), told, 1)
    back, words = tmp_path / "back", r"another process unpacks into .*back: wait for it, or end it"
    assert unpack(Pack.open(whole), back, second(lambda: unpack(Pack.open(whole), back, None), words)) == 21
    assert len(set(refused)) == 2 and len([path for path in back.rglob("*") if path.is_file()]) == 21
    with monkeypatch.context() as patch, pytest.raises(ConvoyError, match=r"full cannot be written \(No space left"):
        patch.setattr(Path, "write_bytes", error(errno.ENOSPC))
        unpack(Pack.open(whole), tmp_path / "full", None)
    assert not (tmp_path / "full").exists()
    monkeypatch.setattr(fcntl, "flock", error(errno.ENOLCK))  # file systems without locks are written to as well
    assert packed(photos, tmp_path / "unlocked")["test"].images == 6


def test_unpacked_files_end_as_in_the_original_where_the_format_is_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "source" / "a"
    folder.mkdir(parents=True)
    jpeg, png = encoded(picture(), "JPEG"), encoded(picture())
    files = {"x.JPEG": jpeg, "x.jpg": jpeg, "y.jpeg": jpeg, "y.png": png, "z.TIFF": encoded(picture(), "TIFF")}
    for name, content in (files | {"wrong.png": jpeg}).items():
        (folder / name).write_bytes(content)
    raw = {"x.ppm", "x-000000002.ppm", "y.ppm", "y-000000004.ppm", "z.ppm", "wrong.ppm"}
    for options, ends in ((PackOptions(), {*files, "wrong.jpg"}), (PackOptions(raw=True), raw)):
        target = tmp_path / str(options.raw)
        packed(tmp_path / "source", target, options)
        unpack(Pack.open(target), target / "back", None)
        assert {file.name for file in (target / "back" / "a").iterdir()} == ends
    assert (tmp_path / "False" / "back" / "a" / "x.JPEG").read_bytes() == jpeg


def test_names_of_strangers_lead_nowhere_and_no_picture_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes and files whose names would be paths, or hidden, or alike, or longer than a file's may be."""
    stems = ["cat-000000002", "cat", "CAT", "cat-000000002.x", "é" * 160, "é" * 160 + "2", "a.parquet, row 1", ".png"]
    stems += ["another class", "a third", "a fourth", "a fifth"]
    members = {}
    for i in range(len(stems)):
        members |= {f"{i}.png": encoded(Image.new("L", (8, 8), i)), f"{i}.cls": str(max(i - 7, 0)).encode()}
    write_tar(tmp_path / "x.tar", members)
    kind, files = open_files(DataConfig(path=str(tmp_path / "x.tar")))
    files.classes = ["../up", "..", "a", "A", "/etc"]
    pack.pack(kind, files, tmp_path / "packed", PackOptions(), None, 1)
    found, back = Pack.open(tmp_path / "packed"), tmp_path / "back"
    assert unpack(found, back, None) == len(stems)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "packed", "x.tar"]
    folders = ["000000 _up", "000001", "000002 a", "000003 A", "000004 _etc"]
    assert sorted(path.name for path in back.iterdir()) == folders
    monkeypatch.setattr(PackedSource, "name", lambda self, sample: f"a/{stems[sample]}.png")
    found = found.model_copy(update={"classes": ["ä" * 200] * 5})
    assert unpack(found, tmp_path / "more", None) == len(stems)
    pictures = list((tmp_path / "more").rglob("*.png"))
    assert sorted(Image.open(file).getpixel((0, 0)) for file in pictures) == list(range(len(stems)))
    wanted = {"cat-000000002.png", "cat.png", "CAT-000000002-000000002.png", "a.parquet, row 1.png"}
    assert wanted <= {file.name for file in pictures}


def link(path: Path, to: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(to)


HALF_WRITTEN = "links for what is half-written"
PREPARED: dict[str, Callable[[Path, Path], Any]] = {
    "a link under the name of the folder": lambda dest, victim: (dest / ".unpacking").symlink_to(victim),
    "a link under such a name": lambda dest, victim: (dest / ".unpacking-x").symlink_to(victim),
    "somebody's folder": lambda dest, victim: shutil.copytree(victim, dest / ".unpacking"),
    "somebody's folder under such a name": lambda dest, victim: shutil.copytree(victim, dest / ".unpacking-x"),
    "a link to notes": lambda dest, victim: (dest / ".packing").symlink_to(victim),
    "somebody's notes": lambda dest, victim: shutil.copytree(victim, dest / ".packing"),
    "a link to the lock": lambda dest, victim: link(dest / ".packing" / "lock", victim / "mine.json"),
    HALF_WRITTEN: lambda dest, victim: [
        link(dest / ".packing" / f".{name}.{os.getpid()}.tmp", victim / "mine.json")
        for name in ("what.json", "train-000000.tar.json", "test-000000.tar.json")
    ],
    "files that end alike": lambda dest, victim: [(dest / name).write_bytes(b"") for name in (".packing", ".my.tmp")],
}


def test_nothing_of_strangers_is_followed_written_or_removed(tmp_path: Path, whole: Path, photos: Path) -> None:
    """Whoever may write to the folder has put something there before."""
    for number, (prepared, prepare) in enumerate(PREPARED.items()):
        dest, victim = tmp_path / f"{number}" / "dest", tmp_path / f"{number}" / "victim"
        for folder in (dest, victim / "inner", victim / ".convoy"):
            folder.mkdir(parents=True)
        for file in ("mine.json", "inner/mine", "what.txt", ".mine.1.tmp"):
            (victim / file).write_bytes(b"mine")
        prepare(dest, victim)
        files = [path for path in (*victim.rglob("*"), *dest.rglob("*")) if not path.is_symlink()]
        if prepared == HALF_WRITTEN:  # it is written, but not to where they lead
            files = [path for path in files if victim in path.parents]
        before = {path: path.is_dir() or path.read_bytes() for path in files}
        try:
            if any(path.name.startswith(".unpacking") for path in dest.iterdir()):
                unpack(Pack.open(whole), dest, None)
            else:
                packed(photos, dest)
        except ConvoyError as error:
            assert str(dest) in str(error) and "\n" not in str(error), prepared
        else:
            assert prepared == HALF_WRITTEN
        assert {path: path.is_dir() or path.read_bytes() for path in before} == before, prepared
