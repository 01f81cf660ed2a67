"""The rows that parts of an output need: local work on them gives the whole work's output and gradients."""

import itertools
import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.plans.layout import balanced, consecutive
from convoy.plans.mesh import Mesh
from convoy.plans.windows import Transposed, Window, halo_split, output_split

Function = Callable[[Tensor], Tensor]
Parts = tuple[range, ...]


def cuts(total: int) -> tuple[Parts, ...]:
    """Some ways to divide rows: even, uneven, with an empty part."""
    return balanced(total, 2), balanced(total, 3), consecutive((total - total // 4, 0, total // 4))


def some(*options: tuple[int, ...], number: int = 120) -> list[tuple[int, ...]]:
    """Combinations at random, always the same."""
    return random.Random(0).sample(list(itertools.product(*options)), number)


def joined(window: Window, parts: Parts, rows: Tensor, local: Function, pad: float = 0.0) -> Tensor:
    """Every part from the rows that it needs, one after another."""
    pieces = []
    for part in filter(None, parts):
        need = window.needed(part)
        padded = F.pad(rows[..., need.rows.start : need.rows.stop], (need.before, need.after), value=pad)
        pieces.append(local(padded))
        assert pieces[-1].shape[-1] == len(part), (window, part)
    return torch.cat(pieces, -1)


def assert_same(whole: Function, parted: Function, rows: Tensor, words: object) -> None:
    """Outputs and input gradients are the same."""
    first, second = (rows.clone().requires_grad_() for _ in range(2))
    one, two = whole(first), parted(second)
    weights = torch.randn_like(one)
    for output in (one, two):
        (output * weights).sum().backward()
    torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-12, msg=str(words))
    torch.testing.assert_close(second.grad, first.grad, rtol=1e-10, atol=1e-12, msg=str(words))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_convolutions_of_parts_make_the_whole() -> None:
    for k, s, d, p, more, n in some(range(1, 8), (1, 2, 3), (1, 2), (0, 1, 3, 6), (-1, 0, 2), (5, 8, 13), number=250):
        window = Window(n, k, s, d, p, max(p + more, 0))
        if n + window.before + window.after < window.span:
            continue
        weight, pads = draw(2, 1, k), (window.before, window.after)
        conv = lambda x, weight=weight, s=s, d=d: F.conv1d(x, weight, stride=s, dilation=d)  # noqa: E731
        whole = lambda x, conv=conv, pads=pads: conv(F.pad(x, pads))  # noqa: E731
        assert whole(draw(1, 1, n)).shape[-1] == window.output_size
        for parts in cuts(window.output_size):
            parted = lambda x, window=window, parts=parts, conv=conv: joined(window, parts, x, conv)  # noqa: E731
            assert_same(whole, parted, draw(1, 1, n), (window, parts))


def test_padding_at_inner_borders_would_be_noticed() -> None:
    """The negative control."""
    window, weight, rows = Window(8, 3, 1, 1, 1, 1), draw(1, 1, 3), draw(1, 1, 8)
    whole = F.conv1d(rows, weight, padding=1)
    pieces = [F.conv1d(rows[..., part.start : part.stop], weight, padding=1) for part in balanced(8, 2)]
    assert not torch.allclose(torch.cat(pieces, -1), whole)
    assert torch.allclose(joined(window, balanced(8, 2), rows, lambda x: F.conv1d(x, weight)), whole)


def pooling() -> Iterator[tuple[Window, int, int, int, bool]]:
    """Windows of pools whose last one may begin in the padding."""
    for k, s, d, p, n, ceil in some(range(1, 6), (1, 2, 3), (1, 2), (0, 1, 2), range(4, 14), (False, True), number=400):
        window = Window(n, k, s, d, p, p, bool(ceil))
        if p <= k // 2 and n + 2 * p >= window.span:
            yield window, k, s, d, bool(ceil)


def test_pools_of_parts_make_the_whole_and_averages_are_divided_by_their_counts() -> None:
    for window, k, s, d, ceil in pooling():
        rows, p = draw(1, 1, window.size), window.before
        whole = F.max_pool1d(rows, k, s, p, d, ceil)
        assert window.output_size == whole.shape[-1], window
        for parts in cuts(window.output_size):
            pooled = joined(window, parts, rows, lambda x, k=k, s=s, d=d: F.max_pool1d(x, k, s, 0, d), -torch.inf)
            assert torch.equal(pooled, whole), (window, parts)
            for padded in (False, True) if d == 1 else ():
                sums = joined(window, parts, rows, lambda x, k=k, s=s: F.avg_pool1d(x, k, s) * k)
                counts = torch.tensor([count for part in parts for count in window.counts(part, padded)])
                torch.testing.assert_close(sums / counts, F.avg_pool1d(rows, k, s, p, ceil, padded), msg=str(window))


def transpose(window: Transposed, weight: Tensor, rows: Tensor, output: range) -> Tensor:
    """What `Transposed` says a rank does."""
    need = window.needed(output)
    if not need.rows:
        return rows[..., :0].sum() + rows.new_zeros(1, weight.shape[1], need.after)
    rows_of_part = rows[..., need.rows.start : need.rows.stop]
    full = F.conv_transpose1d(rows_of_part, weight, stride=window.stride, dilation=window.dilation)
    return F.pad(full, (need.before, need.after))


def test_transposed_convolutions_of_parts_make_the_whole() -> None:
    for k, s, d, p, n, extra in some(range(1, 8), (1, 2, 3), (1, 2), (0, 1, 3), (1, 3, 7), (0, 1, 2), number=300):
        window = Transposed(n, k, s, d, p, p, extra)
        if extra >= max(s, d) or window.output_size <= 0:
            continue
        weight, around = draw(1, 2, k), (s, p, extra, 1, d)
        whole = lambda x, weight=weight, around=around: F.conv_transpose1d(x, weight, None, *around)  # noqa: E731
        assert whole(draw(1, 1, n)).shape[-1] == window.output_size, window
        for parts in cuts(window.output_size):
            parted = lambda x, window=window, weight=weight, parts=parts: torch.cat(  # noqa: E731
                [transpose(window, weight, x, part) for part in parts], -1
            )
            assert_same(whole, parted, draw(1, 1, n), (window, parts))


def test_halos_are_the_rows_that_parts_need() -> None:
    output = output_split(12, Mesh(("a", "b", "c"), (2, 3, 2)), (0, 2))
    halo = halo_split(Window(12, 3, 1, 1, 1, 1), output)
    assert output.parts == (range(3), range(3, 6), range(6, 9), range(9, 12))
    assert (halo.axes, halo.parts) == ((0, 2), (range(4), range(2, 7), range(5, 10), range(8, 12)))
