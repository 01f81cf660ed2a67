"""Runs that fail: the summary says why, nothing that is not finite is kept, and they go on from there."""

import errno
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.errors import ConvoyError, MachineError, TooLargeError
from convoy.training.step import TrainingStep
from ranks import run_ranks
from training.scenarios import lines, refusals, store_of, summary
from whole_runs import Ended, as_before, train_here

EIGHT = {"epochs": "8ba", "checkpoint.every": "2ba", "reproducible": "true"}
running = sys.modules["convoy.training.trainer"]


def stands(out: Path) -> tuple[Any, Any, Any]:
    found = summary(out)
    return found["status"], found["error"], found["steps"]


ERRORS = [
    (
        OSError(errno.ENOSPC, "No space left on device"),
        "cannot write to .*No space left on device.*go on with --resume",
    ),
    # where the error lies, but for a user's mistake
    (RuntimeError("first line\nsecond line"), r"RuntimeError: first line \(whole_runs\.py, line \d+, in failing\)"),
    (ConvoyError("7.png cannot be read: mend it"), r"7\.png cannot be read: mend it"),
]


def test_an_error_is_in_the_summary_as_it_is_printed_and_the_run_goes_on(data: Path, tmp_path: Path) -> None:
    whole = train_here(data, tmp_path / "whole", EIGHT)
    for number, (error, words) in enumerate(ERRORS):
        out = tmp_path / str(number)
        with pytest.raises((type(error), ConvoyError)) as caught:
            train_here(data, out, EIGHT, fails=error)
        assert caught.value is error or isinstance(error, OSError)
        status, sentence, step = stands(out)
        assert (status, step) == ("failed", 5) and re.fullmatch(words, sentence)
        assert sentence == str(caught.value) or not isinstance(caught.value, ConvoyError)
    # The checkpoint after 4 updates may still have been on its way.
    ended = train_here(data, out, EIGHT, resume=True)
    assert {f"going on after {done} of 8 updates" for done in (2, 4)} & set(ended.said)
    assert stands(out) == ("finished", None, 8) and ended.digest == whole.digest


# Numbers that are not finite

SKIP = {"model.name": "failing:Unfinite", "reproducible": "true", "epochs": "16ba", "on_nan": "skip"}
"""Updates 7 and 15 are not finite."""


def without_putting_back(data: Path, out: Path) -> Ended:
    """The running statistics keep what a bad update has put in."""
    with as_before() as patch:
        patch.setattr(TrainingStep, "_undoing", lambda self: lambda: None)
        return train_here(data, out, SKIP)


def test_what_is_not_finite_is_left_out_alike_on_several_devices(data: Path, tmp_path: Path) -> None:
    (serial,) = run_ranks(train_here, 1, data, tmp_path / "serial", SKIP)
    told = [sentence for sentence in serial.said if "left out" in sentence and "(" not in sentence]
    assert told[0] == "the loss is nan in update 7, first in the output of layer odd: left out, with 1 so far"
    assert told[1].startswith("the loss is nan in update 15, ")
    rows = lines(tmp_path / "serial", "step", "loss", "left_out", split="train")
    assert {step for step, loss, _ in rows if loss is None} == {step for step, _, number in rows if number} == {7, 15}
    assert summary(tmp_path / "serial")["left_out"] == 2
    for ended in run_ranks(train_here, 3, data, tmp_path / "run", SKIP):
        assert (ended.digest, ended.curve) == (serial.digest, serial.curve)
    # Buffers that kept a bad update would be noticed.
    assert run_ranks(without_putting_back, 1, data, tmp_path / "kept")[0].digest != serial.digest
    # Averages and merged microbatches leave it out too.
    merged = SKIP | {"ema.decay": "0.9", "reproducible": "false"}
    run_ranks(train_here, 2, data, tmp_path / "merged", merged)
    one, two = ([x for (x,) in lines(tmp_path / run, "loss", split="train") if x] for run in ("serial", "merged"))
    assert two == pytest.approx(one, rel=1e-4) and len(one) == 14


@pytest.mark.parametrize(("num", "plan"), [(1, "serial"), (2, "filter=2")])
def test_the_end_says_where_it_began(data: Path, tmp_path: Path, num: int, plan: str) -> None:
    settings = SKIP | {"on_nan": "stop", "checkpoint.every": "2ba", "log_every": "4ba", "parallel.plan": plan}
    for (said,) in run_ranks(refusals, num, data, tmp_path / "run", [settings]):
        assert said.startswith("the loss is nan in update 7, first in the output of layer odd")
        assert (" on rank 0 on host " in said) == (num > 1)
        assert said.endswith("(the newest checkpoint is of update 6)") and "(--set on_nan=skip)" in said
    assert stands(tmp_path / "run")[:2] == ("failed", said)


def test_where_it_began_is_looked_for_with_the_same_layers_frozen(data: Path, tmp_path: Path) -> None:
    settings = {"model.name": "tiny:TinyResidual", "optimizer.freeze": "[conv, 'block:20ba']", "optimizer.lr": "1e200"}
    (said,) = refusals(data, tmp_path / "run", [settings | {"schedule.name": "constant", "schedule.warmup": "0ba"}])
    assert said.startswith("the loss is nan in update 3, first in the output of layer head: ")


def test_no_checkpoint_holds_what_is_not_finite(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diverging = {"optimizer.lr": "1e30", "schedule.warmup": "0ba", "checkpoint.every": "1ba", "log_every": "100ba"}
    with pytest.raises(ConvoyError, match=r"the loss is nan in update 2, first in .* lower optimizer.lr"):
        train_here(data, out := tmp_path / "diverging", diverging | {"epochs": "4ba"})
    for step in store_of(out).steps():
        tensors = store_of(out).load(step).tensors
        assert step == 1 or all(tensor.isfinite().all() for tensor in tensors.values())
    call = TrainingStep.__call__

    def spoil(self: TrainingStep, batch: Any, update: int) -> Any:
        result = call(self, batch, update)
        if update == 3:  # the loss was fine, and the next one comes after the checkpoint
            next(iter(self.network.model.parameters())).data.view(-1)[0] = float("inf")
        return result

    monkeypatch.setattr(running, "trace_back", lambda session, store, name, error, s: str(error))
    with pytest.raises(ConvoyError, match="the loss became nan by update 2"):  # before the weights are looked at
        train_here(data, tmp_path / "untraced", diverging | {"epochs": "4ba"})
    monkeypatch.setattr(TrainingStep, "__call__", spoil)
    with pytest.raises(ConvoyError, match=r"weights became infinite .* by update 4: .*update 2"):
        train_here(data, tmp_path / "run", {"checkpoint.every": "2ba", "epochs": "8ba"})
    assert store_of(tmp_path / "run").steps() == [2]


def test_a_run_whose_every_update_is_left_out_ends(data: Path, tmp_path: Path) -> None:
    settings = SKIP | {"model.name": "tiny:TinyNet", "optimizer.lr": "1e30", "epochs": "30ba"}
    assert "the 20th in a row to be left out: lower optimizer.lr" in refusals(data, tmp_path / "run", [settings])[0]


# Memory and disk

LACKS = "CUDA out of memory. Tried to allocate 98.00 MiB. GPU 0 has a total capacity of 7.91 GiB of which 3.50 MiB is "
LACKS += "free."
NEEDED = (
    "it asked for 98.00 MiB where 3.50 MiB of 7.91 GiB were free; smaller microbatches, a plan over more devices or"
)


@pytest.mark.parametrize(
    ("allowed", "least", "where", "kind"),
    [
        (0, 1, "update 1, forward pass of layer head", TooLargeError),  # of a network that is not captured
        (5, 20, "update 3, forward pass of layer aux", MachineError),  # it may go well again
    ],
)
def test_memory_lacks(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int, least: int, where: str, kind: type
) -> None:
    """Linear layers lack it in training, from a number of passes on, of so many samples or more."""
    passes = 0

    def linear(x: Tensor, *weights: Tensor) -> Tensor:
        nonlocal passes
        passes += torch.is_grad_enabled() and len(x) >= least
        if torch.is_grad_enabled() and len(x) >= least and passes > allowed:
            raise torch.OutOfMemoryError(LACKS)
        return F.linear(x, *weights)

    settings = {"epochs": "4ba"}
    if least == 1:
        settings["model.name"] = "tiny:TinyUnseen"
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: linear(x, self.weight, self.bias))
    else:
        monkeypatch.setattr("convoy.ops.convolution.F", SimpleNamespace(**{**vars(F), "linear": linear}))
    with pytest.raises(ConvoyError) as caught:
        train_here(data, tmp_path / "run", settings)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"the device ran out of memory ({where}): {NEEDED}")
    if least > 1:
        assert "ran out of memory" in (tmp_path / "run" / "summary.json").read_text()


# Signals during an evaluation
