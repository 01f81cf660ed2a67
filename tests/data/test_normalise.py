import pytest
import torch

from convoy.data import normalise
from data.made import pixels

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_formula(dtype, memory_format):
    images = torch.from_numpy(pixels(5, 7, 9, 3)).permute(0, 3, 1, 2)
    result = normalise(images, MEAN, STD, dtype=dtype, memory_format=memory_format)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (MEAN, STD))
    expected = (images.double() / 255 - mean) / std
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=memory_format)
    assert images.dtype == torch.uint8
