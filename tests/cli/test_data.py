"""`convoy data`: what it says, and packs from the command line."""

from pathlib import Path

from cli.calls import Call
from tiny import write_pictures


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
