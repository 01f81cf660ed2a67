"""The optimizers against their papers' formulas, written down once more in float64."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError
from convoy.recipe.optim import AdamWConfig, GroupConfig, LambConfig, LarsConfig, OptimizerConfig, SgdConfig
from convoy.training.optimizer import check_groups, create_optimizer, set_rates

RATES = [0.5, 0.5, 0.25, 0.25, 0.1, 0.05]
Update = Callable[[Tensor, Tensor, dict[str, Tensor], float, int], Tensor]


def network() -> nn.Module:
    """A convolution with norm and bias; a weight whose norm is above 10; a weight that is 0; one without gradient."""
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
    net = nn.Sequential(*first, nn.Linear(16, 5), nn.Linear(5, 3), nn.Linear(3, 3)).double()
    with torch.no_grad():
        net[3].weight.mul_(50 / net[3].weight.norm())
        net[4].weight.zero_()
    net[5].weight.requires_grad_(False)
    return net


def gradients(net: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    return {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.1 for name, p in named}


def trained(net: nn.Module, config: OptimizerConfig) -> dict[str, Tensor]:
    optimizer = create_optimizer(net, config, lr=1.0)
    parameters = dict(net.named_parameters())
    for step, lr in enumerate(RATES):
        for name, gradient in gradients(net, step).items():
            parameters[name].grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def after_updates(optimizer: OptimizerConfig, holes: bool, fused: bool) -> list[Tensor]:
    """Weights after four updates, the second of which is followed by a state as a checkpoint gives it back; the last
    weight gets its first gradient late."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(5, 6, 3, bias=False), nn.Linear(5, 4)).double()
    wide = torch.randn(6, 5, 3, 9, dtype=torch.float64)
    net[0].weight = nn.Parameter(wide[..., :3] if holes else wide[..., :3].to(memory_format=torch.channels_last))
    made = create_optimizer(net, optimizer.model_copy(update={"fused": fused}), 0.1)
    for step in range(4):
        for parameter in net.parameters() if step else net[0].parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64)
        made.step()
        if step == 1:
            for value in (value for value in made.state[net[0].weight].values() if torch.is_tensor(value)):
                value.set_(value.clone(memory_format=torch.contiguous_format))
    return [parameter.detach() for parameter in net.parameters()]


def test_fused_kernels_do_not_mind_how_weights_gradients_and_state_lie() -> None:
    optimizers = SgdConfig(name="sgd", lr=0.1), AdamWConfig(name="adamw", lr=0.1)
    for optimizer, holes in itertools.product(optimizers, (False, True)):
        fused, plain = (after_updates(optimizer, holes, is_fused) for is_fused in (True, False))
        for mine, expected_weight in zip(fused, plain, strict=True):
            torch.testing.assert_close(mine, expected_weight, rtol=0, atol=1e-12)


def expected(net: nn.Module, update: Update) -> dict[str, Tensor]:
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    state: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
    for step, lr in enumerate(RATES):
        for name, gradient in gradients(net, step).items():
            weights[name] = update(weights[name], gradient, state[name], lr, step + 1)
    return weights


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(((a[name] - b[name]).norm() / (1e-30 + b[name].norm())).item() for name in a)


def test_groups_have_rates_decays_and_ends_of_their_own() -> None:
    net = network()
    groups = [{"parameters": "*.bias", "lr_factor": 8, "weight_decay": 0.5}, {"parameters": "3.*", "until": "4ba"}]
    groups += [{"parameters": "0.w?ight", "lr_factor": 0}]
    config = SgdConfig.model_validate({"name": "sgd", "lr": 1, "momentum": 0.9, "weight_decay": 0.25, "groups": groups})
    check_groups(net, config)
    assert not net[0].weight.requires_grad
    begin = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer, named = create_optimizer(net, config, lr=1.0, ends=(99, 4, 99)), dict(net.named_parameters())
    want, momentum = dict(begin), dict[str, Tensor]()
    for step, lr in enumerate(RATES):
        set_rates(optimizer, lr, step)
        for name, gradient in gradients(net, step).items():
            named[name].grad = gradient.clone()
            is_bias, wide = name.endswith("bias"), want[name].ndim > 1
            decayed = gradient + (0.5 if is_bias else 0.25 * wide) * want[name]
            momentum[name] = 0.9 * momentum[name] + decayed if name in momentum else decayed
            rate = lr * 8 if is_bias else 0 if name == "3.weight" and step >= 4 else lr
            want[name] = want[name] - rate * momentum[name]
        optimizer.step()
    set_rates(optimizer, 1.0, 4)  # the gradient of what has ended counts nowhere, as in clip_norm
    assert [name for name, p in named.items() if p.requires_grad and p.grad is None] == ["3.weight"]
    torch.testing.assert_close({name: p.detach() for name, p in net.named_parameters()}, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(want["0.weight"], begin["0.weight"]) and not torch.equal(want["3.weight"], begin["3.weight"])
    misspelt = "'4.bais' is the name of no parameter.*did you mean 4.bias"
    for name, words in (("5.weight", "the network does not train '5.weight'"), ("4.bais", misspelt)):
        with pytest.raises(ConvoyError, match=words):
            check_groups(net, config.model_copy(update={"groups": (GroupConfig(parameters=name),)}))


def sgd(momentum: float, decay: float, nesterov: bool) -> Update:
    def update(w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, step: int) -> Tensor:
        g = g + (decay if w.ndim > 1 else 0) * w
        v = state["v"] = momentum * state.get("v", torch.zeros_like(w)) + g
        return w - lr * (g + momentum * v if nesterov else v)

    return update


def lars(momentum: float, decay: float, trust: float, nesterov: bool = False) -> Update:
    """You, Gitman and Ginsburg, 2017, algorithm 1, with the momentum correction of Goyal et al., 2017, remark 2."""

    def update(w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, step: int) -> Tensor:
        if w.ndim > 1:
            local = trust * w.norm() / (g.norm() + decay * w.norm()) if w.norm() > 0 else 1.0
            g = local * (g + decay * w)
        v = state["v"] = momentum * state.get("v", torch.zeros_like(w)) + g
        return w - lr * (g + momentum * v if nesterov else v)

    return update


def lamb(beta1: float, beta2: float, eps: float, decay: float, all_adapt: bool = False) -> Update:
    """You et al., 2020, algorithm 2 with φ(z) = z, without the correction of the moments (version 3 of the paper)."""

    def update(w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, step: int) -> Tensor:
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(w)) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(w)) + (1 - beta2) * g**2
        r = m / (v.sqrt() + eps)
        if w.ndim <= 1 and not all_adapt:
            return w - lr * r
        r = r + decay * w
        ratio = w.norm() / (r.norm() + eps) if w.norm() > 0 else 1.0
        return w - lr * ratio * r

    return update


def adamw(beta1: float, beta2: float, eps: float, decay: float) -> Update:
    def update(w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, step: int) -> Tensor:
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(w)) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(w)) + (1 - beta2) * g**2
        direction = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        return w * (1 - lr * (decay if w.ndim > 1 else 0)) - lr * direction

    return update


ALL_DECAY = LambConfig(name="lamb", lr=1, weight_decay=0.01, decay_norm_and_bias=True)
CASES = {
    "nesterov": (SgdConfig(name="sgd", lr=1, weight_decay=0.01, nesterov=True), sgd(0.9, 0.01, True)),
    "adamw": (AdamWConfig(name="adamw", lr=1, weight_decay=0.1), adamw(0.9, 0.999, 1e-8, 0.1)),
    "lars": (LarsConfig(name="lars", lr=1, weight_decay=0.01), lars(0.9, 0.01, 0.001)),
    "lars, nesterov": (LarsConfig(name="lars", lr=1, weight_decay=0.01, nesterov=True), lars(0.9, 0.01, 0.001, True)),
    "lamb": (LambConfig(name="lamb", lr=1, weight_decay=0.01), lamb(0.9, 0.999, 1e-6, 0.01)),
    "lamb, all decay": (ALL_DECAY, lamb(0.9, 0.999, 1e-6, 0.01, all_adapt=True)),
}


def test_updates_are_those_of_the_paper() -> None:
    for case, (config, update) in CASES.items():
        want, found = expected(network(), update), trained(network(), config)
        assert largest_difference(found, want) < 1e-12, case
        assert torch.equal(found["5.weight"], network()[5].weight), case  # it has no gradient
    broken = expected(network(), lars(0.9, 0.01, 0.0011))
    assert largest_difference(trained(network(), CASES["lars"][0]), broken) > 1e-6
