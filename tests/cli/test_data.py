"""`convoy data`: what it says, and packs from the command line."""

from pathlib import Path

import pytest

from cli.calls import Call
from data.made import write_folder
from tiny import write_pictures

PACK = "data pack photos packed --processes 1"
STORED = "short side at most 40, JPEG of quality 90 where resized"


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos" / "train", num=4)
    write_folder(tmp_path / "photos" / "val", num=2)
    return tmp_path / "photos"


def test_from_a_folder_to_a_pack_and_back(photos: Path, call: Call) -> None:
    rows = call(f"{PACK} --short-side 40 --json").document
    assert [(row["split"], row["images"]) for row in rows] == [("train", 8), ("test", 4)]
    assert rows[0]["stored_bytes"] < rows[0]["original_bytes"]
    assert all(len(row[key]) == 3 and 0 < min(row[key]) < 1 for row in rows for key in ("mean", "std"))
    (row,) = call("data verify packed --json").document
    assert row == {"pack": "packed", "of": "photos", "stored": STORED, "images": 12, "damaged": 0}
    rows = call("data packed --json").document
    assert [(row["format"], row["images"], row["stored"]) for row in rows] == [("pack", 8, STORED), ("pack", 4, STORED)]
    assert f"stored: {STORED}\n" in call("data packed").out
    unpacked = call("data unpack packed back")
    assert unpacked.out == "12 pictures of 2 classes are in back\n" and unpacked.err == ""
    assert len(list(photos.parent.glob("back/*/*/*.jpg"))) == 12
    (tar := photos.parent / "packed" / "train-000000.tar").write_bytes(tar.read_bytes()[:-1])
    assert "packed/train-000000.tar has " in call("data verify packed", status=1).err


def test_check_names_every_bad_picture(tmp_path: Path, call: Call) -> None:
    data = write_pictures(tmp_path / "small", size=(20, 20)) / "train"
    content = (data / "a" / "0.png").read_bytes()
    for place in ("a/0.png", "b/3.png", "c/7.png"):
        (data / place).write_bytes(content[:90])
    (split,) = call(["data", str(data), "--json"]).err.splitlines()
    assert "train has no split of its own: 2 of its 24 samples are held out" in split
    output = call(["data", str(data), "--check", "--json"], status=1)
    assert sum(row["not readable"] for row in output.document) == 3
    names = sorted(line.partition(" ")[0] for line in output.err.splitlines()[1:])
    assert names == ["a/0.png", "b/3.png", "c/7.png"]
