"""`convoy data`: what it says, and packs from the command line."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from convoy.cli.app import main
from convoy.data import pack
from data.made import write_folder, write_mnist


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos" / "train", num=4)
    write_folder(tmp_path / "photos" / "val", num=2)
    return tmp_path / "photos"


def said(capsys, *arguments: str, status: int = 0) -> tuple[str, str]:
    assert main(["data", *arguments]) == status
    out, err = capsys.readouterr()
    return out, err


def test_from_a_folder_to_a_pack_and_back(photos, capsys):
    out, err = said(capsys, "pack", "photos", "packed", "--short-side", "40", "--processes", "1", "--json")
    rows = json.loads(out)
    assert [(row["split"], row["images"]) for row in rows] == [("train", 8), ("test", 4)]
    assert rows[0]["stored_bytes"] < rows[0]["original_bytes"]
    assert all(len(row[key]) == 3 and 0 < min(row[key]) < 1 for row in rows for key in ("mean", "std"))
    (row,) = json.loads(said(capsys, "verify", "packed", "--json")[0])
    assert row == {
        "pack": "packed",
        "of": "photos",
        "stored": "short side at most 40, JPEG of quality 90 where resized",
        "images": 12,
        "damaged": 0,
    }
    rows = json.loads(said(capsys, "packed", "--json")[0])
    assert [(row["format"], row["images"]) for row in rows] == [("pack", 8), ("pack", 4)]
    assert {row["stored"] for row in rows} == {"short side at most 40, JPEG of quality 90 where resized"}
    assert "stored: short side at most 40, JPEG of quality 90 where resized\n" in said(capsys, "packed")[0]
    out, err = said(capsys, "unpack", "packed", "back")
    assert out == "12 pictures of 2 classes are in back\n" and "unpacking: 12 of 12" in err
    assert len(list(photos.parent.glob("back/*/*/*.jpg"))) == 12


def test_what_is_damaged_is_named_with_status_1(photos, capsys):
    said(capsys, "pack", "photos", "packed", "--processes", "1")
    tar = photos.parent / "packed" / "train-000000.tar"
    content = bytearray(tar.read_bytes())
    content[700] ^= 1
    tar.write_bytes(content)
    _, err = said(capsys, "verify", "packed", status=1)
    assert "train-000000.tar/train/cat/000.jpg is not what was packed: its checksum differs" in err
    tar.write_bytes(content[:-1])
    out, err = said(capsys, "verify", "packed", "--json", status=1)
    assert json.loads(out)[0]["damaged"] == 1
    assert "packed/train-000000.tar has 40,959 bytes instead of 40,960: fetch the pack again, or pack again\n" in err
    tar.unlink()
    assert "train-000000.tar is missing" in said(capsys, "verify", "packed", status=1)[1]
    said(capsys, "packed", status=2)


def test_gray_pictures_have_one_mean_and_pixels_no_bytes_of_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_mnist(tmp_path / "mnist")
    rows = json.loads(said(capsys, "pack", "mnist", "packed", "--processes", "1", "--json")[0])
    assert [list(row) for row in rows] == [["pack", "split", "images", "stored_bytes", "mean", "std"]] * 2
    assert [len(row["mean"]) == len(row["std"]) == 1 for row in rows] == [True, True]
    assert "stored: files and size as in the original" in said(capsys, "packed")[0]


def test_the_table_has_room_on_80_columns(photos, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = said(capsys, "pack", "photos", "p" * 40, "--processes", "1")
    assert out.split()[:6] == ["split", "images", "original", "stored", "mean", "std"]
    *table, on_disk = out.splitlines()
    assert len(table) == 3 and all(len(line) <= 80 for line in table)
    assert re.fullmatch(r"p{40} takes [0-9.]+ kB on disk: tars add some 2 kB to every picture", on_disk)


def test_a_pack_of_a_pack_is_stored_as_that(photos, capsys):
    said(capsys, "pack", "photos", "raw", "--raw", "--short-side", "24", "--processes", "1")
    said(capsys, "pack", "raw", "again", "--processes", "1")
    assert "stored: raw pixels, short side at most 24" in said(capsys, "again")[0]
    said(capsys, "pack", "raw", "smaller", "--short-side", "16", "--processes", "1")
    assert "stored: short side at most 16" in said(capsys, "smaller")[0]


def test_packing_says_from_where_it_goes_on(photos, monkeypatch, capsys):
    monkeypatch.setattr(pack, "PER_SHARD", 2)
    broken = photos / "train" / "dog" / "003.jpg"
    good = broken.read_bytes()
    broken.write_bytes(b"")
    _, err = said(capsys, "pack", "photos", "packed", "--processes", "1", status=2)
    assert "going on" not in err
    broken.write_bytes(good)
    _, err = said(capsys, "pack", "photos", "packed", "--processes", "1")
    assert re.search(r"^going on after ([2-9]|10) of 12 pictures$", err, re.MULTILINE)


def test_a_full_disk_is_a_mistake_that_can_be_mended(photos, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(pack, "write_text", full)
        _, err = said(capsys, "pack", "photos", "packed", "--processes", "1", status=2)
    assert "packed cannot be written (No space left on device): mend that, and run the same again" in err
    said(capsys, "pack", "photos", "packed", "--processes", "1")
    monkeypatch.setattr(Path, "write_bytes", full)
    said(capsys, "unpack", "packed", "back", status=2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pack none packed", "data set none does not exist"),
        ("pack photos packed --short-side 3", "is not in the range 8<=x<=8192"),
        ("pack photos packed --raw --quality 80", "--quality is of JPEG, and --raw stores none"),
        ("pack photos packed --quality 80", "--quality is of pictures that --short-side makes smaller: give both"),
        ("pack /nowhere packed", "data set /nowhere does not exist: set SOURCE to a file or folder, or to mnist-mini"),
        ("pack empty packed", "empty is an empty folder: set SOURCE to where the data is"),
        ("empty", "empty is an empty folder: set PATH to where the data is"),
        ("/nowhere", "data set /nowhere does not exist: set PATH to a file or folder, or to mnist-mini"),
        ("verify /nowhere", "/nowhere does not exist: name a folder that convoy data pack has written"),
        ("pack photos photos/packed", "lies in the data set itself"),
        ("pack photos .", "is not empty: name a new folder"),
        ("pack photos", "missing argument"),
        ("pakc photos packed", "no such command 'pakc': did you mean pack?"),
        ("verify photos", "photos is no pack: convoy data pack SOURCE DEST writes one"),
        ("verify none", "none does not exist"),
        ("unpack photos back", "is no pack"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(photos, capsys, line, words):
    (photos.parent / "empty").mkdir()
    before = sorted(photos.parent.rglob("*"))
    out, err = said(capsys, *line.split(), status=2)
    assert words in err.lower() or words in err
    assert err.count("\n") == 1 and not out
    assert sorted(photos.parent.rglob("*")) == before


def test_what_is_left_out_is_said_and_keys_of_the_recipe_settle_what_is_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("lessons", "exam"):
        write_folder(tmp_path / "photos" / folder, width=12, height=12)
    (tmp_path / "photos" / "lessons" / "cat" / "a.txt").write_text("x")
    _, err = said(capsys, "photos", status=2)
    assert "photos holds exam/, lessons/, and which to train on is not clear" in err
    settings = ("--set", "data.train=lessons", "--set", "data.test=exam")
    for arguments in (("photos", "--check"), ("pack", "photos", "packed", "--processes", "1")):
        out, err = said(capsys, *arguments, *settings)
        assert "left out: 1 .txt\n" in err
        assert re.search(r"train +8 ", out) and re.search(r"test +8 ", out)


def test_a_broken_picture_is_named(photos, capsys):
    (photos / "train" / "dog" / "002.jpg").write_bytes(b"")
    _, err = said(capsys, "pack", "photos", "packed", "--processes", "1", status=2)
    assert "train/dog/002.jpg is an empty file: mend it, and pack again to go on; or remove it" in err
    _, err = said(capsys, "packed", status=2)
    assert "is a pack that was interrupted" in err
