"""The rows that parts of an output need: local work on them gives the whole work's output and gradients."""

import itertools
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.plans.layout import balanced, consecutive
from convoy.plans.mesh import Mesh
from convoy.plans.windows import Transposed, Window, halo_split, output_split

Function = Callable[[Tensor], Tensor]


def cuts(total: int) -> tuple[tuple[range, ...], ...]:
    """Some ways to divide rows: even, uneven, with an empty part."""
    return balanced(total, 2), balanced(total, 3), consecutive((total - total // 4, 0, total // 4))


def some(*options: tuple[int, ...], number: int) -> list[tuple[int, ...]]:
    """Combinations at random, always the same."""
    return random.Random(0).sample(list(itertools.product(*options)), number)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def joined(window: Window, parts: tuple[range, ...], rows: Tensor, local: Function, pad: float = 0.0) -> Tensor:
    """Every part from the rows that it needs, one after another."""
    needs = [window.needed(part) for part in parts if part]
    padded = [F.pad(rows[..., one.rows.start : one.rows.stop], (one.before, one.after), value=pad) for one in needs]
    pieces = list(map(local, padded))
    assert [piece.shape[-1] for piece in pieces] == [len(part) for part in parts if part], (window, parts)
    return torch.cat(pieces, -1)


def transposed(window: Transposed, parts: tuple[range, ...], rows: Tensor, weight: Tensor) -> Tensor:
    """What `Transposed` says that ranks do."""
    pieces = []
    for need in map(window.needed, parts):
        part = rows[..., need.rows.start : need.rows.stop]
        if need.rows:
            full = F.conv_transpose1d(part, weight, stride=window.stride, dilation=window.dilation)
            pieces.append(F.pad(full, (need.before, need.after)))
        else:
            pieces.append(part.sum() + rows.new_zeros(1, weight.shape[1], need.after))
    return torch.cat(pieces, -1)


def assert_same(whole: Function, parted: Function, rows: Tensor, words: object) -> None:
    """Outputs and input gradients are the same."""
    first, second = (rows.clone().requires_grad_() for _ in range(2))
    one, two = whole(first), parted(second)
    weights = torch.randn_like(one)
    for output in (one, two):
        (output * weights).sum().backward()
    for a, b in ((two, one), (second.grad, first.grad)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=str(words))


def test_convolutions_of_parts_make_the_whole() -> None:
    for k, s, d, p, more, n in some(range(1, 8), (1, 2, 3), (1, 2), (0, 1, 3, 6), (-1, 0, 2), (5, 8, 13), number=200):
        window, weight = Window(n, k, s, d, p, max(p + more, 0)), draw(2, 1, k)
        if n + window.before + window.after < window.span:
            continue
        conv = lambda x, weight=weight, s=s, d=d: F.conv1d(x, weight, stride=s, dilation=d)  # noqa: E731
        whole = lambda x, conv=conv, window=window: conv(F.pad(x, (window.before, window.after)))  # noqa: E731
        for parts in cuts(window.output_size):
            parted = lambda x, window=window, parts=parts, conv=conv: joined(window, parts, x, conv)  # noqa: E731
            assert_same(whole, parted, draw(1, 1, n), (window, parts))
    # the negative control: padding at inner borders
    window, weight, rows = Window(8, 3, 1, 1, 1, 1), draw(1, 1, 3), draw(1, 1, 8)
    pieces = [F.conv1d(rows[..., part.start : part.stop], weight, padding=1) for part in balanced(8, 2)]
    assert not torch.allclose(torch.cat(pieces, -1), F.conv1d(rows, weight, padding=1))


def test_pools_of_parts_make_the_whole_and_averages_are_divided_by_their_counts() -> None:
    for k, s, p, n, ceil in some(range(1, 6), (1, 2, 3), (0, 1, 2), range(5, 12), (False, True), number=200):
        window, rows = Window(n, k, s, 1, p, p, bool(ceil)), draw(1, 1, n)
        if p <= k // 2:
            parts = balanced(window.output_size, 3)
            pooled = joined(window, parts, rows, lambda x, k=k, s=s: F.max_pool1d(x, k, s), -torch.inf)
            assert torch.equal(pooled, F.max_pool1d(rows, k, s, p, 1, ceil)), window
            sums = joined(window, parts, rows, lambda x, k=k, s=s: F.avg_pool1d(x, k, s) * k)
            counts = torch.tensor([count for part in parts for count in window.counts(part, False)])
            torch.testing.assert_close(sums / counts, F.avg_pool1d(rows, k, s, p, ceil, False), msg=str(window))


def test_transposed_convolutions_of_parts_make_the_whole() -> None:
    for k, s, d, p, n, extra in some(range(1, 8), (1, 2, 3), (1, 2), (0, 1, 3), (1, 3, 7), (0, 1, 2), number=200):
        window, weight = Transposed(n, k, s, d, p, p, extra), draw(1, 2, k)
        if extra >= max(s, d) or window.output_size <= 0:
            continue
        around = (s, p, extra, 1, d)
        whole = lambda x, weight=weight, around=around: F.conv_transpose1d(x, weight, None, *around)  # noqa: E731
        for parts in cuts(window.output_size):
            parted = lambda x, window=window, parts=parts, w=weight: transposed(window, parts, x, w)  # noqa: E731
            assert_same(whole, parted, draw(1, 1, n), (window, parts))


def test_halos_are_the_rows_that_parts_need() -> None:
    output = output_split(12, Mesh(("a", "b", "c"), (2, 3, 2)), (0, 2))
    halo = halo_split(Window(12, 3, 1, 1, 1, 1), output)
    assert (halo.axes, halo.parts) == ((0, 2), (range(4), range(2, 7), range(5, 10), range(8, 12)))
