"""`convoy data`: what it says, and packs from the command line."""

import json

import pytest

from convoy.cli.app import main
from data.made import write_folder


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
    assert rows[0]["stored bytes"] < rows[0]["original bytes"]
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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pack none packed", "data set none does not exist"),
        ("pack photos packed --short-side 3", "is not in the range 8<=x<=8192"),
        ("pack photos packed --raw --quality 80", "--quality is of JPEG, and --raw stores none"),
        ("pack photos photos/packed", "lies in the data set itself"),
        ("pack photos .", "is not empty: name a new folder"),
        ("pack photos", "missing argument"),
        ("verify photos", "photos is no pack: convoy data pack SOURCE DEST writes one"),
        ("verify none", "none does not exist"),
        ("unpack photos back", "is no pack"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(photos, capsys, line, words):
    before = sorted(photos.parent.rglob("*"))
    out, err = said(capsys, *line.split(), status=2)
    assert words in err.lower() or words in err
    assert err.count("\n") == 1 and not out
    assert sorted(photos.parent.rglob("*")) == before


def test_a_broken_picture_is_named(photos, capsys):
    (photos / "train" / "dog" / "002.jpg").write_bytes(b"")
    _, err = said(capsys, "pack", "photos", "packed", "--processes", "1", status=2)
    assert "train/dog/002.jpg is an empty file: mend or remove it, and pack again" in err
    _, err = said(capsys, "packed", status=2)
    assert "is a pack that was interrupted" in err
