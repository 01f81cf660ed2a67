"""The best weights by an evaluation, the end where nothing becomes better, and one look at the test split."""

from pathlib import Path

import torch

from convoy.run.directory import RunDirectory
from convoy.training.restore import checkpoint_step
from convoy.training.state import delivered_weights
from ranks import run_ranks
from tiny import write_pictures
from training.scenarios import Settings, lines, refusals, store_of, summary, weights
from whole_runs import train_here

CHOSEN = {"epochs": "8ep", "best": "macro_f1", "stop_after": "1ep", "optimizer.lr": "0.6", "reproducible": "true"}
CHOSEN |= {"checkpoint.keep": "1", "schedule.name": "constant"}


def test_the_best_weights_are_delivered_and_the_test_split_is_looked_at_once(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = train_here(data, out, CHOSEN | {"log_every": "5ba"})
    state = summary(out)
    scores = lines(out, "step", "macro_f1", split="validation")
    best = max(scores, key=lambda row: row[1])
    assert (state["best_step"], state["best"]) == tuple(best)
    assert state["steps"] == scores[-1][0] == best[0] + scores[0][0] < state["total_steps"]
    assert [row[0] for row in lines(out, "step", split="test")] == [state["steps"]]
    assert lines(out, "step", split="train")[-1] == [state["steps"]] and state["steps"] % 5
    assert (state["split"], state["status"], state["num_train"]) == ("test", "finished", 86)
    assert state["metrics"]["top1"] == lines(out, "top1", split="test")[0][0] == ended.outcome.top1
    checkpoint = delivered_weights(store_of(out).load(best[0]))
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in weights(out).items())
    last = delivered_weights(store_of(out).load(state["steps"]))  # the control: they are not the last
    assert not all(torch.equal(tensor, last[name]) for name, tensor in weights(out).items())
    once = f"the test split was looked at once, at the end, with the weights of update {best[0]}, the best (macro F1"
    assert any(once in note for note in state["notes"])
    assert any(note.startswith(f"ends after {state['steps']} updates: nothing better") for note in state["notes"])
    # In a longer run its last weights stand for election, and no better ones of before.
    longer, end = tmp_path / "longer", state["steps"]
    train_here(data, longer, CHOSEN | {"epochs": "12ep", "optimizer.lr": "3", "extends": str(out)})
    rows, newest = lines(longer, "step", "macro_f1", split="validation"), summary(longer)["steps"]
    assert rows[: len(scores)] == scores and [row[0] for row in rows].count(end) == 1
    best = max((row for row in rows if row[0] >= end), key=lambda row: row[1])
    assert (summary(longer)["best_step"], summary(longer)["best"]) == tuple(best) and newest > best[0]
    checkpoint = delivered_weights(store_of(longer).load(best[0]))
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in weights(longer).items())
    (store_of(longer).place(newest) / "checkpoint.json").write_text("")  # the one before knows the best, too
    assert checkpoint_step(RunDirectory(longer), "best") == best[0]


def test_a_choice_goes_on_over_stops_on_other_devices(data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    want = train_here(data, whole, CHOSEN)
    best, end = summary(whole)["best_step"], summary(whole)["steps"]
    run_ranks(train_here, 2, data, parts, CHOSEN, False, best + 1)
    state = summary(parts)
    assert state["status"] == "stopped" and not RunDirectory(parts).weights.exists()
    train_here(data, parts, CHOSEN, True, end)  # in the last evaluation, which is done again
    assert summary(parts)["metrics"] == state["metrics"] and state["metrics"]["loss"] > 0
    have = run_ranks(train_here, 2, data, parts, CHOSEN, True)[0]
    assert store_of(parts).load(end).values["loop"]["progress"]["is_over"]
    assert have.digest == want.digest and lines(parts) == lines(whole)
    assert train_here(data, parts, CHOSEN, True).digest == want.digest  # it is finished


def test_where_the_best_weights_are_damaged_the_last_are_delivered(data: Path, tmp_path: Path) -> None:
    train_here(data, out := tmp_path / "run", CHOSEN)
    best, end = summary(out)["best_step"], summary(out)["steps"]
    (shard,) = store_of(out).place(best).rglob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    (out / "weights.safetensors").unlink()
    train_here(data, out, CHOSEN, resume=True)
    assert any(f"step-{best:08d}, the best, is missing or damaged" in note for note in summary(out)["notes"])
    last = delivered_weights(store_of(out).load(end))
    assert all(torch.equal(tensor, last[name]) for name, tensor in weights(out).items())


def test_a_metric_or_class_that_does_not_exist_is_refused_before_anything_is_written(
    data: Path, tmp_path: Path
) -> None:
    (few,) = refusals(write_pictures(tmp_path / "few"), tmp_path / "run", [{"best": "top5", "data.image_size": "28"}])
    assert few.endswith("of 3 classes has no top-5: best=top5 can be top1, macro_f1, loss"), few
    cases: list[Settings] = [{"best": "f2"}, {"loss.class_weights": "{kat: 2}"}, {"data.sampling": "{kat: 2}"}]
    unknown_metric, *unknown_classes = refusals(data, tmp_path / "run", cases)
    assert "classification has no metric 'f2': it has top1, top5, macro_f1, loss" in unknown_metric
    assert all("names the class kat, which the data does not have" in said for said in unknown_classes)
    assert not (tmp_path / "run").exists()
