"""States of parts: saved, loaded, cut out of whole ones, and refused where they do not fit."""

import copy
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_loops import IMAGES, LABELS, loss_of, rank, ranks_net, small

import convoy
from convoy.errors import ConvoyError
from ranks import run_ranks


def states(plan: str) -> None:
    net = ranks_net(plan)[0]
    own = net.state_dict()
    assert own["0.weight"].data_ptr() == net[0].weight.data_ptr()
    other = convoy.parallelize(small(), plan, IMAGES[:4])
    with torch.no_grad():
        net[0].weight.add_(1)
    other.load_state_dict(copy.deepcopy(net.state_dict()))  # the same parts
    assert torch.equal(other[0].weight, net[0].weight)
    whole = {name: tensor * 2 for name, tensor in small().state_dict().items()}
    other.load_state_dict(whole)  # cut
    assert all(torch.equal(tensor, whole[name]) for name, tensor in convoy.state_dict(other).items())
    folder = torch.distributed.distributed_c10d._get_default_store()
    if rank() == 0:
        folder.set("state", _packed(net.state_dict()))
    theirs = _unpacked(folder.get("state"))
    if rank() == 1:
        with pytest.raises(ConvoyError, match=r"rank 0 of 2 under plan .* save with convoy\.save"):
            other.load_state_dict(theirs)
        unmarked = {name: tensor for name, tensor in theirs.items() if name in small().state_dict()}
        with pytest.raises(ConvoyError, match="does not say of which"):
            other.load_state_dict(unmarked)
        with pytest.raises(RuntimeError, match="rank 0 of 2 under plan"):
            small().load_state_dict(theirs)
        with pytest.raises(ConvoyError, match="does not say of which"):
            other.load_state_dict(unmarked, strict=False)


def _packed(value: Any) -> bytes:
    import io

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    import io

    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.parametrize("plan", ["filter=2", "owt=2"])
def test_a_state_of_parts_is_not_loaded_where_it_does_not_fit(plan: str) -> None:
    run_ranks(states, 2, plan)


def optimizer_states(plan: str, kind: str) -> str | None:
    net, mine = ranks_net(plan)
    if kind == "whole":
        serial = small()
        optimizer = torch.optim.Adam(serial.parameters())
        F.cross_entropy(serial(IMAGES), LABELS).backward()
    else:
        optimizer = torch.optim.Adam(net.parameters())
        loss_of(net, mine).backward()
    optimizer.step()
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank() == 0:
        store.set("optimizer", _packed(optimizer.state_dict()))
    saved = _unpacked(store.get("optimizer")) if kind != "own" else copy.deepcopy(optimizer.state_dict())
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
    for said in run_ranks(optimizer_states, 2, "filter=2", "whole"):
        assert said is not None and "load it with convoy.load_optimizer_state_dict" in said
    assert run_ranks(optimizer_states, 2, "filter=2", "own") == [None, None]
    assert run_ranks(optimizer_states, 2, "sample=2", "first") == [None, None]


def checkpointed() -> str:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net = ranks_net("filter=2")[0]
    with pytest.raises((AttributeError, ConvoyError, RuntimeError)) as caught:
        get_state_dict(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return str(caught.value)


def test_torchs_distributed_checkpoint_refuses_parts() -> None:
    for said in run_ranks(checkpointed, 2):
        assert "under plan filter=2" in said and "convoy" in said


def test_a_network_is_not_pickled() -> None:
    net = convoy.parallelize(small(), "serial", IMAGES[:4])
    with pytest.raises(ConvoyError, match=r"save it by convoy\.save"):
        torch.save(net, os.devnull)
