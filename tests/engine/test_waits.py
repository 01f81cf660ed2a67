"""A measurement hears of every wait for other ranks, and of nothing else."""

import contextlib

import torch
from torch import nn

import convoy
from convoy.comm.collectives import waits, watching
from ranks import run_ranks


class Heard:
    def __init__(self) -> None:
        self.depth = self.entered = 0

    def enter(self) -> None:
        self.depth += 1
        self.entered += 1

    def leave(self) -> None:
        self.depth -= 1


def waits_of(plan: str) -> tuple[int, int, int]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    images = torch.randn(2, 3, 8, 8)
    net = convoy.parallelize(model, plan, example=images)
    net(images).sum().backward()
    with watching(heard := Heard()):
        output = net(images)
        forward = heard.entered
        output.sum().backward()
    net(images)
    return forward, heard.entered, heard.depth


def test_several_devices_wait() -> None:
    by_samples, by_filters = run_ranks(waits_of, 2, "sample=2"), run_ranks(waits_of, 2, "filter=2")
    for (forward, both, depth), (more, _, _) in zip(by_samples, by_filters, strict=True):
        assert both > forward  # gradients
        assert more > forward  # activations
        assert depth == 0


def test_one_device_waits_for_nobody() -> None:
    assert run_ranks(waits_of, 1, "serial") == [(0, 0, 0)]


def test_an_error_ends_the_wait() -> None:
    @waits
    def fails() -> None:
        raise ZeroDivisionError

    with watching(heard := Heard()), contextlib.suppress(ZeroDivisionError):
        fails()
    assert (heard.entered, heard.depth) == (1, 0)
