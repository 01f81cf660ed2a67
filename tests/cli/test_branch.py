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
    assert "less than two updates" in call(f"{line} --epochs 0.2".replace("--epochs 1 ", ""), status=2).err
    (note,) = (tmp_path / "out").glob("at-*.sha256")
    (config,) = (tmp_path / "out").glob("batch-12-*/config.yaml")
    note.write_text("that of a run which lay there before")
    assert "was trained anew" in call(line, status=2).err
    note.unlink()
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    assert "was begun with seed=1" in call(line, status=2).err
