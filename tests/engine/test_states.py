"""States of parts are loaded where they fit and cut out of whole ones; on one device the engine is out of the way."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_loops import IMAGES, LABELS, loss_of, rank, ranks_net, small
from torch import Tensor, nn

import convoy
from convoy.errors import ConvoyError
from ranks import run_ranks
from small_nets import SMALL_NETS


def from_rank_0(value: Any) -> Any:
    """What rank 0 would save with `torch.save`, read on every rank."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank() == 0:
        torch.save(value, file := io.BytesIO())
        store.set("state", file.getvalue())
    return torch.load(io.BytesIO(store.get("state")), weights_only=True)


def states(plan: str) -> None:
    net = ranks_net(plan)[0]
    assert net.state_dict()["0.weight"].data_ptr() == net[0].weight.data_ptr()
    other = convoy.parallelize(small(), plan, IMAGES[:4])
    with torch.no_grad():
        net[0].weight.add_(1)
    other.load_state_dict(copy.deepcopy(net.state_dict()))  # the same parts
    assert torch.equal(other[0].weight, net[0].weight)
    whole = {name: tensor * 2 for name, tensor in small().state_dict().items()}
    other.load_state_dict(whole)  # cut
    assert all(torch.equal(tensor, whole[name]) for name, tensor in convoy.state_dict(other).items())
    saved = from_rank_0(net.state_dict())
    if rank() == 1:
        with pytest.raises(ConvoyError, match=r"rank 0 of 2 under plan .* save with convoy\.save"):
            other.load_state_dict(saved)
        with pytest.raises(RuntimeError, match="rank 0 of 2 under plan"):
            small().load_state_dict(saved)
        unmarked = {name: tensor for name, tensor in saved.items() if name in small().state_dict()}
        for strict in (True, False):
            with pytest.raises(ConvoyError, match="does not say of which"):
                other.load_state_dict(unmarked, strict=strict)


def test_a_state_is_loaded_where_it_fits() -> None:
    for plan in ("filter=2", "owt=2"):
        run_ranks(states, 2, plan)


def optimizer_states(plan: str, kind: str) -> str | None:
    net, mine = ranks_net(plan)
    serial = small()
    optimizer = torch.optim.Adam((serial if kind == "whole" else net).parameters())
    (F.cross_entropy(serial(IMAGES), LABELS) if kind == "whole" else loss_of(net, mine)).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict()) if kind == "own" else from_rank_0(optimizer.state_dict())
    fresh = torch.optim.Adam(net.parameters())
    fresh.load_state_dict(saved)
    net.zero_grad()
    loss_of(net, mine).backward()
    try:
        fresh.step()
    except ConvoyError as error:
        return str(error)
    return None


def test_an_optimizers_state_of_other_parts_is_refused_before_it_steps() -> None:
    first, second = run_ranks(optimizer_states, 2, "filter=2", "first")
    assert first is None and second is not None and "rank 0 of 2 under plan filter=2" in second
    for text in run_ranks(optimizer_states, 2, "filter=2", "whole"):
        assert text is not None and "load it with convoy.load_optimizer_state_dict" in text
    assert run_ranks(optimizer_states, 2, "filter=2", "own") == [None, None]
    assert run_ranks(optimizer_states, 2, "sample=2", "first") == [None, None]


PICTURES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return SMALL_NETS[name]()


def trained(model: nn.Module) -> list[Tensor]:
    model(PICTURES).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())


def test_on_one_device_the_bits_are_those_of_the_plain_network() -> None:
    for name, plan in (("depthwise", "serial"), ("shuffle", "sample=1")):
        plain = build(name)
        net = convoy.parallelize(copy.deepcopy(plain), plan, example=PICTURES)
        assert all(map(torch.equal, trained(plain), trained(net)))
        assert torch.equal(plain.eval()(PICTURES), net.eval()(PICTURES))
