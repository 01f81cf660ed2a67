"""Packs: the same samples in the same order, whole or not there, and never read before they are finished."""

import errno
import fcntl
import json
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
from safetensors import safe_open

from convoy.data import DataConfig, open_data, pack
from convoy.data.dataset import open_files
from convoy.data.decode import open_picture, suffix_of
from convoy.data.pack import index_file
from convoy.data.packed import INDEX, UNFINISHED, Pack, PackedSource, PackOptions, Statistics, damaged, unpack
from convoy.errors import ConvoyError
from data.made import (
    encoded,
    opened,
    picture,
    same,
    tar_members,
    trained,
    write_cifar,
    write_folder,
    write_mnist,
    write_parquet,
    write_tar,
)


def packed(source: Path, folder: Path, options: PackOptions | None = None) -> dict[str, Statistics]:
    kind, files = open_files(DataConfig(path=str(source)))
    return pack.pack(kind, files, folder, options or PackOptions(), None, processes=1)


def section(path: Path, **options: Any) -> DataConfig:
    return DataConfig(**({"path": str(path), "workers": 0, "augment": {"flip": True}, "image_size": 24} | options))


def is_same(pack_folder: Path, source: Path, **options: Any) -> bool:
    """Whether training on both is the same."""
    own = options | {"workers": options.pop("workers", 0)}
    pair = trained(section(pack_folder, **own), num=6, batch=4), trained(section(source, **options), num=6, batch=4)
    return same(*pair)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    write_folder(root / "train", ("a", "b", "c"), num=5)
    write_folder(root / "val", ("a", "b", "c"), num=2)
    return root


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    packed(photos, tmp_path_factory.mktemp("packs") / "packed")
    return tmp_path_factory.getbasetemp() / "packs0" / "packed"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A pack to damage."""
    return shutil.copytree(whole, tmp_path / "packed")


def write_split(folder: Path) -> None:
    write_folder(folder / "train", ("a", "b"), num=8)
    write_folder(folder / "val", ("a", "b"), num=2)


def write_rows(folder: Path) -> None:
    images = [encoded(picture(seed=i), "JPEG") for i in range(20)]
    write_parquet(folder / "x.parquet", images, [i % 3 for i in range(20)])


BOX, IN_MEMORY = {"augment": {"crop": "random-resized", "flip": True}}, {"augment": {"crop": "pad"}, "image_size": None}
SOURCES: dict[str, tuple[Callable[[Path], Any], bool, dict[str, Any]]] = {  # raw: parts of JPEGs may be decoded smaller
    "folder": (lambda folder: write_folder(folder, ("a", "b"), num=12), False, BOX),
    "split folder": (write_split, True, {}),
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
    source, found = (opened(tmp_path / name) for name in ("source", "packed"))
    for fact in ("name", "classes", "image_size", "channels", "mean", "std", "resize"):
        assert getattr(found, fact) == getattr(source, fact)
    assert found.train.labels.tolist() == source.train.labels.tolist()
    assert found.test.labels.tolist() == source.test.labels.tolist()
    if kind == "split folder":  # the control: shards whose samples are numbered backwards
        arrays = pack.index_arrays
        monkeypatch.setattr(pack, "index_arrays", lambda *of: {k: v[::-1].copy() for k, v in arrays(*of).items()})
        with pytest.raises((AssertionError, ConvoyError)):
            packed(tmp_path / "source", tmp_path / "backwards")
            assert is_same(tmp_path / "backwards", tmp_path / "source")


def test_a_pack_is_read_by_workers_and_by_any_reader_of_tars(whole: Path, photos: Path, tmp_path: Path) -> None:
    assert is_same(whole, photos, workers=2)
    (tmp_path / "plain").mkdir()
    for name in ("train-000000.tar", "test-000000.tar", "classes.txt"):
        shutil.copy(whole / name, tmp_path / "plain" / name)
    assert opened(tmp_path / "plain").format == "webdataset" and is_same(tmp_path / "plain", photos)
    with tarfile.open(whole / "train-000000.tar") as tar:
        assert tar.getnames()[:4] == ["000000000.jpg", "000000000.cls", "000000001.jpg", "000000001.cls"]


@pytest.mark.parametrize("raw", [False, True])
def test_a_smaller_pack_says_what_it_is_and_knows_its_pixels(tmp_path: Path, photos: Path, raw: bool) -> None:
    statistics = packed(photos, tmp_path / "packed", PackOptions(short_side=35, raw=raw))
    data, found = opened(tmp_path / "packed"), statistics["train"]
    loaded = [data.train.load(i) for i in range(len(data.train))]
    assert {min(image.size) for image in loaded} == {35} and {max(image.size) for image in loaded} == {40}
    pixels = np.concatenate([np.asarray(image).reshape(-1, 3) for image in loaded]) / 255
    tolerance = 1e-4 if raw else 6e-3  # of JPEG the pixels before they were encoded
    assert np.allclose([found.mean, found.std], [pixels.mean(0), pixels.std(0)], atol=tolerance)
    assert (found.images, found.smallest, found.largest) == (15, 70, 80)
    assert found.original_bytes == sum(file.stat().st_size for file in (photos / "train").rglob("*.jpg"))
    description = "folder; raw pixels, short side at most 35" if raw else "folder; short side at most 35, JPEG of qu"
    (note,) = opened(tmp_path / "packed", image_size=32).notes
    assert note.startswith(f"{tmp_path / 'packed'} is a pack of {photos.name} ({description}")
    assert note.endswith("its samples come in the order of the original")
    assert opened(tmp_path / "packed", image_size=38).notes[1].startswith("pictures are enlarged to 38 pixels, as the")
    known = Pack.open(tmp_path / "packed")
    assert (known.name, known.format, known.classes) == (photos.name, "folder", ["a", "b", "c"])
    assert known.options == PackOptions(35, raw) and str(known).startswith(f"a pack of {photos.name} ({description}")


def test_a_broken_picture_is_named_and_the_rest_goes_on_when_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PER_SHARD", 2)
    source, target = write_folder(tmp_path / "source", ("a", "b"), num=4), tmp_path / "packed"
    picture_file = source / "b" / "001.jpg"
    good = picture_file.read_bytes()
    picture_file.write_bytes(good[:500])
    with pytest.raises(ConvoyError, match=r"^b/001.jpg cannot be decoded .*: mend it, and pack again to go on; or rem"):
        packed(source, target)
    assert not (target / INDEX).exists()
    for reader in (open_data, open_files):
        with pytest.raises(ConvoyError, match="is a pack that was interrupted: finish it by the same convoy data pack"):
            reader(DataConfig(path=str(target)))
    complete = [target / notes.stem for notes in (target / UNFINISHED).glob("train-*.json")]
    before = {file.name: file.stat().st_mtime_ns for file in complete}
    picture_file.write_bytes(good)
    packed(source, target)
    after = {file.name: file.stat().st_mtime_ns for file in target.glob("*.tar")}
    assert before and len(after) == 4 and before.items() <= after.items()
    assert is_same(target, source) and not (target / UNFINISHED).exists()


@pytest.fixture
def begun(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack that has everything but its index."""
    monkeypatch.setattr(pack, "PER_SHARD", 5)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(pack, "index_file", lambda *_: 1 / 0)
        packed(photos, tmp_path / "packed")
    return tmp_path / "packed"


def test_of_damaged_notes_a_shard_is_written_again_or_it_is_said_what_to_do(
    begun: Path, photos: Path, tmp_path: Path
) -> None:
    first, second, third, *_ = sorted((begun / UNFINISHED).glob("train-*.json"))
    first.write_bytes(first.read_bytes()[:100])
    second.write_bytes(b"")
    content = bytearray(third.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 20] = bytes(20)
    third.write_bytes(content)
    notes = begun / UNFINISHED / "what.json"
    before = notes.read_text()
    for damage in (before[:40], "[1, 2]", "null"):
        notes.write_text(damage)
        with pytest.raises(ConvoyError, match=r"what\.json is damaged\): remove it"):
            packed(photos, begun)
    notes.write_text(before)
    packed(photos, begun)
    packed(photos, tmp_path / "whole")
    assert contents(begun) == contents(tmp_path / "whole")


def test_notes_of_something_unknown_are_neither_used_nor_removed(begun: Path, photos: Path) -> None:
    (begun / UNFINISHED / "what.json").unlink()
    before = sorted(begun.rglob("*"))
    with pytest.raises(ConvoyError, match=r"\.packing does not say what is packed there .*: remove it"):
        packed(photos, begun, PackOptions(short_side=20))
    assert sorted(begun.rglob("*")) == before


def test_a_finished_pack_stays_as_it_is(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "packed"

    def stopped(folder: Path, ignore_errors: bool = False) -> None:
        """A network file system, where the folder of notes is not empty."""
        if Path(folder).exists():
            next(file for file in Path(folder).iterdir() if file.name != "lock").unlink()
            if not ignore_errors:
                raise OSError(errno.ENOTEMPTY, "of a network file system")

    with monkeypatch.context() as patch:
        patch.setattr(pack.shutil, "rmtree", stopped)
        packed(photos, target)  # it is finished before its notes are removed
    assert is_same(target, photos)
    shutil.rmtree(target / UNFINISHED, ignore_errors=True)
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
    source, killed = write_folder(tmp_path / "source", ("a", "b"), num=12), tmp_path / "killed"
    (tmp_path / "script.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "script.py"), str(source), str(killed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert int(process.stdout.readline()) == 3
        process.send_signal(number)
        errors = process.stderr.read()  # up to the end of the last process that has it
    assert (b"KeyboardInterrupt" in errors) if number == signal.SIGINT else errors == b""
    (killed / ".train-000009.tar.1.tmp").write_bytes(b"half")
    monkeypatch.setattr(pack, "PER_SHARD", 3)
    with pytest.raises(ConvoyError, match="was interrupted"):
        opened(killed)
    words = r"something else \(other options: it was begun with files and size as in the original\): fini"
    with pytest.raises(ConvoyError, match=words):
        packed(source, killed, PackOptions(raw=True))
    for name in ("killed", "whole"):
        packed(source, tmp_path / name)
    assert contents(killed) == contents(tmp_path / "whole") and len(contents(killed)) == 8 + 2


def test_two_cannot_pack_or_unpack_into_one_folder(
    tmp_path: Path, whole: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def second(work: Callable[[], object], words: str) -> Callable[..., None]:
        def told(*_: object) -> None:
            with pytest.raises(ConvoyError, match=words):
                work()
            refused.append(words)

        return told

    kind, files = open_files(DataConfig(path=str(photos)))
    told = second(lambda: packed(photos, tmp_path / "packed"), "another process packs into")
    pack.pack(kind, files, tmp_path / "packed", PackOptions(), told, 1)
    monkeypatch.setattr("convoy.data.packed._EVERY", 1)
    back = tmp_path / "back"
    words = r"another process unpacks into .*back: wait for it, or end it"
    assert unpack(Pack.open(whole), back, second(lambda: unpack(Pack.open(whole), back, None), words)) == 21
    assert refused.count(words) == 21 and len(set(refused)) == 2
    assert len([path for path in back.rglob("*") if path.is_file()]) == 21

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)  # file systems without locks are written to as well
    assert packed(photos, tmp_path / "unlocked")["test"].images == 6


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
    for workers in (0, 1):
        words = r"jpg is no picture .*: fetch the pack again, or pack again, or set data.bad_images=skip"
        with pytest.raises(ConvoyError, match=words):
            trained(section(copy, workers=workers))
    tar.write_bytes(content[:-1])
    with pytest.raises(ConvoyError, match=r"train-000000.tar has .* bytes instead of .*: fetch the pack again"):
        Pack.open(copy)
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
    lambda index: b"",
    lambda index: index.read_bytes()[:50],
    lambda index: b"\xff" * 500,
    another_label,
    of_index("train.shard", lambda array: array + 2**30),
    of_index("train.shard", lambda array: array - 1),
    of_index("train.size", lambda array: array + 2**30),
    of_index("train.label", lambda array: array[:-1]),
    of_index("train.label", lambda array: array[:0]),
    of_index("train.label", lambda array: array[None]),
    of_index("train.name_end", lambda array: array[::-1].copy()),
    of_index("train.name_end", lambda array: array.astype(np.float32)),
    of_index("train.name_end", lambda array: array + 10**6),
    of_index("options", lambda options: options | {"quality": "x"}),
    of_index("shards", lambda shards: {"../" + name: size for name, size in shards.items()}),
    of_index("statistics", lambda splits: {"../" + split: each for split, each in splits.items()}),
    of_index("classes", lambda _: None),
]


def test_an_index_that_is_damaged_or_a_strangers_leads_nowhere_and_fills_no_memory(
    copy: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = (copy / INDEX).read_bytes()
    for number, change in enumerate(INDEXES):
        (copy / INDEX).write_bytes(right)
        (copy / INDEX).write_bytes(change(copy / INDEX))
        with pytest.raises(ConvoyError, match=r"index.safetensors is cut off or damaged: pack the data again"):
            pytest.fail(f"index {number} is read: {opened(copy)}")
    monkeypatch.setattr(pack, "VERSION", 99)
    packed(photos, tmp_path / "later")
    with pytest.raises(ConvoyError, match="later version"):
        Pack.open(tmp_path / "later")


def test_unpacking_gives_the_folder_back(tmp_path: Path, whole: Path, photos: Path) -> None:
    copies = tmp_path / "copy"

    def killed(*_: object) -> None:
        shutil.copytree(next((tmp_path / "back").iterdir()), copies)

    unpack(Pack.open(whole), tmp_path / "back", killed)
    shutil.rmtree(tmp_path / "back")
    shutil.copytree(copies, tmp_path / "back" / ".unpacking-x")  # what a killed one left is removed
    assert unpack(Pack.open(whole), tmp_path / "back", None) == 21
    assert sorted(entry.name for entry in (tmp_path / "back").iterdir()) == ["test", "train"]
    for split, name, count in (("train", "train", 15), ("test", "val", 6)):
        files = [path for path in (tmp_path / "back" / split).rglob("*") if path.is_file()]
        originals = [photos / name / path.relative_to(tmp_path / "back" / split) for path in files]
        assert [path.read_bytes() for path in files] == [path.read_bytes() for path in originals]
        assert len(files) == count
    with pytest.raises(ConvoyError, match="is not an empty folder"):
        unpack(Pack.open(whole), tmp_path / "back", None)


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
    names = ["cat-000000002", "cat", "CAT", "cat-000000002.x", "é" * 160, "é" * 160 + "2", "a.parquet, row 1", ".png"]
    names += ["another class", "a third", "a fourth", "a fifth"]
    members = {}
    for i in range(len(names)):
        members |= {f"{i}.png": encoded(Image.new("L", (8, 8), i)), f"{i}.cls": str(max(i - 7, 0)).encode()}
    write_tar(tmp_path / "x.tar", members)
    kind, files = open_files(DataConfig(path=str(tmp_path / "x.tar")))
    files.classes = ["../up", "..", "a", "A", "/etc"]
    pack.pack(kind, files, tmp_path / "packed", PackOptions(), None, 1)
    found, back = Pack.open(tmp_path / "packed"), tmp_path / "back"
    assert unpack(found, back, None) == len(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "packed", "x.tar"]
    folders = ["000000 _up", "000001", "000002 a", "000003 A", "000004 _etc"]
    assert sorted(path.name for path in back.iterdir()) == folders
    monkeypatch.setattr(PackedSource, "name", lambda self, sample: f"a/{names[sample]}.png")
    found = found.model_copy(update={"classes": ["ä" * 200] * 5})
    assert unpack(found, tmp_path / "more", None) == len(names)
    pictures = list((tmp_path / "more").rglob("*.png"))
    assert sorted(Image.open(file).getpixel((0, 0)) for file in pictures) == list(range(len(names)))
    assert {"cat-000000002.png", "cat.png", "CAT-000000002-000000002.png", "a.parquet, row 1.png"} <= {
        file.name for file in pictures
    }


def odd_pictures() -> dict[str, bytes]:
    """Files that are not just RGB in eight bits."""
    exif = Image.Exif()
    exif[0x112] = 6
    deep = Image.fromarray(np.linspace(0, 65535, 60 * 50).astype(np.uint16).reshape(50, 60))
    clear = picture().convert("RGBA")
    clear.putalpha(100)
    return {
        "cmyk.jpg": encoded(picture(mode="CMYK"), "JPEG"),
        "grey.jpg": encoded(picture(mode="L"), "JPEG"),
        "turned.jpg": encoded(picture(), "JPEG", exif=exif),
        "several.jpg": encoded(picture(seed=1), "MPO", save_all=True, append_images=[picture(seed=2)]),
        "deep.png": encoded(deep),
        "clear.png": encoded(clear),
        "palette.gif": encoded(picture().convert("P"), "GIF"),
        "bits.tif": encoded(picture().convert("1"), "TIFF"),
        "new.webp": encoded(picture(), "WEBP"),
    }


@pytest.mark.parametrize("raw", [False, True])
def test_odd_pictures_look_as_in_the_original(tmp_path: Path, raw: bool) -> None:
    for kind in ("a", "b"):
        (tmp_path / "source" / kind).mkdir(parents=True)
        for name, content in odd_pictures().items():
            assert name.endswith(suffix_of(open_picture(content, name)))
            (tmp_path / "source" / kind / name).write_bytes(content)
    for name, side in (("packed", None), ("small", 35)):
        packed(tmp_path / "source", tmp_path / name, PackOptions(short_side=side, raw=raw))
        source, found = (open_files(DataConfig(path=str(tmp_path / each)))[1].train for each in ("source", name))
        for sample in range(len(source)):
            original, image = source.load(sample), found.load(sample)
            wanted = original.resize(image.size, Image.Resampling.BICUBIC) if side else original
            assert image.mode == wanted.mode and (not side or min(image.size) == side)
            error = np.abs(np.asarray(image).astype(int) - np.asarray(wanted)).mean()
            assert error < (4 if side else 1e-9), source.name(sample)


def test_a_full_disk_is_named_and_packing_goes_on_afterwards(
    tmp_path: Path, whole: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for writes in ("write_json", "write_text"):  # as packing begins, and at its end
        words = r"packed cannot be written \(No space lef"
        with monkeypatch.context() as patch, pytest.raises(ConvoyError, match=words):
            patch.setattr(pack, writes, full)
            packed(photos, tmp_path / "packed")
    assert not (tmp_path / "packed" / INDEX).exists()
    assert packed(photos, tmp_path / "packed")["train"].images == 15
    with monkeypatch.context() as patch, pytest.raises(ConvoyError, match=r"back cannot be written \(No space left"):
        patch.setattr(Path, "write_bytes", full)
        unpack(Pack.open(whole), tmp_path / "back", None)
    assert not (tmp_path / "back").exists()


def link(path: Path, to: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(to)


PREPARED: dict[str, Callable[[Path, Path], Any]] = {
    "a link under the name of the folder": lambda dest, victim: (dest / ".unpacking").symlink_to(victim),
    "a link under such a name": lambda dest, victim: (dest / ".unpacking-x").symlink_to(victim),
    "somebody's folder": lambda dest, victim: shutil.copytree(victim, dest / ".unpacking"),
    "somebody's folder under such a name": lambda dest, victim: shutil.copytree(victim, dest / ".unpacking-x"),
    "a link to notes": lambda dest, victim: (dest / ".packing").symlink_to(victim),
    "somebody's notes": lambda dest, victim: shutil.copytree(victim, dest / ".packing"),
    "a link to the lock": lambda dest, victim: link(dest / ".packing" / "lock", victim / "mine.npz"),
    "links for what is half-written": lambda dest, victim: [
        link(dest / ".packing" / f".{name}.{os.getpid()}.tmp", victim / "mine.npz")
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
        for file in ("mine.npz", "inner/mine", "what.txt", ".mine.1.tmp"):
            (victim / file).write_bytes(b"mine")
        prepare(dest, victim)
        files = [path for path in (*victim.rglob("*"), *dest.rglob("*")) if not path.is_symlink()]
        if prepared == "links for what is half-written":  # it is written, but not to where they lead
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
            assert prepared == "links for what is half-written"
        assert {path: path.is_dir() or path.read_bytes() for path in before} == before, prepared
