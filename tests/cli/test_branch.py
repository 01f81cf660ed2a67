"""`convoy branch` on real processes."""

from pathlib import Path

from cli.calls import Call


def test_the_next_stretch_in_two_batches(run: Path, tmp_path: Path, call: Call) -> None:
    line = f"branch {run} --batches 12,24 --epochs 1 --out {tmp_path / 'out'}"
    rows = call(f"{line} --json").document
    assert [row["batch"] for row in rows] == [12, 24] and rows[0]["rate"] * 2 == rows[1]["rate"]
    assert min(row["over_the_lowest"] for row in rows) == 0 < rows[0]["loss"] and all(
        len(row["losses"]) == 4 for row in rows
    )
    said = call(line).out  # all was trained
    assert "largest useful batch: " in said and "(within 5% of the lowest loss)" in said
