"""An optimizer's state by serial names: the same under every plan, loaded into any, and refused before it changes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim

import convoy
from convoy.engine.gradients import sharded as sharding
from convoy.engine.gradients.sharded import ShardedOptimizer
from convoy.engine.optimizers import divide_update
from convoy.errors import ConvoyError
from convoy.script.state import load_optimizer_state_dict, load_state_dict, optimizer_state_dict, state_dict
from ranks import run_ranks

PLANS = {"serial": 1, "sample=2": 2, "filter=2": 2, "owt=2": 2, "channel=2": 2, "sample=2,filter=2": 4}
BATCH = 8

State = dict[str, Any]


def parallel(plan: str, frozen: bool = False) -> nn.Module:
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    for parameter in net[0].parameters():
        parameter.requires_grad_(not frozen)
    return convoy.parallelize(net, plan, example=torch.zeros(2, 3, 6, 6, dtype=torch.float64))


def backward(net: nn.Module, update: int) -> None:
    generator = torch.Generator().manual_seed(update)
    images = torch.randn(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (BATCH,), generator=generator)
    mine = convoy.local_samples(net, BATCH)
    net.zero_grad()
    F.cross_entropy(net(images[mine]), labels[mine]).backward()


def adam(net: nn.Module) -> optim.Optimizer:
    weights, rest = ([p for p in net.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    return optim.Adam([{"params": weights}, {"params": rest, "lr": 0.02, "betas": (0.5, 0.9)}], lr=0.01)


def some(net: nn.Module) -> optim.Optimizer:
    return optim.AdamW([net[5].weight, *net[3].parameters()], lr=0.01)


def trainable(net: nn.Module) -> optim.Optimizer:
    return optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


def tensor_rate(net: nn.Module) -> optim.Optimizer:
    return optim.Adam(net.parameters(), lr=torch.tensor(0.01, dtype=torch.float64), foreach=False)


MADE: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "two groups": adam,
    "some parameters": some,
    "frozen": trainable,
    "not all stepped": adam,
    "learning rate as a tensor": tensor_rate,
    "fresh": adam,
}


def _state(plan: str, case: str, source: State | None) -> tuple[State, dict[str, Tensor]]:
    """The state after two updates, or after those of `source`, and after another one."""
    net = parallel(plan, frozen=case == "frozen")
    optimizer = MADE[case](net)
    updates = range(2)
    if source is not None:
        before = copy.deepcopy(source)
        load_state_dict(net, source["net"])
        load_optimizer_state_dict(net, optimizer, source["optimizer"])
        updates = range(2, 3)
    for update in updates if case != "fresh" else ():
        backward(net, update)
        if case == "not all stepped":
            net[3].weight.grad = None
        optimizer.step()
    if source is not None:
        assert alike(source, before), "what was loaded was changed by the update"
    return {"net": state_dict(net), "optimizer": optimizer_state_dict(net, optimizer)}


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def _states(plan: str, source: dict[str, State] | None) -> dict[str, State]:
    return {case: _state(plan, case, source[case] if source else None) for case in MADE}


@pytest.fixture(scope="module")
def serial() -> tuple[dict[str, State], dict[str, State]]:
    first = run_ranks(_states, 1, "serial", None)[0]
    return first, run_ranks(_states, 1, "serial", first)[0]


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in ("sample=2", "owt=2") else pytest.mark.slow) for plan in PLANS]
)
def test_every_plan_gives_the_serial_state_and_takes_it(
    plan: str, serial: tuple[dict[str, State], dict[str, State]]
) -> None:
    first, second = serial
    for found in run_ranks(_states, PLANS[plan], plan, None):
        assert alike(found, first)
        groups = [group for state in found.values() for group in state["optimizer"]["param_groups"]]
        assert all(key != "convoy_part" for group in groups for key in group)
    assert all(alike(found, second) for found in run_ranks(_states, PLANS[plan], plan, first))


def test_the_cases_are_what_they_say(serial: tuple[dict[str, State], dict[str, State]]) -> None:
    for case, state in serial[0].items():
        names, groups = set(state["optimizer"]["state"]), state["optimizer"]["param_groups"]
        assert ("3.weight" in names) == (case not in ("not all stepped", "fresh"))
        assert ("0.weight" in names) == (case not in ("some parameters", "frozen", "fresh"))
        assert groups[0]["params"][0] == {"some parameters": "5.weight", "frozen": "1.weight"}.get(case, "0.weight")


def _large(plan: str, sharded: bool, source: State | None) -> tuple[State, State, bool]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.Linear(1024, 2))
    net = convoy.parallelize(net, plan, example=torch.zeros(2, 3, 4, 4))
    plain = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "_WORTH", 0)
        optimizer = divide_update(net, plain) if sharded else plain
    if source is not None:
        load_optimizer_state_dict(net, optimizer, source)
    first = optimizer_state_dict(net, optimizer)
    for _ in range(2):
        net.zero_grad()
        images = torch.linspace(0, 1, 192).view(4, 3, 4, 4)
        net(images[convoy.local_samples(net, 4)]).square().mean().backward()
        optimizer.step()
    return first, optimizer_state_dict(net, optimizer), isinstance(optimizer, ShardedOptimizer)


@pytest.mark.slow
def test_a_divided_update_has_the_same_state() -> None:
    (_, whole, _), (_, sharded, is_sharded) = (
        run_ranks(_large, 2, "sample=2", each, None)[0] for each in (False, True)
    )
    assert is_sharded and whole["state"].keys() == sharded["state"].keys()
    for name, entry in whole["state"].items():
        torch.testing.assert_close(sharded["state"][name], entry, rtol=1e-4, atol=1e-6)
    for plan, world, divided in (("sample=2", 2, True), ("filter=2", 2, False), ("serial", 1, False)):
        assert all(alike(first, sharded) for first, _, _ in run_ranks(_large, world, plan, divided, sharded))


def refused(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ConvoyError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _wrong_states(plan: str) -> None:
    net = parallel(plan)
    optimizer = adam(net)
    backward(net, 0)
    optimizer.step()
    good = optimizer_state_dict(net, optimizer)

    def no(change: Callable[[State], Any]) -> str:
        state = copy.deepcopy(good)
        change(state)
        before = copy.deepcopy((good, state_dict(net)))
        text = refused(load_optimizer_state_dict, net, optimizer, state)
        assert alike(before, (optimizer_state_dict(net, optimizer), state_dict(net)))
        return text

    assert "has 1 parameter groups and the optimizer 2" in no(lambda s: s["param_groups"].pop())
    text = no(lambda s: s["param_groups"][0]["params"].remove("3.weight"))
    assert "3.weight is only in the optimizer's group 0: make the optimizer with the parameters" in text
    assert "9.weight is only in the state's group 0" in no(lambda s: s["param_groups"][0]["params"].append("9.weight"))
    text = no(lambda s: s["state"]["0.weight"].update(exp_avg=torch.zeros(2, 2)))
    assert "exp_avg of 0.weight is [2, 2] in the state, but 0.weight is [5, 3, 3, 3]" in text
    text = no(lambda s: [s["param_groups"][0].pop("betas"), s["param_groups"][0].update(momentum=0.9)])
    assert "group 0 has momentum and no betas, so it is not of Adam" in text
    assert "give what convoy.optimizer_state_dict returned" in no(lambda s: s.pop("param_groups"))
    assert "which is in none of its groups" in no(lambda s: s["state"].update({"7.bias": {}}))
    numbered = optimizer.state_dict()
    assert "numbers its parameters, as optimizer.state_dict() does" in no(lambda s: s.update(numbered))
    load_optimizer_state_dict(net, optimizer, good)


@pytest.mark.parametrize("plan", ["serial", "filter=2"])
def test_a_state_that_does_not_fit_changes_nothing(plan: str) -> None:
    run_ranks(_wrong_states, PLANS[plan], plan)


def _odd(plan: str) -> list[str]:
    """Parameters of others; and what has not the parameters' shape is kept where they are whole."""
    net = parallel(plan)
    before = [p.detach().clone() for p in net.parameters()]
    strange = optim.SGD([*net.parameters(), nn.Parameter(torch.zeros(7))], 0.1)
    said = [refused(optimizer_state_dict, net, strange), refused(optimizer_state_dict, net, optim.SGD(before, 0.1))]
    said.append(refused(optimizer_state_dict, nn.Linear(2, 2), strange))
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        optimizer.state[parameter] = {"row": torch.full((2, 3), 0.5), "count": 3}
    if plan == "filter=2":
        return [*said, refused(optimizer_state_dict, net, optimizer)]
    state = optimizer_state_dict(net, optimizer)["state"]["0.weight"]
    assert state["row"].shape == (2, 3) and state["count"] == 3
    adam_optimizer = adam(net)
    backward(net, 0)
    adam_optimizer.step()
    if dist.get_rank():
        del adam_optimizer.state[net[3].weight]
    return [*said, refused(optimizer_state_dict, net, adam_optimizer)]


@pytest.mark.parametrize("plan", ["sample=2", "filter=2"])
def test_parameters_of_others_odd_shapes_and_unlike_states_are_named(plan: str) -> None:
    for first, second, third, last in run_ranks(_odd, 2, plan):
        assert "group 0 of SGD holds a parameter of shape [7] that is none of the network" in first
        assert "of shape" in second and "after convoy.parallelize" in second
        assert "pass what convoy.parallelize returned" in third
        words = "SGD keeps row of another shape than 0.weight", "optimizer/3.weight is not the same on rank 1 as on"
        assert words[plan == "sample=2"] in last


def _adafactor(plan: str, source: State | None) -> tuple[State, State]:
    net = parallel(plan)
    optimizer = optim.Adafactor(net.parameters(), lr=0.01)
    for update in range(2):
        if source is not None and update == 1:
            load_state_dict(net, source["net"])
            load_optimizer_state_dict(net, optimizer, source["optimizer"])
            break
        backward(net, update)
        optimizer.step()
    first = {"net": state_dict(net), "optimizer": optimizer_state_dict(net, optimizer)}
    backward(net, 2)
    optimizer.step()
    return first, {"net": state_dict(net), "optimizer": optimizer_state_dict(net, optimizer)}


def test_factors_go_from_one_number_of_devices_to_another() -> None:
    first, second = run_ranks(_adafactor, 1, "serial", None)[0]
    assert alike(run_ranks(_adafactor, 2, "sample=2", first)[1][1], second)
