"""Normalized pictures: the formula, the memory format."""

import pytest
import torch

from convoy.data import Normalize

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.25, 0.2)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_every_pixel_follows_the_formula(memory_format: torch.memory_format) -> None:
    images = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    result = Normalize(MEAN, STD, memory_format=memory_format)(images)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (MEAN, STD))
    assert torch.allclose(result.double(), (images.double() / 255 - mean) / std, atol=1e-6)
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=memory_format)
    assert torch.equal(images, before)


def test_pictures_of_one_channel() -> None:
    result = Normalize((0.5,), (0.5,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    assert torch.allclose(result, torch.tensor([[[[-1.0, 1.0]]]]))
