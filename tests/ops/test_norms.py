"""Group norm, layer norm and local response normalization over a mesh, in float64 on real processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.ops import rms_norm, shared_statistics
from convoy.plans.layout import WHOLE, Layout, Split, balanced, consecutive, indices
from one_call import OneCall, run_call, worst

ROWS = {2: Split((0,), consecutive((1, 3, 1)))}


def split(dim: int, *parts: tuple[int, ...], axes: tuple[int, ...] = (0,)) -> dict[int, Split]:
    return {dim: Split(axes, tuple(map(indices, parts)))}


def plain(case: OneCall, call: Callable[[dict[str, Tensor]], Tensor]) -> dict[str, Tensor]:
    """The same call on the whole."""
    tensors = {name: t.clone().requires_grad_() for name, t in case.tensors.items()}
    y = call(tensors)
    y.backward(case.gradient)
    return {"y": y.detach(), **{f"{name}.grad": t.grad for name, t in tensors.items()}}  # type: ignore[misc]


def group_case(given: Layout, sizes: tuple[int, ...], groups: int = 3, affine: bool = True, **kw: Any) -> OneCall:
    torch.manual_seed(1)
    x = torch.randn(4, 6, 5, 4, dtype=torch.float64) * 3 + 50
    x = x.to(memory_format=kw.pop("memory_format", torch.contiguous_format))
    tensors = {"x": x}
    if affine:
        tensors |= {"weight": torch.rand(6).double(), "bias": torch.randn(6).double()}
    attributes = {"input": "x", "num_groups": groups, "eps": 1e-5, "weight": None, "bias": None}
    attributes |= {name: name for name in tensors if name != "x"}
    return OneCall("group_norm", F.group_norm, tensors, attributes, sizes, given, torch.randn_like(x), **kw)


def check_group(case: OneCall) -> float:
    groups = case.attributes["num_groups"]
    want = plain(case, lambda t: F.group_norm(t["x"], groups, t.get("weight"), t.get("bias"), 1e-5))
    return worst(run_call(case), want)[1]


@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ((2,), Layout.of(split(0, (0, 1, 2), (3,)))),
        ((3,), Layout.of(split(0, (0, 1, 2), (), (3,)))),
        ((2,), Layout.of(split(1, (0, 1, 2, 3), (4, 5)))),
        ((2,), Layout.of(split(1, (4, 5, 0, 1), (2, 3)))),
        ((2,), Layout.of(split(1, (), range(6)))),  # type: ignore[arg-type]
        ((2,), Layout.of(split(1, (0, 3, 5), (2, 1, 4)))),
        ((3,), Layout.of(split(1, (0,), (), (2, 1, 3, 4, 5)))),
        ((3,), Layout.of(ROWS)),
        ((2, 2), Layout.of({**split(1, (0, 1, 2, 3), (4, 5)), **split(2, (0, 1), (2, 3, 4), axes=(1,))})),
        ((2, 2), Layout.of({**split(1, (0, 2, 3), (1, 4, 5)), **split(2, (0, 1), (2, 3, 4), axes=(1,))})),
        ((2, 2), Layout.of({**split(0, (0, 1, 2, 3), ()), **split(1, (0,), (1, 2, 3, 4, 5), axes=(1,))})),
        ((2,), WHOLE),
    ],
)
def test_group_norm(sizes: tuple[int, ...], given: Layout) -> None:
    assert check_group(group_case(given, sizes)) < 1e-11


@pytest.mark.parametrize("options", [{"groups": 1}, {"groups": 6}, {"affine": False}])
def test_group_norm_variants(options: dict[str, Any]) -> None:
    given = Layout.of(split(1, (0, 3, 5), (2, 1, 4)))
    assert check_group(group_case(given, (2,), **options)) < 1e-11
    assert check_group(group_case(given, (2,), memory_format=torch.channels_last, **options)) < 1e-11


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_statistics_of_one_rank_are_noticed(collective: str) -> None:
    given, name = Layout.of(split(1, (0, 3, 5), (2, 1, 4))), shared_statistics.__name__
    case = group_case(given, (2,), groups=1, sabotage=(name, collective))
    assert check_group(case) > 1e-3
    case = layer_case((3, 4, 6), 1, Layout.of(split(2, (0, 1), (2, 3, 4, 5))), (2,), sabotage=(name, collective))
    assert check_layer(case) > 1e-3


def layer_case(
    shape: tuple[int, ...], dims: int, given: Layout, sizes: tuple[int, ...], affine: bool = True, **kw: Any
) -> OneCall:
    torch.manual_seed(2)
    x = torch.randn(shape, dtype=torch.float64) * 2 + 30
    tensors = {"x": x}
    if affine:
        tensors |= {"weight": torch.rand(shape[-dims:]).double(), "bias": torch.randn(shape[-dims:]).double()}
    attributes = {"input": "x", "normalized_shape": shape[-dims:], "eps": 1e-6, "weight": None, "bias": None}
    attributes |= {name: name for name in tensors if name != "x"}
    return OneCall("layer_norm", F.layer_norm, tensors, attributes, sizes, given, torch.randn_like(x), **kw)


def check_layer(case: OneCall) -> float:
    shape = case.attributes["normalized_shape"]
    want = plain(case, lambda t: F.layer_norm(t["x"], shape, t.get("weight"), t.get("bias"), 1e-6))
    return worst(run_call(case), want)[1]


@pytest.mark.parametrize(
    ("dims", "sizes", "given"),
    [
        (1, (2,), Layout.of(split(3, (0, 2, 5), (4, 3, 1)))),  # channels after a permutation
        (1, (3,), Layout.of(split(3, (0, 2, 5), (), (4, 3, 1)))),
        (1, (2,), Layout.of(split(0, (0, 1, 2), (3,)))),
        (1, (3,), Layout.of(split(0, (0, 1, 2), (), (3,)))),
        (1, (3,), Layout.of(ROWS)),
        (1, (2, 2), Layout.of({**split(0, (0, 1, 2, 3), ()), **split(3, (0, 2, 5), (4, 3, 1), axes=(1,))})),
        (3, (2, 2), Layout.of({**split(1, (0,), (1, 2, 3, 4)), **split(3, (0, 2, 5), (4, 3, 1), axes=(1,))})),
        (3, (3,), Layout.of(ROWS)),
        (2, (3,), Layout.of(ROWS)),
        (4, (2,), Layout.of(split(0, (0, 1, 2), (3,)))),
        (1, (2,), WHOLE),
    ],
)
def test_layer_norm(dims: int, sizes: tuple[int, ...], given: Layout) -> None:
    assert check_layer(layer_case((4, 5, 5, 6), dims, given, sizes)) < 1e-11


def test_layer_norm_without_scale() -> None:
    given = Layout.of(split(3, (0, 2, 5), (4, 3, 1)))
    assert check_layer(layer_case((4, 5, 5, 6), 1, given, (2,), affine=False)) < 1e-11


def rms_case(
    shape: tuple[int, ...], dims: int, given: Layout, sizes: tuple[int, ...], eps: float | None = 1e-6, **kw: Any
) -> OneCall:
    torch.manual_seed(5)
    x = torch.randn(shape, dtype=torch.float64) * 2 + 3
    tensors = {"x": x, "weight": torch.rand(shape[-dims:]).double()}
    attributes = {"input": "x", "normalized_shape": shape[-dims:], "weight": "weight", "eps": eps}
    return OneCall("rms_norm", F.rms_norm, tensors, attributes, sizes, given, torch.randn_like(x), **kw)


def check_rms(case: OneCall) -> float:
    shape, eps = case.attributes["normalized_shape"], case.attributes["eps"]
    return worst(run_call(case), plain(case, lambda t: F.rms_norm(t["x"], shape, t["weight"], eps)))[1]


@pytest.mark.parametrize(
    ("dims", "sizes", "given"),
    [
        (1, (2,), Layout.of(split(3, (0, 2, 5), (4, 3, 1)))),
        (1, (3,), Layout.of(split(3, (0, 2, 5), (), (4, 3, 1)))),
        (1, (3,), Layout.of(split(0, (0, 1, 2), (), (3,)))),
        (1, (2, 2), Layout.of({**split(0, (0, 1, 2, 3), ()), **split(3, (0, 2, 5), (4, 3, 1), axes=(1,))})),
        (3, (2, 2), Layout.of({**split(1, (0,), (1, 2, 3, 4)), **split(3, (0, 2, 5), (4, 3, 1), axes=(1,))})),
        (2, (3,), Layout.of(ROWS)),
        (3, (3,), Layout.of(ROWS)),
        (1, (2,), WHOLE),
    ],
)
@pytest.mark.parametrize("eps", [1e-2, None])
def test_rms_norm(dims: int, sizes: tuple[int, ...], given: Layout, eps: float | None) -> None:
    assert check_rms(rms_case((4, 5, 5, 6), dims, given, sizes, eps)) < 1e-11


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_rms_norm_of_one_ranks_numbers_is_noticed(collective: str) -> None:
    given = Layout.of(split(2, (0, 1), (2, 3, 4, 5)))
    assert check_rms(rms_case((3, 4, 6), 1, given, (2,), sabotage=(rms_norm.__name__, collective))) > 1e-3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ((2,), Layout.of({1: Split((0,), balanced(7, 2))})),
        ((3,), Layout.of({1: Split((0,), consecutive((6, 0, 1)))})),
        ((2, 2), Layout.of({0: Split((0,), consecutive((3, 0))), 1: Split((1,), balanced(7, 2))})),
        ((2,), Layout.of({2: Split((0,), balanced(4, 2))})),
        ((2,), WHOLE),
    ],
)
def test_lrn(size: int, sizes: tuple[int, ...], given: Layout) -> None:
    case = lrn_case(size, sizes, given)
    assert case.placed().outputs["y"] == given
    assert worst(run_call(case), plain(case, lambda t: F.local_response_norm(t["x"], size, 0.3, 0.7, 2.0)))[1] < 1e-12


def test_lrn_of_scattered_channels_asks_for_all_of_them() -> None:
    samples = split(0, (0, 1), (2,), axes=(1,))
    case = lrn_case(5, (2, 2), Layout.of({**split(1, (0, 2, 4, 6), (1, 3, 5)), **samples}))
    assert case.placed().inputs["x"] == case.placed().outputs["y"] == Layout.of(samples)
    assert worst(run_call(case), plain(case, lambda t: F.local_response_norm(t["x"], 5, 0.3, 0.7, 2.0)))[1] < 1e-12


def lrn_case(size: int, sizes: tuple[int, ...], given: Layout) -> OneCall:
    torch.manual_seed(3)
    x = torch.randn(3, 7, 4, 4, dtype=torch.float64)
    attributes = {"input": "x", "size": size, "alpha": 0.3, "beta": 0.7, "k": 2.0}
    return OneCall("lrn", F.local_response_norm, {"x": x}, attributes, sizes, given, torch.randn_like(x))


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
@pytest.mark.parametrize(
    ("dim", "sizes", "given"),
    [
        (1, (2,), Layout.of(split(1, (0, 3, 5), (2, 1, 4)))),
        (1, (3,), Layout.of(split(1, (0, 3, 5), (), (2, 1, 4)))),
        (-1, (2, 2), Layout.of({**split(0, (0, 1, 2), ()), **split(1, (0, 3, 5), (2, 1, 4), axes=(1,))})),
        (1, (2,), Layout.of(split(0, (0,), (1, 2)))),
        (0, (2,), Layout.of(split(0, (0,), (1, 2)))),
    ],
)
def test_softmax(function: Callable[..., Tensor], dim: int, sizes: tuple[int, ...], given: Layout) -> None:
    torch.manual_seed(4)
    x = torch.randn(3, 6, dtype=torch.float64) * 30
    attributes = {"input": "x", "dim": dim % x.dim(), "function": function.__name__}
    case = OneCall("softmax", function, {"x": x}, attributes, sizes, given, torch.randn_like(x), kwargs={"dim": dim})
    assert worst(run_call(case), plain(case, lambda t: function(t["x"], dim=dim)))[1] < 1e-12
