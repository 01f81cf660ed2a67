"""What ranks would not notice by themselves is refused, and what a user does around the network works."""

import copy

import pytest
import torch
from own_loops import rank, small
from torch import nn

import convoy
from convoy.errors import ConvoyError
from ranks import run_ranks


def _images(number, size=8):
    return torch.randn(number, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _other_sizes(plan):
    net = convoy.parallelize(small(), plan, _images(2))
    with pytest.raises(ConvoyError, match="all ranks must pass images of the same size and type"):
        net(_images(2, 8 + 4 * rank()))


def _other_modes(plan):
    net = convoy.parallelize(small(), plan, _images(2))
    net[1].train(rank() == 0)
    with pytest.raises(ConvoyError, match="with every module in the same mode"):
        net(_images(2))


def _frozen_norm(plan):
    """Distances of gradients and statistics from the plain network's, with its norm frozen, and with it not."""
    plain, net = small(), convoy.parallelize(small(), plan, _images(2))
    plain[1].running_mean.add_(0.5), net[1].running_mean.add_(0.5)
    plain[1].eval(), net[1].eval()
    images = _images(4)
    mine = convoy.local_samples(net, 4)
    plain(images).square().mean().backward()
    net(images[mine]).square().mean().backward()
    found = convoy.gradients(net)
    near = [(found[name] - p.grad).abs().max().item() for name, p in plain.named_parameters()]
    near += [(convoy.state_dict(net)[name] - b).abs().max().item() for name, b in plain.named_buffers()]
    plain[1].train(), plain.zero_grad()
    plain(images).square().mean().backward()
    return max(near), (found["0.weight"] - plain[0].weight.grad).abs().max().item()


def _other_numbers():
    net = convoy.parallelize(small(), "filter=2", _images(2))
    with pytest.raises(ConvoyError, match=r"pass the samples that convoy\.local_samples says"):
        net(_images(2 + rank()))


def _unfrozen():
    net = small()
    net[0].requires_grad_(False)
    net = convoy.parallelize(net, "sample=2", _images(2))
    net(_images(2)).sum().backward()
    net[0].requires_grad_(True)
    with pytest.raises(ConvoyError, match=r"set requires_grad, then call convoy\.parallelize"):
        net(_images(2))


def _changed(change, words):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = small()

        def forward(self, x):
            return self.body(x)

    net = convoy.parallelize(Block(), "filter=2" if change == "last" else "sample=2", _images(2))
    net(_images(2))
    if change == "layer":
        net.body[0] = nn.Conv2d(3, 6, 3, padding=1).double()
    elif change == "last":
        net.body[5] = nn.Linear(3, 4).double()
    elif change == "parameter":
        net.body[0].weight = nn.Parameter(torch.zeros(6, 3, 3, 3, dtype=torch.float64))
    elif change == "block":
        net.body = small()
    elif change == "taken out":
        del net.body[2]
    for each in (net, net.eval()):
        with pytest.raises(ConvoyError, match=words):
            each(_images(2))


def _unchanged():
    """What leaves the parts of the network what they are."""
    net = convoy.parallelize(small(), "sample=2", _images(2))
    net.load_state_dict(net.state_dict())
    net[0].weight.data = net[0].weight.data.clone()
    net[1].running_mean = torch.ones(6, dtype=torch.float64)
    net(_images(2)).sum().backward()
    assert net[1].running_mean.mean() < 1
    twin = copy.deepcopy(net).eval()
    twin[5] = nn.Linear(6, 2).double()
    net.eval()
    assert net(_images(2)).shape == (2, 4)


def _alone():
    """On one device there is nobody to add anything up with."""
    net = nn.Sequential(*small(), nn.Dropout())
    net[0].requires_grad_(False)
    net = convoy.parallelize(net, "serial", _images(2))
    net[0].requires_grad_(True)
    for each in (net, copy.deepcopy(net)):
        each(_images(2)).sum().backward()
        assert each[0].weight.grad is not None


def _copied(plan):
    net = convoy.parallelize(small(), plan, _images(2))
    images = _images(4)[convoy.local_samples(net, 4)]
    twin = copy.deepcopy(net)
    with pytest.raises(ConvoyError, match="train the original"):
        twin(images)
    net.eval(), twin.eval()
    with torch.no_grad():
        net[5].bias.add_(1)
        torch.testing.assert_close(twin(images) + 1, net(images))


def _seeds():
    torch.manual_seed(rank())
    net = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(192, 4)).double()
    net = convoy.parallelize(net, {"mesh": {"gpu": 2}, "layers": {"2": {"gpu": "replicate"}}}, _images(2))
    net(_images(2)).sum().backward()
    return net[2].weight.grad.sum().item()


def _clipped(plan):
    serial, images = small(), _images(4)
    serial(images).square().mean().backward()
    want = nn.utils.clip_grad_norm_(serial.parameters(), 0.01)
    net = convoy.parallelize(small(), plan, images[:2])
    net(images[convoy.local_samples(net, 4)]).square().mean().backward()
    got = convoy.clip_grad_norm_(net, 0.01)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=0)
    for name, gradient in convoy.gradients(net).items():
        torch.testing.assert_close(gradient, serial.get_parameter(name).grad, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "height=2"])
def test_images_of_other_sizes(plan):
    run_ranks(_other_sizes, 2, plan)


def test_other_numbers_of_the_same_samples():
    run_ranks(_other_numbers, 2)


def test_parameters_that_are_unfrozen_later():
    run_ranks(_unfrozen, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("layer", r"body\.0 was replaced or taken out after convoy\.parallelize"),
        ("last", r"body\.5 was replaced"),
        ("parameter", r"body\.0\.weight was replaced"),
        ("block", "body was replaced"),
        ("taken out", r"body\.2 was replaced or taken out"),
    ],
)
def test_layers_and_parameters_that_are_replaced_later(change, words):
    run_ranks(_changed, 2, change, words)


def test_what_may_change_later():
    run_ranks(_unchanged, 2)


def test_one_device_may_do_all_of_it():
    run_ranks(_alone, 1)


@pytest.mark.parametrize("plan", ["sample=2", "filter=2"])
def test_copies_are_for_evaluation(plan):
    run_ranks(_copied, 2, plan)


def test_masks_do_not_depend_on_the_seeds_of_ranks():
    first, second = run_ranks(_seeds, 2)
    assert first == second


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "owt=2"])
def test_gradients_are_clipped_by_the_norm_of_all(plan):
    run_ranks(_clipped, 2, plan)


@pytest.mark.parametrize("plan", ["sample=2", "filter=2"])
def test_modules_keep_a_mode_of_their_own_which_is_that_of_all_ranks(plan):
    for near, far in run_ranks(_frozen_norm, 2, plan):
        assert near < 1e-12
        assert far > 1e-4
    run_ranks(_other_modes, 2, plan)
