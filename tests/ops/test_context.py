"""What a pass is announced with."""

import pytest
import torch

from convoy.engine import StepContext
from convoy.errors import ConvoyError
from convoy.ops.random_bits import sample_keys

CPU = torch.device("cpu")


def test_samples_of_several_ranks() -> None:
    context = StepContext(seed=2, draws=True)
    samples = [*range(5), *range(8, 11)]
    context.enter(3, samples, (3, 2, 3), CPU)
    assert context.starts == (0, 3, 8)
    assert torch.equal(context.keys, sample_keys(2, 3, samples))
    assert torch.equal(context.keys_of(range(4, 6), 8), sample_keys(2, 3, [4, 8]))
    assert torch.equal(context.keys_of((7, 0), 8), sample_keys(2, 3, [10, 0]))


def test_consecutive_samples_and_ranks_without_any() -> None:
    context = StepContext()
    context.enter(0, 6, (2, 0, 3), CPU)
    assert context.starts == (6, -1, 8)
    assert len(context.keys) == 0  # nobody draws


def test_a_layer_that_is_built_after_the_announcement_gets_its_keys() -> None:
    context = StepContext(seed=1)
    context.enter(4, 0, (3,), CPU)
    context.need_keys()
    assert torch.equal(context.keys, sample_keys(1, 4, range(3)))


def test_a_pass_that_was_not_announced_is_refused() -> None:
    with pytest.raises(ConvoyError, match="draws random numbers for 4 samples, but 0 were announced"):
        StepContext().keys_of(range(4), 4)
