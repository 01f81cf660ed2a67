"""What travels together, and the words that tell when a backward pass is done."""

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from convoy.engine.gradients.backward import BackwardWatch, at_end_of_backward
from convoy.engine.gradients.buckets import flat, is_dense, laid_out, shaped
from convoy.plans.buckets import Item, Sizes, plan_buckets

CPU = torch.device("cpu")


def test_every_gradient_travels_once_with_its_own_kind() -> None:
    drawn = random.Random(0)
    for _ in range(200):
        items = [
            Item(
                axes=drawn.choice([(0,), (1,), (0, 1)]),
                dtype=drawn.choice([torch.float32, torch.float64]),
                device=CPU,
                numel=drawn.choice([0, 1, 10, 50, 200]),
            )
            for _ in range(drawn.randrange(1, 12))
        ]
        order = drawn.sample(range(len(items)), len(items))
        buckets = plan_buckets(items, order, Sizes(alone=700, bucket=300, first=100))
        assert sorted(i for bucket in buckets for i in bucket.members) == list(range(len(items)))
        assert sorted(i for bucket in buckets for i in bucket.tally) == list(range(len(items)))
        for bucket in buckets:
            assert len({items[i].kind for i in (*bucket.members, *bucket.tally)}) == 1
            assert {items[i].axes for i in bucket.members} <= {bucket.axes}
            assert bucket.alone == (len(bucket.members) == 1 and items[bucket.members[0]].bytes >= 700)
        last = [max((order.index(i) for i in bucket.members), default=len(order)) for bucket in buckets]
        assert last == sorted(last)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (7,), (3, 1, 2, 2), (0, 3), ()])
def test_dense_tensors_are_flat_without_a_copy(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for tensor in (x, x.to(memory_format=torch.channels_last) if x.ndim == 4 else x.t() if x.ndim == 2 else x):
        assert is_dense(tensor)
        assert torch.equal(shaped(flat(tensor), tensor), tensor)
        assert flat(tensor).data_ptr() == tensor.data_ptr()
        assert laid_out(tensor, tensor) is tensor


def test_other_tensors_are_copied() -> None:
    x = torch.randn(4, 6)
    assert not is_dense(x[:, ::2])
    assert not is_dense(x[:1].expand(4, 6))
    gradient = laid_out(x.t().contiguous().t(), x)
    assert torch.equal(gradient, x)
    assert gradient.is_contiguous()


def test_the_engine_tells_the_end_of_a_backward_pass() -> None:
    """torch's private `queue_callback`; without it, gradients could not be added by the end of `backward()`."""
    events: list[str] = []
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    names = ["first", "second"]

    def after(i: int) -> None:
        events.append(f"after {names[i]}")
        if events.count("queued") == 0:
            events.append("queued")
            at_end_of_backward(lambda: events.append("end"))

    watch = BackwardWatch([first, second], lambda i: events.append(f"before {names[i]}"), after)
    (first.exp() * second).sum().backward()
    assert sorted(events[:-1]) == ["after first", "after second", "before first", "before second", "queued"]
    assert events[-1] == "end"
    torch.autograd.grad((first * second).sum(), [first, second])
    assert events[-1] == "end"
    watch.remove()
    (first * second).sum().backward()
    assert events[-1] == "end"


def test_an_error_at_the_end_is_that_of_backward() -> None:
    parameter = nn.Parameter(torch.ones(2))

    def fail() -> None:
        raise ValueError("as asked")

    BackwardWatch([parameter], lambda i: None, lambda i: at_end_of_backward(fail))
    with pytest.raises(ValueError, match="as asked"):
        parameter.sum().backward()


def test_watching_costs_no_copy() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    x = torch.ones(4, 4)
    seen: list[int] = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    watch = BackwardWatch([parameter], lambda i: None, lambda i: None)
    watch._nodes[0].register_prehook(lambda gradients: seen.append(gradients[0].data_ptr()))
    (x @ parameter).sum().backward()
    assert seen[0] == seen[1]


def test_a_parameter_that_was_cast_is_noticed() -> None:
    parameter = nn.Parameter(torch.ones(2))
    BackwardWatch([parameter], lambda i: None, lambda i: None)
    parameter.data = parameter.data.double()
    with pytest.raises(RuntimeError, match="cast or moved"):
        parameter.sum().backward()


def test_reentrant_checkpoints_are_watched() -> None:
    parameter = nn.Parameter(torch.ones(2))
    events: list[str] = []
    BackwardWatch([parameter], lambda i: events.append("before"), lambda i: events.append("after"))
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda x: x * parameter, x, use_reentrant=True).sum().backward()
    assert events == ["before", "after"]
