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
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from convoy.data import AugmentConfig, DataConfig, Order, open_data, pack, training_batches
from convoy.data.dataset import open_files
from convoy.data.decode import open_picture, suffix_of
from convoy.data.pack_format import INDEX, UNFINISHED, PackOptions, Statistics, index_file
from convoy.data.packed import Pack, PackedSource, damaged, unpack
from convoy.errors import ConvoyError
from data.made import encoded, picture, tar_members, write_cifar, write_folder, write_mnist, write_parquet, write_tar


def packed(source, folder: Path, options: PackOptions | None = None, **section) -> dict[str, Statistics]:
    kind, opened = open_files(DataConfig(path=str(source), **section))
    return pack.pack(kind, opened, folder, options or PackOptions(), None, processes=1)


def images(path, num: int = 6, **options) -> torch.Tensor:
    section = DataConfig(
        **({"path": str(path), "workers": 0, "augment": AugmentConfig(flip=True), "image_size": 24} | options)
    )
    data = open_data(section)
    order = Order(len(data.train), 4, seed=2)
    made = training_batches(data, section, order, first_update=0, num_updates=num, seed=2)
    batches = list(made)
    assert all(batch.labels.tolist() == data.train.labels[batch.samples].tolist() for batch in batches)
    return torch.cat([batch.images for batch in batches])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    write_folder(root / "train", ("a", "b", "c"), num=5)
    write_folder(root / "val", ("a", "b", "c"), num=2)
    return root


def write(kind: str, folder: Path) -> dict:
    """A data set in a format; returns options to open it with."""
    options: dict = {"image_size": 24, "augment": AugmentConfig(crop="random-resized", flip=True)}
    if kind == "folder":
        write_folder(folder, ("a", "b"), num=12)
    elif kind == "split folder":
        write_folder(folder / "train", ("a", "b"), num=8)
        write_folder(folder / "val", ("a", "b"), num=2)
    elif kind == "parquet":
        write_parquet(
            folder / "x.parquet", [encoded(picture(seed=i), "JPEG") for i in range(20)], [i % 3 for i in range(20)]
        )
    elif kind == "tar":
        write_tar(folder / "x.tar", tar_members(20))
    elif kind == "mnist":
        write_mnist(folder)
        options = {"augment": AugmentConfig(crop="pad")}
    else:
        write_cifar(folder, 10, binary=True)
        options = {"augment": AugmentConfig(crop="pad", flip=True)}
    return options


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kind", ["folder", "split folder", "parquet", "tar", "mnist", "cifar"])
def test_a_run_on_a_pack_sees_every_pixel_of_the_original_in_its_order(tmp_path, kind, raw):
    options = write(kind, tmp_path / "source")
    options |= {"image_size": None} if kind in ("mnist", "cifar") else {}
    if raw and options.get("image_size"):  # parts of JPEG files may be decoded smaller
        options["augment"] = AugmentConfig(flip=True)
    packed(tmp_path / "source", tmp_path / "packed", PackOptions(raw=raw))
    assert torch.equal(images(tmp_path / "packed", **options), images(tmp_path / "source", **options))
    source, found = (open_data(DataConfig(path=str(tmp_path / name))) for name in ("source", "packed"))
    facts = ("name", "classes", "image_size", "channels", "mean", "std", "resize")
    assert [getattr(found, fact) for fact in facts] == [getattr(source, fact) for fact in facts]
    assert found.train.labels.tolist() == source.train.labels.tolist()
    assert found.test.labels.tolist() == source.test.labels.tolist()


def test_the_comparison_notices_another_order(tmp_path, monkeypatch):
    """The negative control: shards whose samples are numbered backwards."""
    write("split folder", tmp_path / "source")
    monkeypatch.setattr(
        pack, "index_arrays", lambda *of, own=pack.index_arrays: {k: v[::-1].copy() for k, v in own(*of).items()}
    )
    kind, opened = open_files(DataConfig(path=str(tmp_path / "source")))
    opened.train.labels = opened.train.labels.copy()
    try:
        pack.pack(kind, opened, tmp_path / "packed", PackOptions(), None, processes=1)
        same = torch.equal(images(tmp_path / "packed"), images(tmp_path / "source"))
    except (AssertionError, ConvoyError):
        same = False
    assert not same


def test_workers_read_packs_too(tmp_path, photos):
    packed(photos, tmp_path / "packed")
    assert torch.equal(images(tmp_path / "packed", workers=2), images(photos))


def test_a_run_says_that_its_data_are_packed(tmp_path, photos):
    packed(photos, tmp_path / "packed", PackOptions(short_side=40))
    (note,) = open_data(DataConfig(path=str(tmp_path / "packed"), image_size=32)).notes
    assert note.startswith(
        f"{tmp_path / 'packed'} is a pack of {photos.name} (folder; short side at most 40, JPEG of qu"
    )
    assert note.endswith("its samples come in the order of the original")


def test_a_run_says_that_a_pack_is_smaller_than_its_input(tmp_path, photos):
    packed(photos, tmp_path / "packed", PackOptions(short_side=24))

    def notes(size: int) -> tuple[str, ...]:
        return open_data(DataConfig(path=str(tmp_path / "packed"), image_size=size)).notes

    assert len(notes(24)) == 1
    assert notes(28)[1].startswith("pictures are enlarged to 28 pixels, as the pack keeps short sides of at most 24: ")


@pytest.mark.parametrize("raw", [False, True])
def test_the_short_side_and_the_statistics(tmp_path, photos, raw):
    statistics = packed(photos, tmp_path / "packed", PackOptions(short_side=35, raw=raw))
    data = open_data(DataConfig(path=str(tmp_path / "packed")))
    loaded = [data.train.load(i) for i in range(len(data.train))]
    assert {min(image.size) for image in loaded} == {35} and {max(image.size) for image in loaded} == {40}
    pixels = np.concatenate([np.asarray(image).reshape(-1, 3) for image in loaded]) / 255
    found = statistics["train"]
    tolerance = 1e-4 if raw else 6e-3  # of JPEG the pixels before they were encoded
    assert np.allclose(found.mean, pixels.mean(0), atol=tolerance)
    assert np.allclose(found.std, pixels.std(0), atol=tolerance)
    assert (found.images, found.smallest, found.largest) == (15, 70, 80)
    assert found.original_bytes == sum(file.stat().st_size for file in (photos / "train").rglob("*.jpg"))


def test_any_reader_of_tars_reads_a_pack(tmp_path, photos):
    packed(photos, tmp_path / "packed")
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("train-000000.tar", "test-000000.tar", "classes.txt"):
        (tmp_path / "packed" / name).rename(plain / name)
    assert open_data(DataConfig(path=str(plain))).format == "webdataset"
    assert torch.equal(images(plain), images(photos))
    with tarfile.open(plain / "train-000000.tar") as tar:
        assert tar.getnames()[:4] == ["000000000.jpg", "000000000.cls", "000000001.jpg", "000000001.cls"]


def test_a_broken_picture_is_named_and_the_rest_goes_on_when_it_is_mended(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(pack, "PER_SHARD", 2)
    source = tmp_path / "source"
    write_folder(source, ("a", "b"), num=4)
    good = (source / "b" / "001.jpg").read_bytes()
    (source / "b" / "001.jpg").write_bytes(good[:500])
    with pytest.raises(
        ConvoyError, match=r"^b/001.jpg cannot be decoded .*: mend it, and pack again to go on; or remove it"
    ):
        packed(source, tmp_path / "packed")
    assert not (tmp_path / "packed" / INDEX).exists()
    for reader in (open_data, open_files):
        with pytest.raises(ConvoyError, match="is a pack that was interrupted: finish it by the same convoy data pack"):
            reader(DataConfig(path=str(tmp_path / "packed")))
    complete = [tmp_path / "packed" / notes.stem for notes in (tmp_path / "packed" / UNFINISHED).glob("*.npz")]
    before = {file.name: file.stat().st_mtime_ns for file in complete}
    assert before
    (source / "b" / "001.jpg").write_bytes(good)
    packed(source, tmp_path / "packed")
    after = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "packed").glob("*.tar")}
    assert len(after) == 4 and before.items() <= after.items()
    assert torch.equal(images(tmp_path / "packed"), images(source))
    assert not (tmp_path / "packed" / UNFINISHED).exists()


def test_a_pack_is_finished_before_its_notes_are_removed(tmp_path, photos, monkeypatch):
    def stopped(folder, ignore_errors=False):
        if Path(folder).exists():
            next(file for file in Path(folder).iterdir() if file.name != "lock").unlink()
            if not ignore_errors:
                raise OSError(errno.ENOTEMPTY, "of a network file system")

    with monkeypatch.context() as patch:
        patch.setattr(pack.shutil, "rmtree", stopped)
        packed(photos, tmp_path / "packed")
    assert torch.equal(images(tmp_path / "packed"), images(photos))
    with pytest.raises(ConvoyError, match="is a finished pack"):
        packed(photos, tmp_path / "packed")


def test_notes_of_something_unknown_are_neither_used_nor_removed(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(pack, "PER_SHARD", 5)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(pack, "index_file", lambda *_: 1 / 0)
        packed(photos, tmp_path / "packed", PackOptions(short_side=35))
    (tmp_path / "packed" / UNFINISHED / "what.json").unlink()
    before = sorted((tmp_path / "packed").rglob("*"))
    with pytest.raises(ConvoyError, match=r"\.packing does not say what is packed there .*: remove it"):
        packed(photos, tmp_path / "packed", PackOptions(short_side=20))
    assert sorted((tmp_path / "packed").rglob("*")) == before


def test_of_damaged_notes_a_shard_is_written_again_or_it_is_said_what_to_do(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(pack, "PER_SHARD", 5)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(pack, "index_file", lambda *_: 1 / 0)
        packed(photos, tmp_path / "packed")
    first, second, third, *_ = sorted((tmp_path / "packed" / UNFINISHED).glob("*.npz"))
    first.write_bytes(first.read_bytes()[:100])
    second.write_bytes(b"")
    content = bytearray(third.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 20] = bytes(20)
    third.write_bytes(content)
    begun = tmp_path / "packed" / UNFINISHED / "what.json"
    before = begun.read_text()
    for damage in (before[:40], "[1, 2]", "null"):
        begun.write_text(damage)
        with pytest.raises(ConvoyError, match=r"what\.json is damaged\): remove it"):
            packed(photos, tmp_path / "packed")
    begun.write_text(before)
    packed(photos, tmp_path / "packed")
    packed(photos, tmp_path / "whole")
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "packed").iterdir()} == whole


def test_who_comes_second_finds_a_finished_pack(tmp_path, photos, monkeypatch):
    """Both have seen that there is none; then the first one ends."""
    packed(photos, tmp_path / "packed")
    before = {file.name: file.read_bytes() for file in (tmp_path / "packed").iterdir()}
    (tmp_path / "packed" / UNFINISHED).mkdir()
    with pytest.raises(ConvoyError, match="is a finished pack"):
        packed(photos, tmp_path / "packed", PackOptions(short_side=20))
    assert {file.name: file.read_bytes() for file in (tmp_path / "packed").iterdir()} == before


KILLED = """
import sys, time
from pathlib import Path
from convoy.data import DataConfig, pack, pack_format
from convoy.data.dataset import open_files

if __name__ == "__main__":
    pack.PER_SHARD = 3
    kind, opened = open_files(DataConfig(path=sys.argv[1]))

    def said(what, done, total):
        if done:
            print(done, flush=True)
            time.sleep(60)

    pack.pack(kind, opened, Path(sys.argv[2]), pack_format.PackOptions(), said, 1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pack_that_was_ended_goes_on_and_is_what_it_would_have_been(tmp_path, monkeypatch, number):
    write_folder(tmp_path / "source", ("a", "b"), num=12)
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(tmp_path / "source"), str(tmp_path / "killed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert int(process.stdout.readline()) == 3
        process.send_signal(number)
        errors = process.stderr.read()  # up to the end of the last process that has it
    assert (b"KeyboardInterrupt" in errors) if number == signal.SIGINT else errors == b""
    (tmp_path / "killed" / ".train-000009.tar.1.tmp").write_bytes(b"half")
    monkeypatch.setattr(pack, "PER_SHARD", 3)
    with pytest.raises(ConvoyError, match="was interrupted"):
        open_data(DataConfig(path=str(tmp_path / "killed")))
    with pytest.raises(
        ConvoyError,
        match=r"something else \(other options: it was begun with files and size as in the original\): fini",
    ):
        packed(tmp_path / "source", tmp_path / "killed", PackOptions(raw=True))
    for name in ("killed", "whole"):
        packed(tmp_path / "source", tmp_path / name)
    files = {
        name: {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("killed", "whole")
    }
    assert files["killed"] == files["whole"] and len(files["whole"]) == 8 + 2


def test_two_cannot_pack_into_one_folder(tmp_path, photos):
    kind, opened = open_files(DataConfig(path=str(photos)))

    def said(*_: object) -> None:
        with pytest.raises(ConvoyError, match="another process packs into"):
            packed(photos, tmp_path / "packed")

    pack.pack(kind, opened, tmp_path / "packed", PackOptions(), said, 1)


def test_taken_folders_are_refused(tmp_path, photos):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConvoyError, match="is a file"):
        packed(photos, tmp_path / "file")
    with pytest.raises(ConvoyError, match="is not empty"):
        packed(photos, tmp_path)
    packed(photos, tmp_path / "packed")
    with pytest.raises(ConvoyError, match="is a finished pack"):
        packed(photos, tmp_path / "packed")


def test_damage_is_named(tmp_path, photos):
    packed(photos, tmp_path / "packed")
    found = Pack.open(tmp_path / "packed")
    assert list(damaged(found, None)) == []
    source = found.source("train")
    assert source.subset(np.arange(2)).is_packed
    _, offset, size = source._places.array[7].tolist()
    tar = tmp_path / "packed" / "train-000000.tar"
    content = bytearray(tar.read_bytes())
    content[offset + size // 2] ^= 1
    tar.write_bytes(content)
    assert list(damaged(Pack.open(tmp_path / "packed"), None)) == [
        "train-000000.tar/train/b/002.jpg is not what was packed: its checksum differs"
    ]
    with pytest.raises(ConvoyError, match=r"b/002.jpg is not what was packed"):
        unpack(found, tmp_path / "unpacked", None)
    assert not (tmp_path / "unpacked").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["packed"]
    tar.write_bytes(content[:-1])
    with pytest.raises(ConvoyError, match=r"train-000000.tar has .* bytes instead of .*: fetch the pack again"):
        Pack.open(tmp_path / "packed")
    tar.unlink()
    with pytest.raises(ConvoyError, match=r"train-000000.tar is missing"):
        open_data(DataConfig(path=str(tmp_path / "packed")))


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:50], lambda data: b"\xff" * len(data)])
def test_a_damaged_index_is_refused(tmp_path, photos, damage):
    packed(photos, tmp_path / "packed")
    index = tmp_path / "packed" / INDEX
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(ConvoyError, match="is cut off or damaged: pack the data again"):
        open_data(DataConfig(path=str(tmp_path / "packed")))


def test_a_pack_of_a_later_version_is_refused(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(pack, "VERSION", 99)
    packed(photos, tmp_path / "packed")
    with pytest.raises(ConvoyError, match="later version"):
        Pack.open(tmp_path / "packed")


def test_unpacking_gives_the_folder_back(tmp_path, photos):
    packed(photos, tmp_path / "packed")
    assert unpack(Pack.open(tmp_path / "packed"), tmp_path / "back", None) == 21
    for split, name in (("train", "train"), ("test", "val")):
        found = {
            file.relative_to(tmp_path / "back" / split): file for file in (tmp_path / "back" / split).rglob("*.jpg")
        }
        assert len(found) in (15, 6)
        assert all((photos / name / path).read_bytes() == file.read_bytes() for path, file in found.items())
    with pytest.raises(ConvoyError, match="is not an empty folder"):
        unpack(Pack.open(tmp_path / "packed"), tmp_path / "back", None)


def test_unpacked_files_end_as_in_the_original_where_the_format_is_the_same(tmp_path):
    folder = tmp_path / "source" / "a"
    folder.mkdir(parents=True)
    jpeg, png = encoded(picture(), "JPEG"), encoded(picture())
    files = {"x.JPEG": jpeg, "x.jpg": jpeg, "y.jpeg": jpeg, "y.png": png, "z.TIFF": encoded(picture(), "TIFF")}
    for name, content in (files | {"wrong.png": jpeg}).items():
        (folder / name).write_bytes(content)
    for options, ends in (
        (PackOptions(), {*files, "wrong.jpg"}),
        (PackOptions(raw=True), {"x.ppm", "x-000000002.ppm", "y.ppm", "y-000000004.ppm", "z.ppm", "wrong.ppm"}),
    ):
        to = tmp_path / str(options.raw)
        packed(tmp_path / "source", to, options)
        unpack(Pack.open(to), to / "back", None)
        assert {file.name for file in (to / "back" / "a").iterdir()} == ends
    assert (tmp_path / "False" / "back" / "a" / "x.JPEG").read_bytes() == jpeg


def test_a_run_says_what_to_do_about_a_damaged_picture_in_a_pack(tmp_path):
    write_folder(tmp_path / "source", ("a", "b"), num=6)  # without a split of their own
    packed(tmp_path / "source", tmp_path / "packed")
    tar = tmp_path / "packed" / "data-000000.tar"
    content = bytearray(tar.read_bytes())
    for _, offset, size in Pack.open(tmp_path / "packed").source("data")._places.array.tolist():
        content[offset : offset + size // 2] = bytes(size // 2)
    tar.write_bytes(content)
    for workers in (0, 1):
        with pytest.raises(
            ConvoyError, match=r"jpg is no picture .*: fetch the pack again, or pack again, or set data.bad_images=skip"
        ):
            images(tmp_path / "packed", workers=workers)


def test_names_of_others_lead_nowhere(tmp_path):
    """Classes and files whose names would be paths, or hidden, or alike."""
    classes = ["../up", "..", "a", "A", "/etc"]
    write_tar(
        tmp_path / "x.tar",
        {
            f"{i}.{end}": content
            for i in range(5)
            for end, content in (("png", encoded(Image.new("RGB", (9, 9)))), ("cls", str(i).encode()))
        },
    )
    kind, opened = open_files(DataConfig(path=str(tmp_path / "x.tar")))
    opened.classes = classes
    pack.pack(kind, opened, tmp_path / "packed", PackOptions(), None, 1)
    found = Pack.open(tmp_path / "packed")
    assert unpack(found, tmp_path / "back", None) == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "packed", "x.tar"]
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == [
        "000000 _up",
        "000001",
        "000002 a",
        "000003 A",
        "000004 _etc",
    ]
    assert len(list((tmp_path / "back").rglob("*.png"))) == 5


def test_no_picture_takes_the_place_of_another(tmp_path, monkeypatch):
    """Names of files that are alike, or like those that others get instead, or longer than a file's may be."""
    names = ["cat-000000002", "cat", "CAT", "cat-000000002.x", "é" * 160, "é" * 160 + "2", "a.parquet, row 1", ".png"]
    members = {}
    for i in range(len(names)):
        members |= {f"{i}.png": encoded(Image.new("L", (8, 8), i)), f"{i}.cls": b"0"}
    write_tar(tmp_path / "x.tar", members)
    packed(tmp_path / "x.tar", tmp_path / "packed")
    monkeypatch.setattr(PackedSource, "name", lambda self, sample: f"a/{names[sample]}.png")
    found = Pack.open(tmp_path / "packed").model_copy(update={"classes": ["ä" * 200]})
    assert unpack(found, tmp_path / "back", None) == len(names)
    files = list((tmp_path / "back").rglob("*.png"))
    assert sorted(Image.open(file).getpixel((0, 0)) for file in files) == list(range(len(names)))
    assert {"cat-000000002.png", "cat.png", "CAT-000000002-000000002.png", "a.parquet, row 1.png"} <= {
        file.name for file in files
    }


def odd_pictures() -> dict[str, bytes]:
    """Files that are not just RGB in eight bits."""
    exif = Image.Exif()
    exif[0x112] = 6
    two = [picture(seed=1), picture(seed=2)]
    deep = Image.fromarray(np.linspace(0, 65535, 60 * 50).astype(np.uint16).reshape(50, 60))
    clear = picture().convert("RGBA")
    clear.putalpha(100)
    return {
        "cmyk.jpg": encoded(picture(mode="CMYK"), "JPEG"),
        "grey.jpg": encoded(picture(mode="L"), "JPEG"),
        "turned.jpg": encoded(picture(), "JPEG", exif=exif),
        "several.jpg": encoded(two[0], "MPO", save_all=True, append_images=two[1:]),
        "deep.png": encoded(deep),
        "clear.png": encoded(clear),
        "palette.gif": encoded(picture().convert("P"), "GIF"),
        "bits.tif": encoded(picture().convert("1"), "TIFF"),
        "new.webp": encoded(picture(), "WEBP"),
    }


@pytest.mark.parametrize("raw", [False, True])
def test_odd_pictures_look_as_in_the_original(tmp_path, raw):
    for kind in ("a", "b"):
        (tmp_path / "source" / kind).mkdir(parents=True)
        for name, content in odd_pictures().items():
            (tmp_path / "source" / kind / name).write_bytes(content)
    packed(tmp_path / "source", tmp_path / "packed", PackOptions(raw=raw))
    source, found = (open_files(DataConfig(path=str(tmp_path / name)))[1].train for name in ("source", "packed"))
    for sample in range(len(source)):
        theirs, ours = source.load(sample), found.load(sample)
        assert theirs.mode == ours.mode and np.array_equal(np.asarray(theirs), np.asarray(ours)), source.name(sample)
    packed(tmp_path / "source", tmp_path / "small", PackOptions(short_side=35, raw=raw))
    for sample in range(len(source)):
        ours = Pack.open(tmp_path / "small").source("data").load(sample)
        expected = source.load(sample).resize(ours.size, Image.Resampling.BICUBIC)
        assert min(ours.size) == 35 and ours.mode == expected.mode
        assert np.abs(np.asarray(ours).astype(int) - np.asarray(expected)).mean() < 4, source.name(sample)


def test_the_names_of_files_with_several_pictures_end_as_those_of_jpegs():
    ends = {name: suffix_of(open_picture(content, name)) for name, content in odd_pictures().items()}
    assert all(name.endswith(end) for name, end in ends.items())


def test_a_label_that_has_changed_in_the_index_is_refused(tmp_path, photos):
    packed(photos, tmp_path / "packed")
    index = tmp_path / "packed" / INDEX
    labels = Pack.open(tmp_path / "packed").arrays("train", "label")[0].tobytes()
    content = index.read_bytes()
    assert content.count(labels) == 1
    index.write_bytes(content.replace(labels, labels[:-4] + b"\1" + labels[-3:]))
    with pytest.raises(ConvoyError, match=r"index.safetensors is cut off or damaged"):
        open_data(DataConfig(path=str(tmp_path / "packed")))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("train.shard", lambda array: array + 2**30),
        ("train.shard", lambda array: array - 1),
        ("train.size", lambda array: array + 2**30),
        ("train.label", lambda array: array[:-1]),
        ("train.label", lambda array: array[:0]),
        ("train.name_end", lambda array: array[::-1].copy()),
        ("train.name_end", lambda array: array.astype(np.float32)),
        ("train.label", lambda array: array[None]),
        ("options", lambda options: options | {"quality": "x"}),
        ("train.name_end", lambda array: array + 10**6),
        ("shards", lambda shards: {"../" + name: size for name, size in shards.items()}),
        ("statistics", lambda splits: {"../" + split: each for split, each in splits.items()}),
        ("classes", lambda _: None),
    ],
)
def test_an_index_of_a_strangers_leads_nowhere_and_fills_no_memory(tmp_path, photos, name, change):
    packed(photos, tmp_path / "packed")
    index = tmp_path / "packed" / INDEX
    with safe_open(index, "np") as file:
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        document = json.loads(file.metadata()["convoy.pack"])
    place = arrays if name in arrays else document
    place[name] = change(place[name])
    index.write_bytes(index_file(arrays, document))
    with pytest.raises(ConvoyError, match=r"index.safetensors is cut off or damaged"):
        open_data(DataConfig(path=str(tmp_path / "packed")))


def test_a_full_disk_is_named_and_packing_goes_on_afterwards(tmp_path, photos, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for writes in ("write_json", "write_text"):  # as packing begins, and at its end
        with (
            monkeypatch.context() as patch,
            pytest.raises(ConvoyError, match=r"packed cannot be written \(No space lef"),
        ):
            patch.setattr(pack, writes, full)
            packed(photos, tmp_path / "packed")
    assert not (tmp_path / "packed" / INDEX).exists()
    assert packed(photos, tmp_path / "packed")["train"].images == 15
    with monkeypatch.context() as patch, pytest.raises(ConvoyError, match=r"back cannot be written \(No space left"):
        patch.setattr(Path, "write_bytes", full)
        unpack(Pack.open(tmp_path / "packed"), tmp_path / "back", None)
    assert not (tmp_path / "back").exists()


def test_file_systems_without_locks_are_written_to_as_well(tmp_path, photos, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    assert packed(photos, tmp_path / "packed")["test"].images == 6


def test_what_a_killed_unpacking_left_is_removed(tmp_path, photos):
    packed(photos, tmp_path / "packed")

    def killed(*_: object) -> None:
        (left,) = (tmp_path / "back").iterdir()
        shutil.copytree(left, tmp_path / "copy")

    unpack(Pack.open(tmp_path / "packed"), tmp_path / "back", killed)
    shutil.rmtree(tmp_path / "back")
    shutil.copytree(tmp_path / "copy", tmp_path / "back" / ".unpacking-x")
    assert unpack(Pack.open(tmp_path / "packed"), tmp_path / "back", None) == 21
    assert sorted(entry.name for entry in (tmp_path / "back").iterdir()) == ["test", "train"]


PREPARED = {
    "a link under the name of the folder": lambda dest, victim: (dest / ".unpacking").symlink_to(victim),
    "a link under such a name": lambda dest, victim: (dest / ".unpacking-x").symlink_to(victim),
    "somebody's folder": lambda dest, victim: shutil.copytree(victim, dest / ".unpacking"),
    "somebody's folder under such a name": lambda dest, victim: shutil.copytree(victim, dest / ".unpacking-x"),
    "a link to notes": lambda dest, victim: (dest / ".packing").symlink_to(victim),
    "somebody's notes": lambda dest, victim: shutil.copytree(victim, dest / ".packing"),
    "a link to the lock": lambda dest, victim: link(dest / ".packing" / "lock", victim / "mine.npz"),
    "links for what is half-written": lambda dest, victim: [
        link(dest / ".packing" / f".{name}.{os.getpid()}.tmp", victim / "mine.npz")
        for name in ("what.json", "train-000000.tar.npz", "test-000000.tar.npz")
    ],
    "files that end alike": lambda dest, victim: [(dest / name).write_bytes(b"") for name in (".packing", ".my.tmp")],
}


def link(path: Path, to: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(to)


@pytest.mark.parametrize("prepared", PREPARED)
def test_nothing_of_others_is_followed_written_or_removed(tmp_path, photos, prepared):
    """Whoever may write to the folder has put something there before."""
    packed(photos, tmp_path / "packed")
    dest, victim = tmp_path / "dest", tmp_path / "victim"
    for folder in (dest, victim / "inner"):
        folder.mkdir(parents=True)
    for file in ("mine.npz", "inner/mine", "what.txt", ".mine.1.tmp"):
        (victim / file).write_bytes(b"mine")
    (victim / ".convoy").mkdir()
    PREPARED[prepared](dest, victim)
    before = {path: path.is_dir() or path.read_bytes() for path in (*victim.rglob("*"), *dest.rglob("*"))}
    before = {path: content for path, content in before.items() if not path.is_symlink()}
    try:
        if any(path.name.startswith(".unpacking") for path in dest.iterdir()):
            unpack(Pack.open(tmp_path / "packed"), dest, None)
        else:
            packed(photos, dest)
    except ConvoyError as error:
        assert str(dest) in str(error) and "\n" not in str(error)
    else:
        assert prepared == "links for what is half-written"
        before = {path: content for path, content in before.items() if victim in path.parents}
    assert {path: path.is_dir() or path.read_bytes() for path in before} == before


def test_two_cannot_unpack_into_one_folder(tmp_path, photos, monkeypatch):
    packed(photos, tmp_path / "packed")
    monkeypatch.setattr("convoy.data.packed._EVERY", 1)
    refused = []

    def said(*_: object) -> None:
        with pytest.raises(ConvoyError, match=r"another process unpacks into .*back: wait for it, or end it"):
            unpack(Pack.open(tmp_path / "packed"), tmp_path / "back", None)
        refused.append(1)

    assert unpack(Pack.open(tmp_path / "packed"), tmp_path / "back", said) == 21
    assert len(refused) == 21
    assert len([path for path in (tmp_path / "back").rglob("*") if path.is_file()]) == 21


def test_a_pack_says_what_it_is(tmp_path, photos):
    packed(photos, tmp_path / "packed", PackOptions(short_side=40, raw=True))
    found = Pack.open(tmp_path / "packed")
    assert (found.name, found.format, found.classes) == (photos.name, "folder", ["a", "b", "c"])
    assert found.options == PackOptions(40, True) and set(found.statistics) == {"train", "test"}
    assert json.loads(json.dumps(str(found))) == f"a pack of {photos.name} (folder; raw pixels, short side at most 40)"
