"""What the guard notices in a loop of one's own, and what it lets alone."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from own_loops import IMAGES, LABELS, PLANS, loss_of, rank, ranks_net, small
from torch import Tensor, nn

import convoy
from convoy.engine import guard
from convoy.engine.network import network_of
from convoy.errors import ConvoyError
from ranks import run_ranks


def lasso(weights: dict[str, Tensor]) -> Tensor:
    return torch.stack([weight.abs().sum() for weight in weights.values()]).sum()


def penalized(plan: str, penalty: str, updates: int = 2) -> str | None:
    net, mine = ranks_net(plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(updates):
        optimizer.zero_grad()
        before = sum((p**2).sum() for p in net.parameters()) if penalty == "before the pass" else torch.zeros(())
        before = convoy.penalty(net, lasso) if penalty == "ours, twice" else 1e-4 * before
        loss = loss_of(net, mine) + before
        if penalty == "weights":
            loss = loss + 1e-4 * sum((p**2).sum() for p in net.parameters())
        elif penalty == "ours, twice":
            loss = loss + convoy.penalty(net, lasso)
        elif penalty == "one":
            loss = loss + 1e-6 * net[5].bias.abs().sum()
        elif penalty == "two passes":
            loss = loss + loss_of(net, mine)
        elif penalty == "body":
            loss = loss + net[0](IMAGES[mine]).mean()
        try:
            loss.backward()
        except ConvoyError as error:
            return str(error)
        optimizer.step()
    return None


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "stage=2"])
@pytest.mark.parametrize("penalty", ["weights", "one", "before the pass"])
def test_a_penalty_outside_of_the_network_is_refused(plan: str, penalty: str) -> None:
    for said in run_ranks(penalized, 2, plan, penalty):
        assert said and "outside of the network" in said and "convoy.penalty" in said


@pytest.mark.parametrize("plan", [*PLANS, "stage=2"])
@pytest.mark.parametrize("penalty", ["none", "two passes", "ours, twice"])
def test_what_the_network_computes_is_not_taken_for_a_penalty(plan: str, penalty: str) -> None:
    assert run_ranks(penalized, 2, plan, penalty, 6) == [None, None]


def later(accumulated: int) -> int:
    """In which update a penalty is noticed that begins with the fourth, in each of its passes."""
    net, mine = ranks_net("sample=2")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for update in range(60):
        optimizer.zero_grad()
        for number in range(accumulated):
            with convoy.accumulate(net) if number < accumulated - 1 else nullcontext():
                loss = loss_of(net, mine)
                if update > 2:
                    loss = loss + 1e-3 * sum((p**2).sum() for p in net.parameters())
                try:
                    loss.backward()
                except ConvoyError:
                    return update
        optimizer.step()
    return 1000


def test_a_penalty_that_comes_later_is_noticed() -> None:
    assert max(run_ranks(later, 2, 1)) < 60
    assert max(run_ranks(later, 2, 4)) < 60


def drifting(plan: str, how: str) -> str | None:
    net, mine = ranks_net(plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01 if how != "rate" else 0.01 * (1 + rank()))
    images = IMAGES + rank() if how == "samples" else IMAGES
    try:
        for update in range(6):
            optimizer.zero_grad()
            F.cross_entropy(net(images[mine]), LABELS[mine]).backward()
            if how == "gradient" and rank() == 1:
                net[5].bias.grad.mul_(1.01)
            if not (how == "left out" and rank() == 1 and update == 2):
                optimizer.step()
            if how == "buffer" and rank() == 1:
                net[1].running_mean.add_(0.1)
            if how == "rounding" and rank() == 1:
                with torch.no_grad():
                    net[5].bias.mul_(1 + 1e-15)
    except ConvoyError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("plan", "how", "words"),
    [
        ("sample=2", "gradient", "the weight 5.bias should be the same on ranks 0 and 1, and differs by"),
        ("filter=2", "left out", "rank 0 has made 3 updates since it made its network parallel, and rank 1 2"),
        ("sample=2", "left out", "let all ranks call optimizer.step() after the same passes"),
        ("sample=2", "buffer", "the buffer 1.running_mean should be the same"),
        ("sample=2", "rate", "different options (learning rate 0.01 and 0.02)"),
        ("filter=2", "samples", "work on the same samples under this plan, and were given different ones"),
    ],
)
def test_what_drifts_apart_is_named(plan: str, how: str, words: str) -> None:
    for said in run_ranks(drifting, 2, plan, how):
        assert said is not None and words in said


@pytest.mark.parametrize("how", ["nothing", "rounding"])
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_that_go_together_are_not_disturbed(plan: str, how: str) -> None:
    assert run_ranks(drifting, 2, plan, how) == [None, None]


def all_given_the_same() -> int:
    net = convoy.parallelize(small(), "sample=2", IMAGES[:4])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            net(IMAGES[:4]).sum().backward()
    return sum("were given the same samples" in str(each.message) for each in caught)


def test_samples_that_all_ranks_have_are_warned_of_once() -> None:
    assert run_ranks(all_given_the_same, 2) == [1, 0]


def looped(how: str) -> str | None:
    """Loops that are right: nothing is to be said of them."""
    net, mine = ranks_net("filter=2" if how == "closure" else "sample=2")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    guard = network_of(net).guard
    for _ in range(40):
        optimizer.zero_grad()
        if how == "accumulates":
            for _ in range(3):
                with convoy.accumulate(net):
                    loss_of(net, mine).backward()
        elif how == "asks for gradients":
            loss = loss_of(net, mine)
            torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
            loss.backward()
            optimizer.step()
            continue
        elif how == "looks first":
            loss_of(net, mine)
        elif how == "closure":

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, mine)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                return loss

            optimizer.step(closure)
            assert all(type(v) is Tensor for state in optimizer.state.values() for v in state.values())
            continue
        loss_of(net, mine).backward()
        optimizer.step()
        assert sum(map(len, guard._uses.values())) == 0
    return None


@pytest.mark.parametrize("how", ["accumulates", "asks for gradients", "looks first", "closure"])
def test_loops_of_other_shapes_are_let_alone(how: str) -> None:
    assert run_ranks(looped, 2, how) == [None, None]


def test_checksums_are_those_of_all_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 9)
    whole = guard._checksum(x)
    assert whole == x.view(torch.int32).sum(dtype=torch.int64)
    monkeypatch.setattr(guard, "_PIECE", 10)
    assert guard._checksum(x) == whole
    x.view(torch.int32)[6, 8] ^= 1
    assert guard._checksum(x) != whole
