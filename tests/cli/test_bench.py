"""`convoy bench` on real processes."""

import json
import os
from pathlib import Path

import pytest

from cli.calls import Call

TINY = "--batch 8 --image-size 28 --updates 2 --warm-up 1 --timeout 300"


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_study_on_two_devices(tmp_path: Path, call: Call) -> None:
    out = tmp_path / "study"
    line = f"bench tiny:TinyNet --devices 1,2 --plans sample;auto --peers ddp --rounds 1 {TINY} --out {out}"
    rows = {(row["kind"], row["configuration"]): row for row in call(f"{line} --json").document["configurations"]}
    peers = [("torch", "plain PyTorch"), ("ddp", "DistributedDataParallel")]
    assert list(rows) == [("convoy", "one device"), peers[0], ("convoy", "sample=2"), ("convoy", "auto"), peers[1]]
    for row in rows.values():
        assert row["step_s"] > 0 and row["memory_bytes"] > 0 and row["rounds"] == 1
        parts = ("compute_s", "exposed_communication_s", "data_wait_s", "optimizer_s")
        assert sum(row[part] for part in parts) == pytest.approx(row["step_s"])
    study = json.loads((out / "bench.json").read_text())
    unpredicted = [row for (kind, _), row in rows.items() if kind == "convoy" and not row["predicted_s"]]
    assert unpredicted == [], study["sessions"]
    assert rows["convoy", "sample=2"]["exposed_communication_s"] > 0
    assert rows["convoy", "one device"]["exposed_communication_s"] == 0
    losses = [visit["loss"] for row in study["configurations"] for visit in row["visits"]]
    assert losses[2:4] == pytest.approx([losses[0]] * 2, rel=1e-5)
    assert study["study"]["cores_per_device"] == len(os.sched_getaffinity(0)) // 2

    table = call(line).out
    assert json.loads((out / "bench.json").read_text())["configurations"] == study["configurations"]  # all was there
    assert all(words in table for words in ("speed-up", "sample=2", "± needs two rounds", "report: "))
    call(["report", str(out)])
    assert "another --out" in call(f"{line} --batch 16", status=2).err
