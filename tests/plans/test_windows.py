"""The rows that parts of an output need: local work on them gives the whole work's output and gradients."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.plans.layout import balanced, consecutive
from convoy.plans.mesh import Mesh
from convoy.plans.windows import Need, Transposed, Window, halo_split, output_split

Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def cuts(total: int) -> Iterator[tuple[range, ...]]:
    """Some ways to divide rows: even, uneven, with an empty part."""
    for ranks in (2, 3):
        yield balanced(total, ranks)
    yield consecutive((1, total - 1))
    yield consecutive((total - total // 4, 0, total // 4))


def conv_windows() -> Iterator[Window]:
    for k, s, d, p, n in itertools.product(range(1, 8), (1, 2, 3), (1, 2), (0, 1, 3, 6), (5, 8, 13)):
        for after in {p, max(p - 1, 0), p + 2}:
            window = Window(n, k, s, d, p, after)
            if n + p + after >= window.span:
                yield window


def joined(window: Window, parts: tuple[range, ...], rows: Tensor, local: Function, pad: float = 0.0) -> Tensor:
    """Every part from the rows that it needs, one after another."""
    pieces = []
    for part in parts:
        need = window.needed(part)
        if part:
            pieces.append(
                local(F.pad(rows[..., need.rows.start : need.rows.stop], (need.before, need.after), value=pad))
            )
            assert pieces[-1].shape[-1] == len(part), (window, part)
    return torch.cat(pieces, -1)


def agree(whole: Function, parted: Function, rows: Tensor) -> bool:
    """Whether outputs and input gradients are the same."""
    results = []
    for function in (whole, parted):
        leaf = rows.clone().requires_grad_()
        output = function(leaf)
        torch.manual_seed(1)
        output.backward(torch.randn_like(output))
        assert leaf.grad is not None
        results.append((output.detach(), leaf.grad))
    return results[0][0].shape == results[1][0].shape and all(
        torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(*results, strict=True)
    )


def test_convolutions_of_parts_make_the_whole() -> None:
    for window in conv_windows():
        weight = torch.randn(2, 1, window.kernel, dtype=torch.float64)
        rows = torch.randn(1, 1, window.size, dtype=torch.float64)

        def conv(x: Tensor, window: Window = window, weight: Tensor = weight) -> Tensor:
            return F.conv1d(x, weight, stride=window.stride, dilation=window.dilation)

        whole = conv(F.pad(rows, (window.before, window.after)))
        assert whole.shape[-1] == window.output_size
        for parts in cuts(window.output_size):
            assert torch.allclose(joined(window, parts, rows, conv), whole, rtol=1e-10, atol=1e-12), (window, parts)


@pytest.mark.slow
def test_gradients_of_convolutions_of_parts_add_up() -> None:
    for window in itertools.islice(conv_windows(), 0, None, 7):
        weight = torch.randn(2, 1, window.kernel, dtype=torch.float64)
        rows = torch.randn(1, 1, window.size, dtype=torch.float64)

        def conv(x: Tensor, window: Window = window, weight: Tensor = weight) -> Tensor:
            return F.conv1d(x, weight, stride=window.stride, dilation=window.dilation)

        def whole(x: Tensor, window: Window = window, conv: Function = conv) -> Tensor:
            return conv(F.pad(x, (window.before, window.after)))

        for parts in cuts(window.output_size):

            def parted(
                x: Tensor, window: Window = window, conv: Function = conv, parts: tuple[range, ...] = parts
            ) -> Tensor:
                return joined(window, parts, x, conv)

            assert agree(whole, parted, rows), (window, parts)


def test_padding_only_where_the_tensor_ends() -> None:
    window = Window(8, 3, 1, 1, 1, 1)
    assert window.needed(range(4)) == Need(range(5), 1, 0)
    assert window.needed(range(4, 8)) == Need(range(3, 8), 0, 1)
    assert window.needed(range(2, 6)) == Need(range(1, 7), 0, 0)
    assert window.needed(range(3, 3)) == Need(range(0), 0, 0)


def test_padding_at_inner_borders_would_be_noticed() -> None:
    window, weight = Window(8, 3, 1, 1, 1, 1), torch.randn(1, 1, 3, dtype=torch.float64)
    rows = torch.randn(1, 1, 8, dtype=torch.float64)
    whole = F.conv1d(rows, weight, padding=1)
    pieces = [F.conv1d(rows[..., part.start : part.stop], weight, padding=1) for part in balanced(8, 2)]
    assert not torch.allclose(torch.cat(pieces, -1), whole)
    assert torch.allclose(joined(window, balanced(8, 2), rows, lambda x: F.conv1d(x, weight)), whole)


def test_windows_in_nothing_but_padding() -> None:
    window = Window(2, 1, 1, 1, 3, 4)
    assert window.needed(range(2)) == Need(range(0), 2, 0)
    assert window.needed(range(6, 9)) == Need(range(2, 2), 0, 3)


def test_rows_dropped_at_the_bottom_are_not_asked_for() -> None:
    window = Window(7, 2, 3)
    assert window.output_size == 2
    assert window.needed(range(1, 2)) == Need(range(3, 5), 0, 0)


def test_max_pooling_of_parts_makes_the_whole() -> None:
    checked = 0
    for k, s, d, n, ceil in itertools.product(range(1, 6), (1, 2, 3), (1, 2), range(4, 14), (False, True)):
        for p in range(k // 2 + 1):
            window = Window(n, k, s, d, p, p, ceil)
            if n + 2 * p < window.span:
                continue
            rows = torch.randn(1, 1, n, dtype=torch.float64)
            whole = F.max_pool1d(rows, k, s, p, d, ceil)
            assert window.output_size == whole.shape[-1], window
            for parts in cuts(window.output_size):
                pooled = joined(window, parts, rows, lambda x, k=k, s=s, d=d: F.max_pool1d(x, k, s, 0, d), -torch.inf)
                assert torch.equal(pooled, whole), (window, parts)
                checked += 1
    assert checked > 3000


def test_counts_are_the_divisors_of_average_pooling() -> None:
    for k, s, n, ceil, padded in itertools.product(range(1, 6), (1, 2, 3), range(4, 14), (False, True), (False, True)):
        for p in range(k // 2 + 1):
            window = Window(n, k, s, 1, p, p, ceil)
            if n + 2 * p < k:
                continue
            rows = torch.rand(1, 1, n, dtype=torch.float64)
            whole = F.avg_pool1d(rows, k, s, p, ceil, padded)
            assert window.output_size == whole.shape[-1], window
            for parts in cuts(window.output_size):
                sums = joined(window, parts, rows, lambda x, k=k, s=s: F.avg_pool1d(x, k, s) * k)
                counts = [count for part in parts for count in window.counts(part, padded)]
                assert torch.allclose(sums / torch.tensor(counts), whole, rtol=1e-12), (window, parts, padded)


def transposed_windows() -> Iterator[Transposed]:
    for k, s, d, p, n in itertools.product(range(1, 8), (1, 2, 3), (1, 2), (0, 1, 3), (1, 3, 7)):
        for extra in range(max(s, d)):
            window = Transposed(n, k, s, d, p, p, extra)
            if window.output_size > 0:
                yield window


def transpose(window: Transposed, weight: Tensor, rows: Tensor, output: range) -> Tensor:
    """What `Transposed` says a rank does."""
    need = window.needed(output)
    if not need.rows:
        return rows[..., :0].sum() + rows.new_zeros(1, weight.shape[1], need.after)
    full = F.conv_transpose1d(
        rows[..., need.rows.start : need.rows.stop], weight, None, window.stride, 0, 0, 1, window.dilation
    )
    return F.pad(full, (need.before, need.after))


@pytest.mark.slow
def test_transposed_convolutions_of_parts_make_the_whole() -> None:
    checked = 0
    for window in transposed_windows():
        weight = torch.randn(1, 2, window.kernel, dtype=torch.float64)
        rows = torch.randn(1, 1, window.size, dtype=torch.float64)

        def whole(x: Tensor, window: Transposed = window, weight: Tensor = weight) -> Tensor:
            return F.conv_transpose1d(
                x, weight, None, window.stride, window.before, window.output_padding, 1, window.dilation
            )

        assert whole(rows).shape[-1] == window.output_size, window
        for parts in cuts(window.output_size):

            def parted(
                x: Tensor, window: Transposed = window, weight: Tensor = weight, parts: tuple[range, ...] = parts
            ) -> Tensor:
                return torch.cat([transpose(window, weight, x, part) for part in parts], -1)

            assert agree(whole, parted, rows), (window, parts)
            checked += 1
    assert checked > 1000


def test_halo_of_a_split_over_two_axes() -> None:
    mesh = Mesh(("a", "b", "c"), (2, 3, 2))
    window = Window(12, 3, 1, 1, 1, 1)
    output = output_split(window.output_size, mesh, (0, 2))
    assert output.parts == (range(3), range(3, 6), range(6, 9), range(9, 12))
    halo = halo_split(window, output)
    assert halo.axes == (0, 2)
    assert halo.parts == (range(4), range(2, 7), range(5, 10), range(8, 12))


@pytest.mark.parametrize("stride", [1, 2])
def test_one_by_one_windows_need_no_halo(stride: int) -> None:
    mesh = Mesh(("a",), (3,))
    output = output_split(7, mesh, (0,))
    halo = halo_split(Window(7 * stride, 1, stride), output)
    assert (halo == output) == (stride == 1)
