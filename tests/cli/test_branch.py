"""`convoy branch` on real processes."""

from pathlib import Path

from cli.calls import Call


def test_the_next_stretch_in_two_batches(run: Path, tmp_path: Path, call: Call) -> None:
    line = f"branch {run} --batches 12,24 --epochs 1 --out {tmp_path / 'out'}"
    document = call(f"{line} --json").document
    first, second = rows = document["rows"]
    assert [row["batch"] for row in rows] == [12, 24] and first["rate"] * 2 == second["rate"]
    assert min(row["over_the_lowest"] for row in rows) == 0 < first["loss"] and document["useful"] in (12, 24)
    assert (tmp_path / "out" / "branches.json").is_file()
    assert document["sentence"] in call(line).out  # all was trained
