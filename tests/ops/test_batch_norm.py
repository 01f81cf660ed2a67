"""Batch norm in all its modes, on the CPU and as on a GPU: over ranks on real processes and by microbatch, in float64,
against the plain layer."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
import interpreted
from convoy.engine import MicrobatchNorm, StepContext
from convoy.ops import batch_norm, microbatch_norm, shared_batch_norm
from convoy.ops.microbatch_norm import Holders, normalize_at_once
from convoy.ops.shared_batch_norm import Following, all_moments, normalize_by, normalize_together, own_moments
from convoy.plans.layout import WHOLE, Layout, Split, consecutive, indices
from one_call import OneCall, run_call, worst
from ops.many_calls import Draw, as_on_a_gpu, run_calls
from ranks import RankFailed, run_ranks

CPU, SHAPE = torch.device("cpu"), (7, 6, 5, 4)
KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def samples(*sizes: int, axes: tuple[int, ...] = (0,)) -> dict[int, Split]:
    return {0: Split(axes, consecutive(sizes))}


CHANNELS = Split((0,), (indices((0, 3, 5)), indices((1, 2, 4))))
UNEVEN, ROWS = Layout.of(samples(5, 2)), Layout.of({**samples(5, 2), 2: Split((1,), consecutive((2, 3)))})


def make(
    given: Layout,
    sizes: tuple[int, ...],
    shape: tuple[int, ...] = SHAPE,
    affine: bool = True,
    track: bool = True,
    momentum: float | None = 0.1,
    by_running: bool = False,
    **options: Any,
) -> OneCall:
    """A call; `by_running`: by the running statistics, as in evaluation."""
    torch.manual_seed(1)
    channels, tensors = shape[1], {"x": torch.randn(shape, dtype=torch.float64) * 3 + 50}
    if affine:
        tensors |= {"weight": torch.rand(channels).double(), "bias": torch.randn(channels).double()}
    if track:
        statistics = torch.randn(channels).double(), torch.rand(channels).double(), torch.tensor(3)
        tensors |= dict(zip(BUFFERS, statistics, strict=True))
    attributes: dict[str, Any] = dict.fromkeys(("weight", "bias", *BUFFERS)) | {name: name for name in tensors}
    attributes |= {"input": "x", "training": not by_running, "momentum": momentum, "eps": 1e-5}
    buffers, gradient = tuple(name for name in BUFFERS if track), torch.randn(shape, dtype=torch.float64)
    options = {"training": False} | options if by_running else options
    return OneCall("batch_norm", F.batch_norm, tensors, attributes, sizes, given, gradient, buffers, **options)


def layer(case: OneCall) -> nn.Module:
    """The plain module with the case's numbers."""
    affine, track = "weight" in case.tensors, "running_mean" in case.tensors
    kind, momentum = KINDS[case.gradient.dim()], case.attributes["momentum"]
    module = kind(case.gradient.shape[1], 1e-5, momentum, affine, track, dtype=torch.float64)
    module.load_state_dict({name: t for name, t in case.tensors.items() if name != "x"})
    return module.train(case.attributes["training"])


def serial(case: OneCall, by_microbatch: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    module = layer(case).to(dtype)
    if by_microbatch:
        context = StepContext()
        context.enter(7, 0, case.microbatches, CPU)
        module = MicrobatchNorm(module, context).train()  # type: ignore[arg-type]
    x = case.tensors["x"].clone().requires_grad_()
    for _ in range(case.passes):
        y = module(x)
        y.backward(case.gradient)
    found = {"y": y.detach(), "x.grad": x.grad, **dict(module.named_buffers())}
    return found | {f"{name}.grad": p.grad for name, p in module.named_parameters()}  # type: ignore[misc]


def drawn(number: int) -> OneCall:
    draw = Draw(f"batch norm {number}")
    shape = draw.choice([SHAPE, SHAPE, (7, 6)])
    sizes, given = draw.row(shape)
    ways: list[dict[str, Any]] = [{}, {}, {"affine": False}, {"track": False}, {"momentum": None}, {"by_running": True}]
    return make(given, sizes, shape, **draw.choice(ways), passes=draw.choice([1, 2]))


@pytest.mark.parametrize(("kernels", "number"), [("cpu", 40), ("torch", 24), ("triton", 1)])
def test_statistics_are_those_of_the_whole_pass(kernels: str, number: int) -> None:
    if kernels == "triton":
        interpreted.kernels()
    cases = [*map(drawn, range(number)), make(Layout.of(samples(4, 0, 3)), (3,), passes=2)]
    cases.append(make(Layout.of({1: Split((0,), (range(0), range(6)))}), (2,)))
    for case, got in zip(cases, run_calls(cases, kernels), strict=True):
        where, error = worst(got, serial(case))
        assert error < 1e-11, f"{where} {case.given} {case.attributes}"


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_microbatches_with_divided_rows(kernels: str) -> None:
    case = make(ROWS, (2, 2), microbatches=(3, 2, 2), mode="microbatch", passes=2)
    where, error = worst(run_calls([case], kernels)[0], serial(case, by_microbatch=True))
    assert error < 1e-11, where


def test_an_exchange_that_is_left_out_is_noticed() -> None:
    case = make(UNEVEN, (2,), sabotage=(shared_batch_norm.__name__, "all_reduce"))
    where, error = worst(run_calls([case])[0], serial(case))
    assert where == "x.grad" and error > 1e-3
    for collective in ("all_reduce", "all_gather"):
        case = make(UNEVEN, (2,), sabotage=(microbatch_norm.__name__, collective))
        with pytest.raises(AssertionError):
            assert worst(run_calls([case], "torch")[0], serial(case))[1] < 1e-3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_microbatches_have_the_same_bits_on_any_number_of_ranks(momentum: float | None) -> None:
    torch.set_num_threads(1)
    rows: list[tuple[tuple[int, ...], Layout]] = [
        *(((2,), Layout.of(samples(*sizes))) for sizes in ((3, 4), (5, 2), (7, 0))),
        ((3,), Layout.of(samples(3, 2, 2))),
        ((2, 2), Layout.of({**samples(5, 2), 1: Split((1,), CHANNELS.parts)})),
        ((2,), WHOLE),
    ]
    options: dict[str, Any] = {"microbatches": (3, 2, 2), "mode": "microbatch", "passes": 2, "momentum": momentum}
    cases = [make(layout, sizes, **options) for sizes, layout in rows]
    for case in cases:
        case.tensors = {name: t.float() if t.is_floating_point() else t for name, t in case.tensors.items()}
        case.gradient = case.gradient.float()
    want = serial(cases[0], True, torch.float32)
    for case, got in zip(cases, run_calls(cases), strict=True):
        for name in ("y", "x.grad", *BUFFERS):
            assert torch.equal(got[name], want[name]), f"{name} {case.given}"


def test_a_divided_microbatch_is_refused() -> None:
    case = make(Layout.of(samples(4, 3)), (2,), microbatches=(3, 2, 2), mode="microbatch")
    with pytest.raises(RankFailed, match=r"layer 'layer': the plan divides a microbatch of 2 samples"):
        run_call(case)


def local_pass(as_on_gpus: bool) -> dict[str, Tensor]:
    """Gradients and buffers of a pass over two ranks, with each one's own statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()
    images, labels = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 3
    with mock.patch.object(batch_norm, "at_once", lambda x: as_on_gpus):
        net = convoy.parallelize(net, "sample=2", images[:4], batch_norm="local")
        mine = convoy.local_samples(net, 8)
        F.cross_entropy(net(images[mine]), labels[mine]).backward()
    return convoy.gradients(net) | convoy.state_dict(net)


def test_local_statistics_are_each_ranks_own_and_their_buffers_averaged() -> None:
    case = make(Layout.of(samples(4, 3)), (2,), mode="local")
    got, want = run_call(case), serial(case)
    assert worst(got, want)[1] > 1e-3  # the control: they are something else than those of the whole pass
    x, mean = case.tensors["x"], case.tensors["running_mean"]
    halves = [0.9 * mean + 0.1 * part.mean((0, 2, 3)) for part in x.split([4, 3])]
    assert torch.allclose(got["running_mean"], (halves[0] + halves[1]) / 2, atol=0, rtol=1e-13)
    # The kernel of GPUs follows the buffers itself, which are averaged over ranks before the backward pass.
    for fast, plain in zip(run_ranks(local_pass, 2, True), run_ranks(local_pass, 2, False), strict=True):
        assert fast.keys() == plain.keys()
        assert all(torch.allclose(fast[name], plain[name], rtol=1e-12, atol=1e-14) for name in plain)


COUNTS = (3, 2)
Numbers = dict[str, Tensor]


def parts(dtype: torch.dtype, wide: torch.dtype | None) -> tuple[Numbers, Tensor]:
    """The whole of a batch normalized on two ranks, of types `dtype` and (scale, shift, statistics) `wide`."""
    torch.manual_seed(0)
    numbers = {"x": torch.randn(5, 6, 4, 4).to(dtype), "mean": torch.zeros(6), "var": torch.ones(6)}
    numbers |= {"weight": torch.randn(6), "bias": torch.randn(6)} if wide is not None else {}
    learned = ("x", "weight", "bias")
    numbers = {name: t if name == "x" else t.to(wide or dtype) for name, t in numbers.items()}
    numbers = {name: t.requires_grad_(name in learned) for name, t in numbers.items()}
    return numbers, torch.randn(5, 6, 4, 4).to(dtype)


def together(dtype: torch.dtype, wide: torch.dtype | None, way: str) -> Numbers:
    """This rank's half: result behind a ReLU, gradients and statistics, by the kernels of a way."""
    numbers, gradient = parts(dtype, wide)
    place = dist.get_rank()
    x = numbers["x"].detach().split(COUNTS)[place].requires_grad_()
    holders = Holders(dist.group.WORLD, tuple(16 * count for count in COUNTS))  # type: ignore[arg-type]
    weight, bias = numbers.get("weight"), numbers.get("bias")
    following = Following(numbers["mean"], numbers["var"], 0.5)
    if way == "compiled":  # by the functions of which a compiled network is made
        y = normalize_by(x, weight, bias, all_moments(own_moments(x), following, holders), 1e-5).relu()
    elif way == "cpu":
        y = normalize_together(x, weight, bias, following, 1e-5, holders, relu=True)
    else:
        with as_on_a_gpu(way == "triton"):
            y = normalize_together(x, weight, bias, following, 1e-5, holders, relu=True)
            y.backward(gradient.split(COUNTS)[place])
    if way in ("compiled", "cpu"):
        y.backward(gradient.split(COUNTS)[place])
    learned = {"weight.grad": weight.grad, "bias.grad": bias.grad} if weight is not None else {}
    return {"y": y.detach(), "x.grad": x.grad, "mean": numbers["mean"], "var": numbers["var"], **learned}


HALF_A_DIGIT = 2**-8 * 1.01  # what rounding to bfloat16 costs


@pytest.mark.parametrize(
    ("dtype", "wide", "way"),
    [
        *((torch.float64, torch.float64, way) for way in ("cpu", "compiled", "torch", "triton")),
        *((torch.bfloat16, wide, "torch") for wide in (torch.float32, torch.bfloat16, None)),
        (torch.bfloat16, torch.float32, "cpu"),
    ],
)
def test_ranks_with_unequal_parts_are_the_plain_layer_and_low_precision_is_rounded_to_once(
    dtype: torch.dtype, wide: torch.dtype | None, way: str
) -> None:
    if way == "triton":
        interpreted.kernels()
    numbers, gradient = parts(dtype, wide)
    numbers = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in numbers.items()}
    weight, bias = numbers.get("weight"), numbers.get("bias")
    y = F.batch_norm(numbers["x"], numbers["mean"], numbers["var"], weight, bias, True, 0.5, 1e-5).relu()
    y.backward(gradient.double())
    first, second = run_ranks(together, 2, dtype, wide, way)
    is_low = dtype == torch.bfloat16
    for name, want in {"y": y, "x.grad": numbers["x"].grad}.items():
        got = torch.cat([first[name], second[name]])
        assert ((got - want).abs() <= (HALF_A_DIGIT * want.abs() + 1e-6 if is_low else 1e-12)).all(), name
    for name in ("mean", "var"):
        close = (
            {"rtol": 2**-7, "atol": 1e-3} if is_low and wide != torch.float32 else {"rtol": 1e-5 if is_low else 1e-12}
        )
        assert torch.allclose(first[name].double(), numbers[name], **close), name
    for name in ("weight", "bias") if not is_low else ():
        assert torch.allclose(first[f"{name}.grad"] + second[f"{name}.grad"], numbers[name].grad, rtol=1e-12)


# Several microbatches at once, as on a GPU, against one after the other.

SIZES = {"even": (3, 3, 3), "uneven": (4, 4, 3), "mixed": (3, 5, 3), "one": (9,), "many": (3,) * 12}
SHAPES = {"images": (6, 5, 4), "vectors": (6,), "sequences": (70, 3), "volumes": (5, 2, 3, 2)}


def results(
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    inner: bool = False,
    affine: bool = True,
    momentum: float | None = 0.1,
    dtype: torch.dtype = torch.float64,
    run: Callable[[nn.Module], Callable[..., Tensor]] = lambda layer: layer,
    device: str = "cpu",
) -> Numbers:
    """Of two passes: the result, every gradient and the buffers."""
    torch.manual_seed(0)
    module = KINDS[len(shape) + 1](shape[0], momentum=momentum, affine=affine).double()
    x = torch.randn(sum(sizes), *shape, dtype=torch.float64) * 3 + 50
    if affine:
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    gradient = torch.randn_like(x)
    if inner:
        x = x.to(memory_format=torch.channels_last if len(shape) == 3 else torch.channels_last_3d)
    context = StepContext(batch_norm="microbatch")
    context.enter(0, 0, sizes, torch.device(device))
    net = MicrobatchNorm(module.to(device), context)
    x = x.to(device, dtype).requires_grad_()
    for _ in range(2):
        y = run(net)(x)
        y.backward(gradient.to(device, dtype))
    assert y.stride() == x.stride()
    found = {"y": y.detach(), "x": x.grad, **dict(net.named_buffers())}
    found |= {name: p.grad for name, p in net.named_parameters()}
    return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}


def compare(got: Numbers, want: Numbers, bound: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name, wanted in want.items():
        error = (got[name].double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert error <= bound, f"{name}: {error}"


def at_once(triton: bool, *case: Any, **options: Any) -> Numbers:
    with as_on_a_gpu(triton), mock.patch("convoy.engine.uncaptured.at_once", lambda x: True):
        return results(*case, **options)


VARIANTS: list[tuple[bool, float | None]] = [(True, None), (False, 0.3)]


def test_all_at_once_is_one_after_the_other() -> None:
    cases = [(sizes, shape, inner) for sizes in SIZES.values() for shape in SHAPES.values() for inner in (False, True)]
    cases = [case for case in cases if len(case[1]) > 2 or not case[2]]
    for case in (*cases, *(((4, 4, 3), (6, 5, 4), False, *variant) for variant in VARIANTS)):
        compare(at_once(False, *case), results(*case))
    with pytest.raises(AssertionError):  # the control: statistics of the whole pass
        compare(results((9,), (6, 5, 4)), results((3, 3, 3), (6, 5, 4)))


@pytest.mark.parametrize(
    "case",
    [
        ((3, 3, 3), (6, 5, 4), True),
        ((3, 5, 3), (6,), False),
        *(((20, 20, 11), (5, 13, 11), True, *variant) for variant in VARIANTS),
        *(pytest.param((sizes, (3, 300), False), marks=pytest.mark.slow) for sizes in ((3, 3, 3), (3, 5, 3))),
    ],
)
def test_triton(case: Any) -> None:
    compare(at_once(True, *case), results(*case))


@pytest.mark.parametrize("triton", [False, True])
def test_a_relu_in_the_same_operation(triton: bool) -> None:
    for affine in (False, True):
        torch.manual_seed(0)
        given = torch.randn(5, 3, 4, 3).double(), *(torch.randn(3).double() if affine else None for _ in range(2))
        gradient, found = torch.randn(5, 3, 4, 3).double(), []
        gradient[0, 0] = 0.0
        for relu in (False, True):
            tensors = [None if one is None else one.clone().requires_grad_() for one in given]
            with as_on_a_gpu(triton):
                y, _ = normalize_at_once(*tensors, 1e-5, (2, 2, 1), relu=relu)  # type: ignore[misc, arg-type]
                (y if relu else y.relu()).backward(gradient)
            found.append({"y": y.detach().relu(), **{str(i): t.grad for i, t in enumerate(tensors) if t is not None}})
        compare(found[1], found[0])
    with as_on_a_gpu(triton):
        assert normalize_at_once(torch.full((2, 3), torch.nan), None, None, 1e-5, (2,), relu=True)[0].isnan().all()


def test_at_once_in_low_precision_compiled_and_without_variance() -> None:
    def compiled(layer: nn.Module) -> Callable[..., Tensor]:
        torch._dynamo.reset()
        return torch.compile(layer, backend="aot_eager", fullgraph=True)  # type: ignore[return-value]

    case = (4, 4, 3), (6, 5, 4)
    got = at_once(False, *case, dtype=torch.bfloat16)
    assert got["y"].dtype == got["x"].dtype == torch.bfloat16
    compare(got, results(*case), 2**-5)  # x itself has lost its last digits
    compare(at_once(False, *case, run=compiled), results(*case))
    with pytest.raises(ValueError, match="more than 1 value"):
        at_once(False, (3, 1), (6,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
@pytest.mark.parametrize("shape", [*SHAPES.values(), (70, 56, 56)], ids=[*SHAPES, "large images"])
def test_a_gpu(shape: tuple[int, ...]) -> None:
    for sizes in SIZES.values():
        for inner in (False, True) if len(shape) > 2 else (False,):
            compare(results(sizes, shape, inner, device="cuda"), results(sizes, shape, inner), 1e-11)
