"""Objects as JSON: what goes in comes out, and what would be called stays uncalled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.comm.ranks import from_json, to_json
from convoy.errors import ConvoyError, RankFailedError, TooLargeError
from convoy.plans.plan import Plan
from convoy.plans.timeline import Span, Task
from convoy.training.evaluate import EvaluationTally
from convoy.training.recipe import load_recipe


class OwnError(ConvoyError):
    """A user's."""


VALUES: list[Any] = [
    {"a": (1, 2.5, float("inf"), -0.0), 3: [None, True], (1, 2): {"ä"}, "dict": {}},
    [frozenset({1}), b"\0\xff", Path("/a b"), torch.Size([2, 3]), torch.bfloat16, ""],
    Plan.parse("sample=2,filter=2"),
    Span(Task(0, "compute", "forward", "conv1", "x", 0.25, (1,)), 0.1, 0.2, 0.45),
    load_recipe("imagenet-90", ["data.path=nowhere", "model.name=lenet"]),
]


def test_what_goes_in_comes_out() -> None:
    for value in VALUES:
        back = from_json(to_json(value))
        assert back == value and type(back) is type(value) and repr(back) == repr(value)
    tally = EvaluationTally(torch.arange(4).reshape(2, 2).t())
    assert torch.equal(from_json(to_json(tally)).confusion, tally.confusion)
    for tensor in (torch.empty(0, 2), torch.tensor(7.0, dtype=torch.bfloat16), torch.tensor([True])):
        back = from_json(to_json(tensor))
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype
    for error, kind, fields in [
        (ConvoyError("no"), ConvoyError, {}),
        (RankFailedError("no", True), RankFailedError, {"out_of_memory": True}),
        (TooLargeError("no", 8.0), TooLargeError, {"needed": 8.0}),
        (OwnError("no"), ConvoyError, {}),
    ]:
        back = from_json(to_json(error))
        assert type(back) is kind and str(back) == "no" and vars(back) == fields


CALLED = ["os:system", "builtins:eval", "subprocess:Popen"]
CALLED += ["convoy.launch.local:start", "convoy.launch.local:os"]  # a function, a module
CALLED += ["convoy.data.turbo:Turbo", "convoy.training.watchdog:Watchdog"]  # no data


def test_what_is_no_data_is_neither_made_nor_sent(tmp_path: Path) -> None:
    for name in CALLED:
        for args in ([], ["touch"]):
            parts = [name, [f"{one} {tmp_path}/here" for one in args], None]
            with pytest.raises(TypeError, match="is no class of data"):
                from_json(json.dumps({"object": parts}).encode())
            assert not list(tmp_path.iterdir())
    for value in (print, lambda: None, object(), {1: range(3)}, ValueError("no"), open):
        with pytest.raises(TypeError):
            to_json(value)
