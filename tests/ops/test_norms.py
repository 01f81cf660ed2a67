"""Norms and dropout over a mesh, in float64 on real processes, against the whole call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.ops import kernel, norms
from convoy.ops.context import StepContext
from convoy.ops.random_bits import drop, layer_key
from convoy.plans.layout import Layout, Split, consecutive
from one_call import OneCall, worst
from ops.many_calls import Draw, run_calls

Row = tuple[tuple[int, ...], Layout]
PLAIN: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], Tensor]] = {
    "group_norm": lambda t, a: F.group_norm(t["x"], a["num_groups"], t.get("weight"), t.get("bias"), a["eps"]),
    "layer_norm": lambda t, a: F.layer_norm(t["x"], a["normalized_shape"], t.get("weight"), t.get("bias"), a["eps"]),
    "rms_norm": lambda t, a: F.rms_norm(t["x"], a["normalized_shape"], t.get("weight"), a["eps"]),
}


def call(op: str, row: Row, x: Tensor, parameters: dict[str, tuple[int, ...]], **attributes: Any) -> OneCall:
    sizes, given = row
    tensors = {"x": x, **{name: torch.rand(shape).double() for name, shape in parameters.items()}}
    attributes = {"input": "x", "weight": None, "bias": None} | attributes | {name: name for name in parameters}
    gradient = torch.randn(x.shape, dtype=torch.float64)
    return OneCall(op, getattr(F, op), tensors, attributes, sizes, given, gradient)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) * 3 + 50


def group_norm(draw: Draw, row: Row | None = None, groups: int = 0) -> OneCall:
    memory_format = torch.channels_last if draw.random() < 0.4 else torch.contiguous_format
    x, parameters = numbers(4, 6, 5, 4).to(memory_format=memory_format), {"weight": (6,), "bias": (6,)}
    options = {"num_groups": groups or draw.choice([1, 2, 3, 6]), "eps": 1e-5}
    return call("group_norm", row or draw.row(x.shape), x, parameters if draw.random() < 0.7 else {}, **options)


def of_last(op: str, draw: Draw, row: Row | None = None, dims: int = 0) -> OneCall:
    shape, dims = (4, 5, 5, 6), dims or draw.randint(1, 4)
    parameters = dict.fromkeys(("weight", "bias")[: 1 if op == "rms_norm" else 2], shape[-dims:])
    eps = draw.choice([1e-2, None]) if op == "rms_norm" else 1e-6
    parameters = parameters if draw.random() < 0.7 else {}
    return call(op, row or draw.row(shape), numbers(*shape), parameters, normalized_shape=shape[-dims:], eps=eps)


DRAWN: dict[str, Callable[[Draw], OneCall]] = {
    "group_norm": group_norm,
    "layer_norm": lambda draw: of_last("layer_norm", draw),
    "rms_norm": lambda draw: of_last("rms_norm", draw),
}


def error(case: OneCall, got: dict[str, Tensor]) -> float:
    """Of the result and of every gradient, relative to those of the whole call."""
    tensors = {name: t.clone().requires_grad_() for name, t in case.tensors.items()}
    y = PLAIN[case.op](tensors, case.attributes)
    y.backward(case.gradient)
    grads: Any = {f"{name}.grad": t.grad for name, t in tensors.items()}
    return worst(got, {"y": y.detach(), **grads})[1]


@pytest.mark.parametrize("op", DRAWN)
def test_ranks_together_do_what_the_whole_call_does(op: str) -> None:
    torch.manual_seed(1)
    cases = [DRAWN[op](Draw(f"{op} {number}")) for number in range(24)]
    for number, (case, got) in enumerate(zip(cases, run_calls(cases), strict=True)):
        assert error(case, got) < 1e-11, f"{number}: {case.sizes} {case.given} {case.attributes}"


def test_statistics_of_one_rank_are_noticed() -> None:
    torch.manual_seed(1)
    columns: list[Row] = [((2,), Layout.of({3: Split((0,), consecutive(sizes))})) for sizes in ((3, 1), (2, 4))]
    cases = []
    for module, collective in ((kernel, "all_gather"), (norms, "all_reduce")):
        for case in (group_norm(Draw(0), columns[0], 1), of_last("rms_norm", Draw(0), columns[1], 1)):
            case.sabotage = module.__name__, collective
            cases.append(case)
    for case, got in zip(cases, run_calls(cases), strict=True):
        assert error(case, got) > 1e-3, f"{case.op} {case.sabotage}"


def dropout(row: Row, channels: bool) -> OneCall:
    x, (sizes, given) = torch.randn(5, 6, 4, 3, dtype=torch.float64), row
    attributes = {"input": "x", "p": 0.4, "channels": channels}
    function = F.dropout2d if channels else F.dropout
    return OneCall("dropout", function, {"x": x}, attributes, sizes, given, torch.randn_like(x))


def test_what_is_dropped_is_that_of_one_device() -> None:
    torch.manual_seed(1)

    def alone(case: OneCall, name: str = "y") -> dict[str, Tensor]:
        context = StepContext(seed=3)
        context.need_keys()
        context.enter(7, 0, (len(case.gradient),), torch.device("cpu"))
        x = case.tensors["x"].clone().requires_grad_()
        y = drop(x, context.keys, layer_key(name), case.attributes["p"], case.attributes["channels"])
        y.backward(case.gradient)
        return {"y": y.detach(), "x.grad": x.grad}  # type: ignore[dict-item]

    cases = [dropout(Draw(f"dropout {number}").row((5, 6, 4, 3)), bool(number % 2)) for number in range(16)]
    for case, got in zip(cases, run_calls(cases), strict=True):
        want = alone(case)
        assert all(torch.equal(got[name], want[name]) for name in want), f"{case.given} {case.attributes}"
        assert not torch.equal(got["y"], alone(case, "z")["y"])  # the control: another layer, another mask
    folded = dropout(((2,), Layout.of({0: Split((0,), consecutive((3, 2)))})), False)
    folded.gradient = folded.tensors["x"] = folded.tensors["x"].view(10, 3, 4, 3)
    with pytest.raises(ConvoyError, match=r"layer 'layer' drops elements of 10 samples of a batch of 5.*remove"):
        folded.placed()
