"""`convoy plan`, for devices at hand and for others (`--on`), and `convoy profile`, as a person calls them."""

import json
from pathlib import Path

import pytest

from cli.calls import Call
from convoy.planner.cost.costs import Times
from convoy.planner.cost.local_op import LocalOp, Operand
from convoy.planner.store import Device, ProfileStore
from convoy.plans.plan import Plan

LINE = "plan lenet --devices 2 --batch 32 --microbatches 2 --link 10gbit"
ON = "plan lenet --on 4xv100-sxm2 --batch 256"


def test_text_json_yaml_page_and_trace_are_of_one_plan_which_keeps_to_what_is_fixed(tmp_path: Path, call: Call) -> None:
    out, page, trace = tmp_path / "plan.yaml", tmp_path / "plan.html", tmp_path / "step.json"
    line = f"{LINE} --fix features.*=sample"
    document = call(f"{line} --json --out {out} --html {page} --trace {trace}").document
    plan = Plan.parse(out)
    assert plan == Plan.parse({key: value for key, value in document["plan"].items() if key != "text"})
    assert plan.mesh.num_devices == 2 and plan.strategy("features.0", "conv") == ("sample",)
    assert f"# convoy {LINE} --fix 'features.*=sample'" in out.read_text()
    assert page.read_text().startswith("<!doctype html>")
    events = json.loads(trace.read_text())["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last / 1e6 == pytest.approx(document["update_s"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plan.html", "plan.yaml", "step.json"]
    text = call(f"{LINE.replace('--microbatches 2', '--microbatches 1')}").out
    first, *rest = text.splitlines()
    assert first.startswith("the batch is 1 microbatch, which stay whole") and "--microbatches 2 would" in first
    assert rest[0].startswith("lenet on 2 devices, 32 samples an update")
    for words in ("plan ", "speed-up", "memory", "what if", "next best", "classifier.4", "are assumed: 10gbit"):
        assert words in text


def test_machines_that_are_not_at_hand_have_a_price(tmp_path: Path, call: Call) -> None:
    page, plan = tmp_path / "page.html", tmp_path / "plan.yaml"
    text = call(f"{ON} --compare 2xrtx-4090 --price 2,0.3 --html {page} --out {plan}").out
    priced = "days and price, in the currency of --price, of "
    for words in ("predicted, not measured", "4xv100-sxm2", "2xrtx-4090", "90 % range", priced, "held back by"):
        assert words in text
    assert "<svg" in page.read_text() and "2xrtx-4090" in page.read_text() and "mesh" in plan.read_text()
    (document,) = call(f"{ON} --images 60000 --price 1 --json").document
    assert document["devices"] == 4 and document["range"][0] < document["images_per_s"] < document["range"][1]
    assert document["price"] == pytest.approx(24 * 4 * document["days"], rel=0.1, abs=0.01)
    assert document["speedup"] <= 4.05 and document["faster_than_data_parallel"] >= 1


def test_profile_lists_what_is_kept_and_forgets_it(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    call("plan lenet --batch 8 --no-store")
    assert not any(tmp_path.iterdir())
    assert "nothing is kept" in call("profile").out and call("profile --json").document == []
    store, device = ProfileStore(), Device("Some CPU", "2.13", "0.1", 1)
    operands = [(Operand((size,), "float32"),) for size in (3, 5)]
    small, large = (LocalOp("copy", "", operand, operand) for operand in operands)
    store.put(device, {small: Times(1e-3, 0.0), large: Times(2e-3, 0.0)})
    store.put(device, {small: Times(3e-3, 0.0)}, "run")
    assert "convoy profile lists" in call("profile nowhere", status=2).err
    (row,) = call("profile --json").document
    assert (row["pieces"], row["from_runs"]) == (2, 1)
    text = call("profile").out
    assert "from runs" in text and "just now" in text
    pieces = call("profile 1 --json").document
    assert [(piece["source"], piece["forward_s"]) for piece in pieces] == [("run", 3e-3), ("profiling", 2e-3)]
    assert pieces == call(f"profile {row['key']} --json").document and "run " in call("profile 1").out
    assert "forgot 1 device" in call("profile --clear 1").out and "forgot 0 devices" in call("profile --clear").out
