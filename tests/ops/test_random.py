"""Random numbers that depend on seed, step, layer and sample alone."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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


# The same as one operation, as on a GPU.

SHAPES = {"vectors": (5, 70), "sequences": (3, 6, 50), "images": (4, 6, 19, 11), "volumes": (2, 3, 4, 5, 6)}
KEYS = sample_keys(5, 3, (7, 2**40, 1, 0, 12))
LAYER = layer_key("features.1")


def _last(x: Tensor) -> Tensor:
    """With the channels innermost in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


ARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": _last,
    "rows_last": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every_other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "none": lambda x: x[:0],
}
CASES = [(shape, _last, torch.float64) for shape in SHAPES.values()]
CASES += [(SHAPES["images"], arranged, torch.float64) for arranged in ARRANGED.values()]
CASES += [(SHAPES["images"], _last, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


def as_on_a_gpu(patch: pytest.MonkeyPatch, kernels: object = None) -> None:
    patch.setattr(module, "_fused", lambda x: True)
    patch.setattr(module, "_kernels", lambda x: kernels)


@pytest.mark.slow
def test_triton_draws_and_drops_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = interpreted.kernels()["random"]
    for shape, arranged, dtype in CASES:
        torch.manual_seed(0)
        x = arranged(torch.randn(shape).to(dtype))
        x = x.sign() if dtype == torch.bfloat16 else x  # the interpreter cuts digits off where a GPU rounds
        keys = KEYS[: len(x)]
        for channels in (False, True):
            count = shape[1] if channels else x.shape[1:].numel()
            for p, part in ((0.3, None), (0.5, torch.randperm(3 * count, dtype=torch.int32)[:count]), (1.0, None)):
                want = drop(x, keys, LAYER, p, channels, part)
                with monkeypatch.context() as patch:
                    as_on_a_gpu(patch, kernels)
                    got = drop(x, keys, LAYER, p, channels, part)
                assert got.dtype == dtype and torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())
                assert got.stride() == want.stride() or arranged not in (ARRANGED["contiguous"], _last)
    wanted = [random_bits(KEYS, LAYER, count) for count in (1, 1500)]
    with monkeypatch.context() as patch:
        as_on_a_gpu(patch, kernels)
        assert all(torch.equal(random_bits(KEYS, LAYER, want.shape[1]), want) for want in wanted)
    x = torch.ones(SHAPES["images"])  # the control: elements numbered as they lie in memory
    lying = drop(x.movedim(1, -1).contiguous(), KEYS[:4], LAYER, 0.5).movedim(-1, 1)
    assert not torch.equal(lying, drop(_last(x), KEYS[:4], LAYER, 0.5))


def test_the_gradient_of_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for patches in (lambda patch: None, as_on_a_gpu):
        patches(monkeypatch)
        x = _last(torch.ones(SHAPES["images"]).double()).requires_grad_()
        y = drop(x, KEYS[:4], LAYER, 0.3, channels=False)
        results.append((y, *torch.autograd.grad(y, x, torch.full_like(y, 3.0))))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_gpu_draws_and_drops_what_the_cpu_does(shape: tuple[int, ...]) -> None:
    assert torch.equal(random_bits(KEYS.cuda(), LAYER, 1500).cpu(), random_bits(KEYS, LAYER, 1500))
    types = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype, arranged in itertools.product(types, ARRANGED.values()):
        x = arranged(torch.randn(shape).to(dtype))
        keys = KEYS[: len(x)]
        for channels in (False, True):
            got = drop(arranged(x.cuda()), keys.cuda(), LAYER, 0.3, channels)
            assert torch.equal(got.cpu(), drop(x, keys, LAYER, 0.3, channels))
