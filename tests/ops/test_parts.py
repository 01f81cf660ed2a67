"""Operations on parts of a tensor against the whole call, forwards and backwards in float64, for every rank in turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.ops import OPERATIONS, slices
from convoy.ops.kernel import as_called
from convoy.plans.layout import WHOLE, Layout, Split, balanced
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placed
from convoy.plans.windows import Need, Window
from emulated import check
from ops.many_calls import GRID, THREE, TWO, Draw

REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "amax": torch.amax}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def pool(kind: str, x: Tensor, mesh: Mesh, given: Layout, kernel: Any = 2, **options: Any) -> Placed:
    """A pooling by torch's options, checked."""
    num, kept = x.dim() - 2, {"ceil_mode": False, "count_include_pad": True, "divisor_override": None}

    def each(value: Any) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) * num

    sizes = {"stride": kernel, "padding": 0, "dilation": 1} | options
    attributes = {name: each(sizes[name]) for name in ("stride", "padding", "dilation")} | {"kernel": each(kernel)}
    attributes |= {name: options.get(name, default) for name, default in kept.items()}
    options = {"kernel_size": kernel, **options}
    return check(kind, getattr(F, f"{kind}{num}d"), (x,), (), options, attributes, mesh, {"x": given})


def adaptive(kind: str, x: Tensor, size: tuple[int, ...], mesh: Mesh, given: Layout) -> Placed:
    return check(kind, getattr(F, f"{kind}{len(size)}d"), (x,), (size,), {}, {"output_size": size}, mesh, {"x": given})


def resize(x: Tensor, mesh: Mesh, given: Layout, mode: str, corners: bool | None = None, **target: Any) -> Placed:
    options = {"mode": mode, "align_corners": corners, **target}
    size, factor = tuple(F.interpolate(x, **options).shape[2:]), target.get("scale_factor")
    scale = factor if factor is None or isinstance(factor, tuple) else (factor,) * len(size)
    attributes = {"output_size": size, "mode": mode, "align_corners": corners, "scale": scale}
    return check("interpolate", F.interpolate, (x,), (), options, attributes, mesh, {"x": given})


def select(x: Tensor, ranges: Sequence[Any], mesh: Mesh, given: Layout) -> Placed:
    key = tuple(one if isinstance(one, int) else slice(*one) for one in ranges)
    return check("select", lambda x: x[key], (x,), (), {}, {"ranges": tuple(ranges)}, mesh, {"x": given})


def chunks(x: Tensor, sizes: Sequence[int], dim: int, mesh: Mesh, given: Layout) -> Placed:
    options = {"split_size_or_sections": list(sizes), "dim": dim}
    return check(
        "split", torch.split, (x,), (), options, {"sizes": tuple(sizes), "dim": dim % x.dim()}, mesh, {"x": given}
    )


def pad(x: Tensor, flat: Sequence[int], mesh: Mesh, given: Layout, mode: str = "constant", value: Any = None) -> Placed:
    pairs = [tuple(flat[place : place + 2]) for place in range(0, len(flat), 2)]
    pads = tuple(reversed(pairs + [(0, 0)] * (x.dim() - len(pairs))))
    options = {"mode": mode, "value": value}
    return check("pad", F.pad, (x,), (tuple(flat),), options, {"pads": pads, **options}, mesh, {"x": given})


def reduce(function: str, x: Tensor, dims: tuple[int, ...], keepdim: bool, mesh: Mesh, given: Layout) -> Placed:
    attributes = {"function": function, "dims": tuple(sorted(dim % x.dim() for dim in dims)), "keepdim": keepdim}
    options: dict[str, Any] = {"dim": dims, "keepdim": keepdim}
    return check("reduce", REDUCTIONS[function], (x,), (), options, attributes, mesh, {"x": given})


def divided(draw: Draw, *shape: int) -> tuple[Tensor, Mesh, Layout]:
    mesh = draw.choice([TWO, THREE, GRID])
    x = tensor(*shape)
    x = x.to(memory_format=torch.channels_last) if len(shape) == 4 and draw.random() < 0.3 else x
    return x, mesh, draw.layout(shape, mesh)


def draw_pool(draw: Draw, kind: str) -> None:
    num = draw.choice([1, 2, 2, 3])
    x, mesh, given = divided(draw, 2, 3, *(draw.randint(5, 12 if num < 3 else 6) for _ in range(num)))
    kernel, stride, ceil = draw.randint(1, 5), draw.randint(1, 3), draw.random() < 0.5
    options: dict[str, Any] = {"stride": stride, "padding": draw.randint(0, kernel // 2), "ceil_mode": ceil}
    if kind == "max_pool":
        options["dilation"] = 2 if 2 * kernel - 1 <= 5 and draw.random() < 0.4 else 1
    else:
        options["count_include_pad"] = draw.random() < 0.5
        options["padding"] *= num < 3  # torch pads no volumes that are smaller than the kernel
        options["divisor_override"] = draw.choice([None, None, 4]) if num > 1 else None
        options = {name: value for name, value in options.items() if value is not None}
    placed = pool(kind, x, mesh, given, kernel, **options)
    is_whole = any(placed.outputs["y"].split(dim) is None for dim, _ in given.splits if dim > 1)
    assert bool(placed.note) == is_whole


def draw_adaptive(draw: Draw, kind: str) -> None:
    num = draw.choice([1, 2, 2, 3])
    x, mesh, given = divided(draw, 2, 3, *(draw.choice([4, 6, 8] if num < 3 else [4, 6]) for _ in range(num)))
    size = tuple(draw.choice([1, draw.randint(1, 6), length // 2]) for length in x.shape[2:])
    adaptive(kind, x, draw.choice([size, (1,) * num]), mesh, given)


MODES = [
    ("nearest", None),
    ("nearest-exact", None),
    ("bilinear", False),
    ("bilinear", True),
    ("bicubic", False),
    ("bicubic", True),
    ("area", None),
]


def draw_resize(draw: Draw, number: int) -> None:
    (mode, corners), num = MODES[number % len(MODES)], 2
    if mode in ("nearest", "bilinear"):
        num = draw.choice([1, 2, 2, 3])
        mode = {1: "linear", 2: mode, 3: "trilinear"}[num] if mode == "bilinear" else mode
    x, mesh, given = divided(draw, 2, 3, *(draw.randint(3, 8) for _ in range(num)))
    size = {"size": tuple(draw.choice([1, 2, 3, 5, 6, 8, 16][: 7 if num < 3 else 5]) for _ in range(num))}
    odd = tuple(draw.choice([2.0, 1.3, 2.1]) for _ in range(num))
    factor = {"scale_factor": draw.choice([2.0, 3.0, 1.5, 0.5, odd])}
    if mode == "nearest" and num != 2:  # torch's gradient is not that of its pass there, but for whole factors
        factor = {"scale_factor": draw.choice([2.0, 3.0])}
    resize(x, mesh, given, mode, corners, **draw.choice([size, factor]))


def draw_select(draw: Draw, number: int) -> None:
    x, mesh, given = divided(draw, 4, 3, 8, 5)
    ranges: list[Any] = []
    for dim, size in enumerate(x.shape):
        start = draw.randint(0, size - 1)
        ranges.append((start, draw.randint(start + 1, size), draw.randint(1, 3)))
        if draw.random() < 0.1 * dim:
            ranges[-1] = start
    placed = select(x, ranges, mesh, given)
    kept = Layout.of({dim: split for dim, split in given.splits if not isinstance(ranges[dim], int)})
    assert placed.inputs["x"] == kept and bool(placed.note) == (kept != given), "more is sent than one place needs"


def draw_chunks(draw: Draw, number: int) -> None:
    x, mesh, given = divided(draw, 4, 8, 6)
    dim = draw.randint(0, 2)
    cuts = sorted(draw.randint(0, x.shape[dim]) for _ in range(draw.randint(1, 4)))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, x.shape[dim]], strict=True)]
    assert chunks(x, sizes, draw.choice([dim, dim - 3]), mesh, given).inputs["x"] == given, "something is sent"


def draw_pad(draw: Draw, number: int) -> None:
    x, mesh, given = divided(draw, 2, 4, 7, 6)
    if draw.random() < 0.2:
        flat = tuple(draw.randint(0, 3) for _ in range(4))
        placed = pad(x, flat, mesh, given, draw.choice(["reflect", "replicate", "circular"]))
        padded = {3 - place // 2 for place, size in enumerate(flat) if size}
        assert not any(placed.inputs["x"].split(dim) for dim in padded)
    else:
        flat = tuple(draw.randint(-2, 3) for _ in range(draw.choice([2, 4, 4]))) + (0, 0, 0, 0)[: draw.choice([0, 2])]
        assert pad(x, flat, mesh, given, value=draw.choice([None, 2.5])).inputs["x"] == given, "something is sent"


def draw_reduce(draw: Draw, number: int) -> None:
    x, mesh, given = divided(draw, 4, 3, 5, 6)
    dims = tuple(draw.sample(range(4), draw.randint(1, 4)))
    function = ("mean", "sum", "amax")[number % 3]
    placed = reduce(function, x, tuple(draw.choice([dim, dim - 4]) for dim in dims), draw.random() < 0.5, mesh, given)
    reduced = [split for dim, split in given.splits if dim in dims]
    if function == "amax":
        assert bool(placed.note) == bool(reduced)
    else:
        assert placed.inputs["x"] == given, "something is sent"
        assert placed.outputs["y"].partial == {axis for split in reduced for axis in split.axes}


DRAWN: dict[str, Callable[[Draw, int], None]] = {
    "max_pool": lambda draw, number: draw_pool(draw, "max_pool"),
    "avg_pool": lambda draw, number: draw_pool(draw, "avg_pool"),
    "adaptive_avg_pool": lambda draw, number: draw_adaptive(draw, "adaptive_avg_pool"),
    "adaptive_max_pool": lambda draw, number: draw_adaptive(draw, "adaptive_max_pool"),
    "interpolate": draw_resize,
    "select": draw_select,
    "split": draw_chunks,
    "pad": draw_pad,
    "reduce": draw_reduce,
}


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", DRAWN)
def test_ranks_together_do_what_the_whole_call_does(op: str, count: int) -> None:
    for number in range(count):
        try:
            DRAWN[op](Draw(f"{op} {number}"), number)
        except Exception as error:
            raise AssertionError(f"call {number} of {op}") from error


CHANNELS = Split((0,), ((0, 3), (1, 2)))
EVEN = {size: Split((0,), balanced(size, 2)) for size in (2, 4, 5, 6, 8)}
ROWS = Layout.of({2: EVEN[8]})
SQUARE = (2, 4, 8, 8)


def pooled(x: Tensor, mesh: Mesh, given: Layout) -> Placed:
    return pool("max_pool", x, mesh, given, 3, stride=2, padding=1)


def split_at(dim: int, *parts: Any, axis: int = 0) -> Layout:
    return Layout.of({dim: Split((axis,), parts)})


HALO = split_at(2, range(4), range(3, 8))
FEW = "dim 2 is whole: fewer output rows (1) than ranks (2)"
PARTIAL = Layout.of({2: EVEN[8]}, partial=(1,))
PLACED: dict[str, tuple[Callable[..., Placed], tuple[int, ...], Mesh, Layout, Layout, Layout, str]] = {
    "uneven rows are evened out, and asked for with their halo": (
        *(pooled, SQUARE, TWO, split_at(2, range(7), range(7, 8)), HALO, Layout.of({2: EVEN[4]}), ""),
    ),
    "a partial sum is asked for whole by a maximum": (pooled, SQUARE, TWO, Layout.of(partial=(0,)), WHOLE, WHOLE, ""),
    "and stays one through averages": (
        *(partial(pool, "avg_pool"), SQUARE, GRID, PARTIAL, PARTIAL, Layout.of({2: EVEN[4]}, partial=(1,)), ""),
    ),
    "too few rows are whole with a note": (pooled, (2, 4, 2, 8), TWO, Layout.of({2: EVEN[2]}), WHOLE, WHOLE, FEW),
    "windows that do not overlap need no halo": (
        *(partial(pool, "max_pool"), SQUARE, TWO, ROWS, ROWS, Layout.of({2: EVEN[4]}), ""),
    ),
    "a global average is a partial sum": (
        lambda x, mesh, given: adaptive("adaptive_avg_pool", x, (1, 1), mesh, given),
        *(SQUARE, TWO, ROWS, ROWS, Layout.of(partial=(0,)), ""),
    ),
    "halves of evenly divided channels lie on one rank each": (
        lambda x, mesh, given: chunks(x, (4, 4), 1, mesh, given),
        *((2, 8, 3), TWO, Layout.of({1: EVEN[8]}), Layout.of({1: EVEN[8]}), split_at(1, range(4), range(0)), ""),
    ),
    "zero channels go to the ranks at the ends": (  # ResNet's first shortcut
        lambda x, mesh, given: pad(x, (0, 0, 0, 0, 2, 2), mesh, given),
        *((2, 4, 6, 6), TWO, Layout.of({1: CHANNELS}), Layout.of({1: CHANNELS})),
        *(split_at(1, (0, 1, 2, 5, 6, 7), range(3, 5)), ""),
    ),
}
"""A call, a shape, a mesh and a layout; the layout that is asked for, that of the result, and a note."""


def test_what_is_asked_for() -> None:
    for rule, (call, shape, mesh, given, wanted, left, note) in PLACED.items():
        placed = call(tensor(*shape), mesh, given)
        assert (placed.inputs["x"], placed.outputs["y"]) == (wanted, left), rule
        assert note in placed.note and bool(note) == bool(placed.note), rule


def test_mistakes_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls: padding at inner borders, a wrong order, a mean over a rank's own count."""
    needed, places = Window.needed, slices.places

    def padded(self: Window, output: range) -> Need:
        need = needed(self, output)
        return Need(need.rows, self.before, max(need.after, self.before - need.before))

    with monkeypatch.context() as patch, pytest.raises((AssertionError, RuntimeError)):
        patch.setattr(Window, "needed", padded)
        pool("avg_pool", tensor(1, 1, 8, 8), TWO, ROWS, 3, stride=1, padding=1)
    with monkeypatch.context() as patch, pytest.raises((AssertionError, RuntimeError)):
        patch.setattr(slices, "places", lambda part, chosen: tuple(places(part, chosen))[::-1])
        select(tensor(2, 4, 3), [(0, 2, 1), (0, 3, 1), (0, 3, 1)], TWO, Layout.of({1: Split((0,), ((0, 2), (1, 3)))}))
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setitem(OPERATIONS, "reduce", replace(OPERATIONS["reduce"], build=as_called))
        reduce("mean", tensor(3, 7), (1,), False, THREE, Layout.of({1: Split((0,), balanced(7, 3))}))
    pieces = [F.interpolate(part, scale_factor=2, mode="bilinear") for part in tensor(1, 1, 8, 4).split(4, 2)]
    torch.manual_seed(0)
    assert not torch.allclose(torch.cat(pieces, 2), F.interpolate(tensor(1, 1, 8, 4), scale_factor=2, mode="bilinear"))
