"""Gradients of divided parameters answer for the whole tensor, or refuse."""

import copy
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_loops import IMAGES, LABELS, PLANS, far, loss_of, rank, ranks_net, small, train
from torch import Tensor, nn

import convoy
from convoy.engine.gradients.divided import DividedGradient
from convoy.engine.parallelize import take_part
from convoy.errors import ConvoyError
from ranks import run_ranks


def clip_norm(parameters: list[nn.Parameter], **options: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.1, **options)


def clip_largest(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=float("inf"))


def clip_third(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=3, foreach=False)


def clip_value(parameters: list[nn.Parameter]) -> Tensor:
    nn.utils.clip_grad_value_(parameters, 0.01)
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clip_by_hand(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = sum((g.detach() ** 2).sum() for g in gradients) ** 0.5
    also = sum(g.norm(2).item() ** 2 for g in gradients) ** 0.5
    assert abs(float(total) - also) < 1e-12
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.1 / also))
    assert all(bool(g.isfinite().all()) for g in gradients)
    return torch.tensor(float(max(g.abs().max() for g in gradients)) + also + float(sum(g.mean() for g in gradients)))


CLIPS = {f.__name__: f for f in (clip_norm, clip_largest, clip_third, clip_value, clip_by_hand)}


def clipped(plan: str, clip: str) -> tuple[float, float]:
    net, mine = ranks_net(plan, checks=clip != "clip_value")  # gradients answer without the comparisons too
    serial = small()
    norms, want = train(net, mine, CLIPS[clip]), train(serial, slice(None), CLIPS[clip])
    assert all(type(v) is Tensor for p in net.parameters() if p.grad is not None for v in [p.data])
    return max(abs(a - b) for a, b in zip(norms, want, strict=True)), far(convoy.state_dict(net), serial.state_dict())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("clip", CLIPS)
def test_torchs_clipping_is_that_of_one_device(plan: str, clip: str) -> None:
    for norms, weights in run_ranks(clipped, 2, plan, clip):
        assert norms < 1e-12
        assert weights < 1e-9


def clipped_alone() -> tuple[float, float]:
    net = small()
    take_part(net, "filter=2", IMAGES[:4])  # as it was before gradients answered for their whole tensors
    mine = convoy.local_samples(net, len(IMAGES))
    serial = small()
    norms, want = train(net, mine, clip_norm), train(serial, slice(None), clip_norm)
    return max(abs(a - b) for a, b in zip(norms, want, strict=True)), 0.0


def test_a_part_has_another_norm() -> None:
    assert max(run_ranks(clipped_alone, 2))[0] > 1e-3


def looked_into() -> None:
    net, mine = ranks_net("filter=2")
    loss_of(net, mine).backward()
    gradient = net[0].weight.grad
    whole = convoy.gradients(net)["0.weight"]
    for function in (lambda g: g.sum(0), lambda g: g.flatten(), lambda g: g.numpy(), lambda g: g.std()):
        with pytest.raises(ConvoyError, match=r"convoy\.gradients"):
            function(gradient)
    with pytest.raises(ConvoyError, match=r"convoy\.gradients"):
        torch.save(gradient, os.devnull)
    assert gradient.shape == (3, 3, 3, 3) and "DividedGradient" in repr(gradient)
    assert copy.deepcopy(gradient).norm() == gradient.norm()
    torch.testing.assert_close(gradient.norm(), whole.norm())
    torch.testing.assert_close((gradient * 2 + 1).mean(), (whole * 2 + 1).mean())
    loss_of(net, mine).backward()  # it adds up as ever
    torch.testing.assert_close(convoy.gradients(net)["0.weight"], 2 * whole)
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.step()
    assert all(type(v) is Tensor for state in optimizer.state.values() for v in state.values())


def test_what_would_take_a_part_for_the_whole_is_refused() -> None:
    run_ranks(looked_into, 2)


def scaled(plan: str) -> tuple[float, float]:
    """A loss scale that is too large on the rank with the largest gradient alone: all leave the update out."""
    net = convoy.parallelize(small().float(), plan, IMAGES[:4].float())
    mine = convoy.local_samples(net, len(IMAGES))
    before = convoy.state_dict(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(F.cross_entropy(net(IMAGES[mine].float()), LABELS[mine])).backward()
    if rank() == 1:
        with torch._C.DisableTorchFunctionSubclass():
            net[0].weight.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return far(convoy.state_dict(net), {"0.weight": before["0.weight"]}), scaler.get_scale()


def test_all_ranks_leave_out_the_update_that_one_cannot_make() -> None:
    assert run_ranks(scaled, 2, "filter=2") == [(0.0, 512.0)] * 2


def broken_off() -> None:
    net, mine = ranks_net("filter=2")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulator, _ = net[0].weight.view_as(net[0].weight).grad_fn.next_functions[0]
    handle = accumulator.register_prehook(_break)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, mine).backward()
    handle.remove()
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(net, mine).backward()
        assert isinstance(net[0].weight.grad, DividedGradient)
        optimizer.step()


def _break(gradients: tuple[Tensor, ...]) -> None:
    raise ZeroDivisionError


def test_a_backward_pass_that_broke_off_is_forgotten() -> None:
    run_ranks(broken_off, 2)
