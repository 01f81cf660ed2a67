"""Batch norm in all its modes, on the CPU and as on a GPU: over ranks on real processes and by microbatch, in float64,
against the plain layer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
import interpreted
from convoy.ops import batch_norm
from convoy.ops.batch_norm import normalize_each
from convoy.ops.batch_norm_torch import Norm
from convoy.ops.statistics import Running, add_term, follow_at_once
from convoy.plans.layout import WHOLE, Layout, Split, consecutive, indices
from one_call import OneCall, run_call, worst
from ops.many_calls import Draw, as_on_a_gpu, run_calls
from ranks import RankFailed, run_ranks

SHAPE = (7, 6, 5, 4)
KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
Numbers = dict[str, Tensor]


def samples(*sizes: int) -> dict[int, Split]:
    return {0: Split((0,), consecutive(sizes))}


UNEVEN = Layout.of(samples(5, 2))
ROWS = Layout.of({**samples(5, 2), 2: Split((1,), consecutive((2, 3)))})
CHANNELS = Layout.of({**samples(5, 2), 1: Split((1,), (indices((0, 3, 5)), indices((1, 2, 4))))})


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


def serial(case: OneCall, dtype: torch.dtype = torch.float64) -> Numbers:
    """By the plain module with the case's numbers, one microbatch after the other where the case is by microbatch."""
    affine, track = "weight" in case.tensors, "running_mean" in case.tensors
    kind, momentum = KINDS[case.gradient.dim()], case.attributes["momentum"]
    module: nn.Module = kind(case.gradient.shape[1], 1e-5, momentum, affine, track, dtype=torch.float64)
    module.load_state_dict({name: t for name, t in case.tensors.items() if name != "x"})
    module = module.train(case.attributes["training"]).to(dtype)
    x = case.tensors["x"].clone().requires_grad_()
    for _ in range(case.passes):
        y = torch.cat([module(part) for part in x.split(case.microbatches or len(x))])
        y.backward(case.gradient)
    found = {"y": y.detach(), "x.grad": x.grad, **dict(module.named_buffers())}
    return found | {f"{name}.grad": p.grad for name, p in module.named_parameters()}  # type: ignore[misc]


def drawn(number: int) -> OneCall:
    draw = Draw(f"batch norm {number}")
    shape = draw.choice([SHAPE, SHAPE, (7, 6)])
    sizes, given = draw.row(shape)
    ways: list[dict[str, Any]] = [{}, {}, {"affine": False}, {"track": False}, {"momentum": None}, {"by_running": True}]
    return make(given, sizes, shape, **draw.choice(ways), passes=draw.choice([1, 2]))


BY_MICROBATCH: dict[str, Any] = {"microbatches": (3, 2, 2), "mode": "microbatch", "passes": 2}


@pytest.mark.parametrize(
    ("way", "number"), [pytest.param("cpu", 30, marks=pytest.mark.slow), ("torch", 20), ("triton", 1)]
)
def test_statistics_are_those_of_the_whole_pass_or_of_each_microbatch(way: str, number: int) -> None:
    if way == "triton":
        interpreted.kernels()
    cases = [*map(drawn, range(number)), make(Layout.of(samples(4, 0, 3)), (3,), passes=2)]
    cases += [make(Layout.of({1: Split((0,), (range(0), range(6)))}), (2,)), make(ROWS, (2, 2), **BY_MICROBATCH)]
    for case, got in zip(cases, run_calls(cases, way), strict=True):
        where, error = worst(got, serial(case))
        assert error < 1e-11, f"{where} {case.given} {case.attributes}"


def test_an_exchange_that_is_left_out_is_noticed_and_a_divided_microbatch_refused() -> None:
    for way, collective in (("cpu", "all_reduce"), ("torch", "all_reduce"), ("torch", "all_gather")):
        case = make(UNEVEN, (2,), sabotage=(batch_norm.__name__, collective))
        with pytest.raises(AssertionError):
            assert worst(run_calls([case], way)[0], serial(case))[1] < 1e-3
    with pytest.raises(RankFailed, match=r"layer 'layer': the plan divides a microbatch of 2 samples"):
        run_call(make(Layout.of(samples(4, 3)), (2,), **BY_MICROBATCH))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_microbatches_have_the_same_bits_on_any_number_of_ranks(momentum: float | None) -> None:
    torch.set_num_threads(1)
    rows: list[tuple[tuple[int, ...], Layout]] = [
        *(((2,), Layout.of(samples(*sizes))) for sizes in ((3, 4), (5, 2), (7, 0))),
        *(((3,), Layout.of(samples(3, 2, 2))), ((2, 2), CHANNELS), ((2,), WHOLE)),
    ]
    cases = [make(layout, sizes, momentum=momentum, **BY_MICROBATCH) for sizes, layout in rows]
    for case in cases:
        case.tensors = {name: t.float() if t.is_floating_point() else t for name, t in case.tensors.items()}
        case.gradient = case.gradient.float()
    results = run_calls(cases)
    assert worst(results[-1], serial(cases[-1], torch.float32))[1] < 1e-5
    for case, got in zip(cases, results, strict=True):
        for name in ("y", "x.grad", *BUFFERS):
            assert torch.equal(got[name], results[-1][name]), f"{name} {case.given}"


def local_pass(as_on_gpus: bool) -> Numbers:
    """Gradients and buffers of a pass over two ranks, with each one's own statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()
    images, labels = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 3
    with as_on_a_gpu("torch" if as_on_gpus else "cpu"):
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
        compare(fast, plain)


def compare(got: Numbers, want: Numbers, bound: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name, wanted in want.items():
        error = (got[name].double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-3)
        assert error <= bound, f"{name}: {error}"


# Several microbatches at once, as on a GPU, against one after the other.

SIZES = {"even": (3, 3, 3), "uneven": (4, 4, 3), "mixed": (3, 5, 3), "one": (9,), "many": (3,) * 12}
SHAPES = {"images": (6, 5, 4), "vectors": (6,), "sequences": (70, 3), "volumes": (5, 2, 3, 2)}


def results(
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    inner: bool = False,
    after: str = "",
    way: str = "cpu",
    dtype: torch.dtype = torch.float64,
    run: Any = normalize_each,
    device: str = "cpu",
) -> Numbers:
    """The result, every gradient and the terms. `after` that comes a ReLU, or a sum and a ReLU, which a GPU has in the
    same operation; "bare" is without a weight."""
    torch.manual_seed(0)
    x, gradient, residual = torch.randn(3, sum(sizes), *shape, dtype=torch.float64)
    x = (x * 3 + 50).bfloat16().double()  # numbers that every precision has
    weight, bias = torch.randn(2, shape[0], dtype=torch.float64)
    if inner:
        x = x.to(memory_format=torch.channels_last if len(shape) == 3 else torch.channels_last_3d)
    leaves = {"x": x.to(dtype)} | ({} if after == "bare" else {"weight": weight, "bias": bias})
    leaves |= {"residual": residual} if after == "sum" else {}
    leaves = {name: tensor.to(device).requires_grad_() for name, tensor in leaves.items()}
    inside, is_last = (way, device) != ("cpu", "cpu"), after in ("", "bare")
    norm = Norm(leaves.get("weight"), leaves.get("bias"), leaves.get("residual") if inside else None, 1e-5, inside)
    with as_on_a_gpu(way):
        y, terms = run(leaves["x"], norm._replace(relu=inside and not is_last), sizes)
        assert y.stride() == leaves["x"].stride()
        y = y if inside or is_last else (y + leaves.get("residual", 0.0)).relu()
        y.backward(gradient.to(device, dtype))
    numbers = {"y": y.detach(), "terms": terms} | {f"{name}.grad": leaf.grad for name, leaf in leaves.items()}
    return {name: tensor.cpu() for name, tensor in numbers.items() if tensor is not None}


def layouts(shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Whether channels come last in memory: both where a tensor has a format for it."""
    return (False, True) if len(shape) > 2 else (False,)


def test_all_at_once_is_one_after_the_other() -> None:
    cases = [(sizes, shape, inner) for sizes in SIZES.values() for shape in SHAPES.values() for inner in layouts(shape)]
    ends = ((False, "bare"), (True, "relu"), (False, "sum"))
    variants = [((4, 4, 3), (6, 5, 4), inner, after) for inner, after in ends]
    for case in (*cases, *variants):
        compare(results(*case, way="torch"), results(*case))
    with pytest.raises(AssertionError):  # the control: statistics of the whole pass
        compare(results((9,), (6, 5, 4)), results((3, 3, 3), (6, 5, 4)))
    interpreted.kernels()
    for case in (*variants, ((3, 3, 3), (6, 5, 4), True), ((3, 5, 3), (6,), False), ((20, 20, 11), (5, 13, 11), True)):
        compare(results(*case, way="triton"), results(*case))


def test_at_once_in_low_precision_compiled_and_without_variance() -> None:
    case = (4, 4, 3), (6, 5, 4)
    got = results(*case, way="torch", dtype=torch.bfloat16)
    assert got["y"].dtype == got["x.grad"].dtype == torch.bfloat16
    compare(got, results(*case), 2**-5)
    torch._dynamo.reset()
    compiled = torch.compile(normalize_each, backend="aot_eager", fullgraph=True)
    compare(results(*case, way="torch", run=compiled), results(*case))
    for momentum in (0.1, None):  # what a GPU does with the terms of several microbatches
        terms = torch.rand(5, 2, 3)
        first, second = (Running(torch.zeros(3), torch.ones(3), momentum, torch.tensor(9)) for _ in range(2))
        for number, term in enumerate(terms, 5):  # of 9
            add_term([first.mean, first.var], term.unbind(0), [momentum or 1 / number] * 2)
        follow_at_once(second, terms)
        assert torch.allclose(first.mean, second.mean) and torch.allclose(first.var, second.var)
    with pytest.raises(ValueError, match="more than 1 value"):
        results((3, 1), (6,), way="torch")
    with as_on_a_gpu("torch"), pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        batch_norm.normalize(torch.ones(1, 3, 1, 1), Norm(None, None, None, 1e-5, False), None)
    with as_on_a_gpu("torch"):
        nan = torch.full((2, 3), torch.nan)
        assert normalize_each(nan, Norm(None, None, None, 1e-5, True), (2,))[0].isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
@pytest.mark.parametrize("shape", [*SHAPES.values(), (70, 56, 56)], ids=[*SHAPES, "large images"])
def test_a_gpu(shape: tuple[int, ...]) -> None:
    for sizes in SIZES.values():
        for inner in layouts(shape):
            compare(results(sizes, shape, inner, device="cuda"), results(sizes, shape, inner), 1e-11)
