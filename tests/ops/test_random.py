"""Random numbers that depend on seed, step, layer and sample alone."""

import pytest
import torch

import interpreted
from convoy.ops import random_bits as module
from convoy.ops.random_bits import drop, layer_key, random_bits, sample_keys


def test_numbers_are_a_function_of_seed_step_layer_sample_and_place() -> None:
    whole = random_bits(sample_keys(1, 2, range(8)), layer_key("drop"), 100)
    assert torch.equal(whole[5:7, :30], random_bits(sample_keys(1, 2, [5, 6]), layer_key("drop"), 30))
    base = random_bits(sample_keys(0, 0, [0]), layer_key("a"), 1000)
    for (seed, step, sample), layer in (((1, 0, 0), "a"), ((0, 1, 0), "a"), ((0, 0, 1), "a"), ((0, 0, 0), "b")):
        other = random_bits(sample_keys(seed, step, [sample]), layer_key(layer), 1000)
        assert (base == other).float().mean() < 0.01


def test_numbers_are_uniform_and_uncorrelated() -> None:
    bits = random_bits(sample_keys(3, 4, range(64)), layer_key("drop"), 4096)
    share = (bits.double() + 2**31) / 2**32
    expected = share.numel() / 64
    chi_square = ((torch.histc(share, bins=64, min=0, max=1) - expected) ** 2 / expected).sum()
    assert chi_square < 120  # 63 degrees of freedom: 1 in 20,000 is above
    assert torch.corrcoef(share).fill_diagonal_(0).abs().max() < 0.08
    assert torch.corrcoef(torch.stack([share[:, :-1].flatten(), share[:, 1:].flatten()]))[0, 1].abs() < 0.01


KEYS = sample_keys(5, 3, (7, 2**40, 1, 0, 12))
LAYER = layer_key("features.1")


def test_elements_are_dropped_by_their_numbers_wherever_they_lie_in_memory() -> None:
    x = torch.ones(4, 6, 19, 11, dtype=torch.float64)
    last = x.to(memory_format=torch.channels_last).requires_grad_()
    y = drop(last, KEYS[:4], LAYER, 0.3)
    assert torch.equal(y, drop(x, KEYS[:4], LAYER, 0.3)) and y.stride() == last.stride()
    assert abs((y != 0).double().mean() - 0.7) < 0.02 and torch.allclose(y[y != 0], torch.tensor(1 / 0.7).double())
    (gradient,) = torch.autograd.grad(y, last, torch.full_like(y, 3.0))
    assert torch.equal(gradient, 3 * y)
    lying = drop(x.movedim(1, -1).contiguous(), KEYS[:4], LAYER, 0.3).movedim(-1, 1)  # the control: as they lie
    assert not torch.equal(lying, y)
    assert not drop(x, KEYS[:4], LAYER, 1.0).any()
    assert (drop(x, KEYS[:4], LAYER, 0.3, channels=True).flatten(2).std(2) == 0).all()


def test_triton_draws_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = interpreted.kernels()["random"]
    cases = [(1, None), (1500, None), (70, torch.randperm(210, dtype=torch.int32)[:70])]
    wanted = [random_bits(KEYS, LAYER, *case) for case in cases]
    monkeypatch.setattr(module, "_fused", lambda keys: True)  # as on a GPU
    monkeypatch.setattr(module, "_kernels", lambda keys: kernels)
    assert all(torch.equal(random_bits(KEYS, LAYER, *case), want) for case, want in zip(cases, wanted, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_a_gpu_draws_and_drops_what_the_cpu_does() -> None:
    assert torch.equal(random_bits(KEYS.cuda(), LAYER, 1500).cpu(), random_bits(KEYS, LAYER, 1500))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(4, 6, 19, 11).to(dtype).to(memory_format=torch.channels_last)
        for channels in (False, True):
            got = drop(x.cuda(), KEYS[:4].cuda(), LAYER, 0.3, channels)
            assert torch.equal(got.cpu(), drop(x, KEYS[:4], LAYER, 0.3, channels))
