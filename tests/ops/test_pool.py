"""Pooling by parts against pooling of the whole, for every rank of a mesh in turn."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.plans.layout import Layout, Split, balanced, consecutive
from convoy.plans.mesh import Mesh
from emulated import check

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE_AVG = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
TWO, THREE, GRID = Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def rows(mesh: Mesh, dim: int, size: int, axes: tuple[int, ...] = (0,)) -> Layout:
    return Layout.of({dim: Split(axes, balanced(size, mesh.size(axes)))})


def pool(kind: str, x: Tensor, mesh: Mesh, given: Layout, **options: Any) -> Any:
    """One pooling by torch's options, checked."""
    num = x.dim() - 2
    options.setdefault("kernel_size", 2)

    def each(name: str, default: Any) -> tuple[int, ...]:
        value = options.get(name, default)
        return value if isinstance(value, tuple) else (value,) * num

    kernel = each("kernel_size", 2)
    attributes = {
        "kernel": kernel,
        "stride": each("stride", kernel),
        "padding": each("padding", 0),
        "dilation": each("dilation", 1),
        "ceil_mode": options.get("ceil_mode", False),
        "count_include_pad": options.get("count_include_pad", True),
        "divisor_override": options.get("divisor_override"),
    }
    functions = MAX if kind == "max_pool" else AVG
    return check(kind, functions[num], (x,), (), options, attributes, mesh, {"x": given})


def windows(kernels: range) -> Iterator[dict[str, Any]]:
    for k, s, ceil in itertools.product(kernels, (1, 2, 3), (False, True)):
        for p in range(k // 2 + 1):
            yield {"kernel_size": k, "stride": s, "padding": p, "ceil_mode": ceil}


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 9, 14])
def test_max_pooling_of_rows(size: int) -> None:
    x = tensor(1, 2, size)
    for options, d, mesh in itertools.product(windows(range(1, 8)), (1, 2), (TWO, THREE)):
        if size + 2 * options["padding"] >= d * (options["kernel_size"] - 1) + 1:
            placed = pool("max_pool", x, mesh, rows(mesh, 2, size), dilation=d, **options)
            assert bool(placed.note) == (placed.inputs["x"].split(2) is None)


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 9, 14])
@pytest.mark.parametrize("count_include_pad", [False, True])
def test_average_pooling_of_rows(size: int, count_include_pad: bool) -> None:
    x = tensor(1, 2, size)
    for options, mesh in itertools.product(windows(range(1, 8)), (TWO, THREE)):
        if size + 2 * options["padding"] >= options["kernel_size"]:
            pool("avg_pool", x, mesh, rows(mesh, 2, size), count_include_pad=count_include_pad, **options)


@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_rows_and_columns(kind: str, memory_format: torch.memory_format) -> None:
    x = tensor(2, 3, 9, 7).to(memory_format=memory_format)
    given = Layout.of({2: Split((0,), balanced(9, 2)), 3: Split((1,), balanced(7, 2))})
    for options in windows(range(1, 5)):
        options["kernel_size"] = (options["kernel_size"], max(2 * options["padding"], 2))
        pool(kind, x, GRID, given, **options)


@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
def test_rows_over_both_axes_of_a_grid(kind: str) -> None:
    x = tensor(1, 2, 13, 5)
    for options in windows(range(1, 4)):
        pool(kind, x, GRID, rows(GRID, 2, 13, (0, 1)), **options)


@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
def test_volumes(kind: str) -> None:
    x = tensor(1, 2, 5, 8, 6)
    for dim in (2, 3, 4):
        pool(kind, x, TWO, rows(TWO, dim, x.shape[dim]), kernel_size=3, stride=2, padding=1, ceil_mode=True)


def test_divisor_override() -> None:
    for p in (0, 1):
        pool("avg_pool", tensor(1, 2, 9, 9), TWO, rows(TWO, 2, 9), kernel_size=3, padding=p, divisor_override=4)


@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
@pytest.mark.parametrize("parts", [(4, 0), (0, 4), (1, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_samples_and_channels_even_where_a_rank_has_none(kind: str, parts: tuple[int, ...], dim: int) -> None:
    given = Layout.of({dim: Split((0,), consecutive(parts))})
    placed = pool(kind, tensor(4, 4, 6, 6), TWO, given, kernel_size=3, stride=2, padding=1)
    assert placed.inputs["x"] == placed.outputs["y"] == given


@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
def test_no_channels_and_divided_rows(kind: str) -> None:
    given = Layout.of({1: Split((0,), (range(0), range(3))), 2: Split((1,), balanced(6, 2))})
    pool(kind, tensor(2, 3, 6, 6), GRID, given, kernel_size=3, stride=2, padding=1)


def test_channel_lists_follow() -> None:
    given = Layout.of({1: Split((0,), ((0, 3, 4), (1, 2)))})
    assert pool("max_pool", tensor(2, 5, 6, 6), TWO, given).outputs["y"] == given


def test_windows_that_do_not_overlap_need_no_halo() -> None:
    given = rows(TWO, 2, 8)
    assert pool("max_pool", tensor(1, 1, 8, 8), TWO, given).inputs["x"] == given


def test_fewer_rows_than_ranks() -> None:
    placed = pool("max_pool", tensor(1, 1, 4, 4), THREE, rows(THREE, 2, 4))
    assert "fewer output rows (2) than ranks (3)" in placed.note
    assert placed.outputs["y"] == Layout()


def test_a_partial_sum_stays_one_through_averages_only() -> None:
    given = Layout.of({2: Split((0,), balanced(6, 2))}, partial=(1,))
    x = tensor(1, 2, 6, 6)
    assert pool("avg_pool", x, GRID, given).outputs["y"].partial == {1}
    assert pool("max_pool", x, GRID, given).outputs["y"].partial == frozenset()


def adaptive(kind: str, x: Tensor, size: tuple[int, ...], mesh: Mesh, given: Layout) -> Any:
    functions = ADAPTIVE_AVG if kind == "adaptive_avg_pool" else ADAPTIVE_MAX
    return check(kind, functions[len(size)], (x,), (size,), {}, {"output_size": size}, mesh, {"x": given})


@pytest.mark.parametrize("kind", ["adaptive_avg_pool", "adaptive_max_pool"])
def test_adaptive_pooling(kind: str) -> None:
    for n, o, mesh in itertools.product((5, 6, 7, 8, 12, 13), range(1, 9), (TWO, THREE)):
        for width in (1, 2, 3):
            placed = adaptive(kind, tensor(1, 2, n, 6), (o, width), mesh, rows(mesh, 2, n))
            divided = n % o == 0 and o >= mesh.num_devices
            assert (placed.outputs["y"].split(2) is not None) == divided
            assert bool(placed.note) == (not divided and not (o == 1 and kind == "adaptive_avg_pool"))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_global_average_is_a_partial_sum(num: int) -> None:
    x = tensor(2, 3, 7, *[4] * (num - 1))
    placed = adaptive("adaptive_avg_pool", x, (1,) * num, THREE, rows(THREE, 2, 7))
    assert placed.outputs["y"] == Layout.of(partial=(0,))
    assert placed.inputs["x"] == rows(THREE, 2, 7)


def test_global_average_over_rows_and_columns_of_unequal_parts() -> None:
    given = Layout.of({2: Split((0,), consecutive((5, 0))), 3: Split((1,), consecutive((1, 3)))})
    placed = adaptive("adaptive_avg_pool", tensor(2, 3, 5, 4), (1, 1), GRID, given)
    assert placed.outputs["y"].partial == {0, 1}


def test_global_average_of_uneven_samples() -> None:
    given = Layout.of({0: Split((0,), consecutive((3, 0))), 2: Split((1,), balanced(5, 2))})
    adaptive("adaptive_avg_pool", tensor(3, 2, 5, 5), (1, 1), GRID, given)


def test_padding_at_inner_borders_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from convoy.plans.windows import Need, Window

    def wrong(self: Window, output: range) -> Need:
        need = right(self, output)
        return Need(need.rows, self.before, max(need.after, self.before - need.before))

    right = Window.needed
    x, given = tensor(1, 1, 8, 8), rows(TWO, 2, 8)
    pool("avg_pool", x, TWO, given, kernel_size=3, stride=1, padding=1)
    monkeypatch.setattr(Window, "needed", wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        pool("avg_pool", x, TWO, given, kernel_size=3, stride=1, padding=1)
