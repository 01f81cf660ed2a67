"""Batch norm of several microbatches at once, as on a GPU, against one after the other, in float64 on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import interpreted
from convoy.engine import MicrobatchNorm, StepContext
from convoy.ops import microbatch_norm
from convoy.ops.microbatch_norm import normalize_at_once

SIZES = {"even": (3, 3, 3), "uneven": (4, 4, 3), "mixed": (3, 5, 3), "one": (9,), "many": (3,) * 12}
SHAPES = {"images": (6, 5, 4), "vectors": (6,), "sequences": (70, 3), "volumes": (5, 2, 3, 2)}
KINDS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@contextmanager
def all_at_once(kernels: object = None) -> Iterator[None]:
    """Let the CPU do as a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.engine.layers.at_once", lambda x: True)
        patch.setattr(microbatch_norm, "batch_norm_kernels", lambda x: kernels)
        yield


def results(
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    inner: bool = False,
    affine: bool = True,
    momentum: float | None = 0.1,
    dtype: torch.dtype = torch.float64,
    run: Callable[[nn.Module], Callable[..., Tensor]] = lambda layer: layer,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Of two passes: the result, every gradient and the buffers."""
    torch.manual_seed(0)
    layer = KINDS[len(shape) - 1](shape[0], momentum=momentum, affine=affine).double()
    x = torch.randn(sum(sizes), *shape, dtype=torch.float64) * 3 + 50
    if affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    gradient = torch.randn_like(x)
    if inner:
        x = x.to(memory_format=torch.channels_last if len(shape) == 3 else torch.channels_last_3d)
    context = StepContext(batch_norm="microbatch")
    context.enter(0, 0, sizes, torch.device(device))
    net = MicrobatchNorm(layer.to(device), context)
    x = x.to(device, dtype).requires_grad_()
    for _ in range(2):
        y = run(net)(x)
        y.backward(gradient.to(device, dtype))
    assert y.stride() == x.stride()
    found = {"y": y.detach(), "x": x.grad, **dict(net.named_buffers())}
    found |= {name: p.grad for name, p in net.named_parameters()}
    return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], bound: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name, wanted in want.items():
        error = (got[name].double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert error <= bound, f"{name}: {error}"


VARIANTS: list[tuple[bool, float | None]] = [(True, None), (False, 0.3)]


def test_all_at_once_is_one_after_the_other() -> None:
    cases = [(sizes, shape, inner) for sizes in SIZES.values() for shape in SHAPES.values() for inner in (False, True)]
    for sizes, shape, inner in cases:
        if len(shape) > 2 or not inner:
            with all_at_once():
                got = results(sizes, shape, inner)
            compare(got, results(sizes, shape, inner))
    for affine, momentum in VARIANTS:
        with all_at_once():
            got = results((4, 4, 3), (6, 5, 4), affine=affine, momentum=momentum)
        compare(got, results((4, 4, 3), (6, 5, 4), affine=affine, momentum=momentum))
    with pytest.raises(AssertionError):  # the control: statistics of the whole pass
        compare(results((9,), (6, 5, 4)), results((3, 3, 3), (6, 5, 4)))


@pytest.mark.parametrize(
    "case", [((3, 3, 3), (6, 5, 4), True), ((3, 5, 3), (6, 5, 4), False), ((3, 5, 3), (6,), False)]
)
def test_triton(case: tuple[tuple[int, ...], tuple[int, ...], bool]) -> None:
    with all_at_once(interpreted.kernels()["microbatch"]):
        got = results(*case)
    compare(got, results(*case))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 5, 3)])
def test_triton_of_sequences(sizes: tuple[int, ...]) -> None:
    with all_at_once(interpreted.kernels()["microbatch"]):
        got = results(sizes, (3, 300))
    compare(got, results(sizes, (3, 300)))


@pytest.mark.parametrize(("affine", "momentum"), VARIANTS)
def test_triton_variants(affine: bool, momentum: float | None) -> None:
    with all_at_once(interpreted.kernels()["microbatch"]):
        got = results((20, 20, 11), (5, 13, 11), True, affine, momentum)
    compare(got, results((20, 20, 11), (5, 13, 11), True, affine, momentum))


@pytest.mark.parametrize("triton", [False, True])
def test_a_relu_in_the_same_operation(triton: bool) -> None:
    kernels = interpreted.kernels()["microbatch"] if triton else None
    for affine in (False, True):
        torch.manual_seed(0)
        given = torch.randn(5, 3, 4, 3).double(), *(torch.randn(3).double() if affine else None for _ in range(2))
        gradient, found = torch.randn(5, 3, 4, 3).double(), []
        gradient[0, 0] = 0.0
        for relu in (False, True):
            tensors = [None if one is None else one.clone().requires_grad_() for one in given]
            with all_at_once(kernels):
                y, _ = normalize_at_once(*tensors, 1e-5, (2, 2, 1), relu=relu)  # type: ignore[misc, arg-type]
                (y if relu else y.relu()).backward(gradient)
            found.append({"y": y.detach().relu(), **{str(i): t.grad for i, t in enumerate(tensors) if t is not None}})
        compare(found[1], found[0])
    with all_at_once(kernels):
        assert normalize_at_once(torch.full((2, 3), torch.nan), None, None, 1e-5, (2,), relu=True)[0].isnan().all()


def test_low_precision_is_rounded_to_once_and_one_value_has_no_variance() -> None:
    with all_at_once():
        got = results((4, 4, 3), (6, 5, 4), dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="more than 1 value"):
            results((3, 1), (6,))
    assert got["y"].dtype == got["x"].dtype == torch.bfloat16
    compare(got, results((4, 4, 3), (6, 5, 4)), 2**-5)  # x itself has lost its last digits


def test_compiled() -> None:
    def compiled(layer: nn.Module) -> Callable[..., Tensor]:
        torch._dynamo.reset()
        return torch.compile(layer, backend="aot_eager", fullgraph=True)  # type: ignore[return-value]

    with all_at_once():
        got = results((4, 4, 3), (6, 5, 4), run=compiled)
    compare(got, results((4, 4, 3), (6, 5, 4)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
@pytest.mark.parametrize("shape", [*SHAPES.values(), (70, 56, 56)], ids=[*SHAPES, "large images"])
def test_a_gpu(shape: tuple[int, ...]) -> None:
    for sizes in SIZES.values():
        for inner in (False, True) if len(shape) > 2 else (False,):
            compare(results(sizes, shape, inner, device="cuda"), results(sizes, shape, inner), 1e-11)
