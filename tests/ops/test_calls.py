"""Every operation as a network calls it: recognized, divided at random, and run rank by rank beside the whole call,
forwards and backwards in float64. What talks to other ranks is in `test_norms.py` and `test_batch_norm.py`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.errors import ConvoyError
from convoy.ops import OPERATIONS, capture, slices
from convoy.ops.kernel import as_called
from convoy.plans.layout import Layout, Split, balanced, consecutive
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch, Placed, Situation
from convoy.plans.windows import Need, Window
from graph.replay import replay, same
from one_call import close, run
from ops.many_calls import GRID, THREE, TWO, Draw

SHAPE, Function = (2, 4, 6, 6), Callable[[Any, Tensor], Any]
STRATEGIES = ("replicate", "sample", "filter", "channel", "height", "width")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        shapes = {"w": (4, 2, 3, 3), "plain": (4, 4, 3, 3), "b": (4,), "w1": (4, 4, 3), "fc": (5, 6)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def check(function: Function, x: Tensor, mesh: Mesh, given: Layout, strategy: tuple[str, ...] = ()) -> Placed:
    """The ranks together do what the whole call does: the result, and the gradients of input and parameters."""
    model = Net(function)
    graph = capture(model, (x,))
    (call,) = graph.calls
    tensors = [(x if name == "x" else model.get_parameter(name)).detach().requires_grad_() for name in call.inputs]
    whole = replay(graph, model, [tensors[call.inputs.index("x")]])
    whole = [whole] if isinstance(whole, Tensor) else list(whole)
    axes = tuple(axis for axis, one in enumerate(strategy) if one == "sample")
    batch = Batch(mesh, axes, consecutive([len(part) for part in balanced(len(x), mesh.size(axes))]))
    placed = OPERATIONS[call.op].place(Situation(graph, mesh, batch, call, strategy, {"x": given}))
    shares = [torch.randn_like(y) for y in whole]
    parameters = [t if name == "x" else model.get_parameter(name) for name, t in zip(call.inputs, tensors, strict=True)]
    wanted = torch.autograd.grad(whole, parameters, shares)
    outputs, gradients = run(graph, placed, mesh, tensors, shares)
    for got, want in zip([*outputs, *gradients], [*whole, *wanted], strict=True):
        close(got, want, f"{placed}")
    return placed


SENDS = {"batch_norm", "group_norm", "layer_norm", "rms_norm", "dropout"}
# By operation: calls that are it, as a network `m` with an input `x` writes them.
CASES = {
    "conv": """F.conv2d(x, m.w, m.b, 2, (1, 0), groups=2) | F.conv2d(x, m.plain, padding="same", dilation=(1, 3))
        | F.conv2d(x, m.w, groups=2, padding="valid")
        | F.conv_transpose2d(x, m.plain, m.b, stride=2, padding=1, output_padding=1)""",
    "linear": "F.linear(x, m.fc)",
    "batch_norm": "F.batch_norm(x, None, None, m.b, m.b, True)",
    "group_norm": "F.group_norm(x, 2, m.b, eps=1e-3) | F.instance_norm(x, weight=m.b)",
    "layer_norm": "F.layer_norm(x, [6, 6])",
    "rms_norm": "F.rms_norm(x, [6, 6])",
    "softmax": "F.softmax(x, -3) | x.log_softmax(1)",
    "dropout": "F.dropout(x, 0.3) | F.dropout2d(x, 0.3, True, True) | torch.feature_dropout(x, 0.3, True)",
    "lrn": "F.local_response_norm(x, 2, k=2.0) | F.local_response_norm(x, 5)",
    "max_pool": "torch.max_pool2d(x, 3, [1, 2], 1, ceil_mode=True)",
    "adaptive_avg_pool": "F.adaptive_avg_pool2d(x, (None, 2))",
    "adaptive_max_pool": "nn.AdaptiveMaxPool2d(3)(x)",
    "cat": "torch.concat((x, x), axis=1)",
    "reshape": "x.flatten(1) | x.unflatten(1, (2, 2)) | x.reshape(2, 12, 12)",
    "permute": "x.permute(0, 2, -1, 1) | torch.permute(x, [0, 2, 3, 1]) | x.transpose(-1, 1) | x.movedim(1, -1) | x.mT",
    "split": """x.chunk(3, 1) | torch.split(x, [1, 3], dim=-3) | x.tensor_split(2, dim=3) | torch.chunk(x, 2, axis=1)
        | torch.tensor_split(x, 2, axis=2)""",
    "select": """x[:, 1:, ..., ::2] | x[:, -1] | x.narrow(1, 1, 2) | x.select(1, 2)
        | torch.narrow(x, axis=3, start=1, length=2) | torch.select(x, axis=2, index=-1)""",
    "reduce": """x.mean() | x.amax(dim=1) | torch.sum(x, 1, keepdim=True) | x.mean(axis=(2, 3), keepdims=True)
        | torch.sum(a=x)""",
    "interpolate": "nn.Upsample(size=(7, 8))(x)",
    "pad": "nn.ReflectionPad2d(1)(x)",
    "identity": """x.clone() | x.expand(2, 4, -1, 6) | x.to(memory_format=torch.channels_last) | F.dropout2d(x, 0.0)
        | F.alpha_dropout(x, 0.5, False) | x.double()""",
    "elementwise": """F.prelu(x, m.b) | F.leaky_relu(x, 0.1, True) | torch.rsub(x, 1)
        | torch.addcmul(x, x, x, value=0.5)""",
    "opaque": """x[:, [0, 2]] | torch.einsum("nchw,nchw->nc", x, x) | F.scaled_dot_product_attention(x, x, x)
        | F.normalize(x) | x.unfold(2, 3, 1) | F.unfold(x, 3) | x.roll((1, 1), (2, 3)) | x.flip(2, 3)
        | x.cumsum(axis=1) | x.tensor_split((3, 2), 1) | torch.ops.aten.square(x)""",
}


def written(text: str) -> Function:
    function: Function = eval(f"lambda m, x: {text.strip()}", {"torch": torch, "F": F, "nn": nn})
    return function


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("op", CASES)
def test_calls_are_recognized_and_ranks_together_do_what_the_whole_call_does(op: str) -> None:
    for text in CASES[op].split(" | "):
        function, x, draw = written(text), tensor(*SHAPE), Draw(text)
        model = Net(function)
        graph = capture(model, (x,))
        calls = [call.op for call in graph.calls]
        assert calls == [op] or (op == "identity" and not calls), text
        assert op == "dropout" or same(replay(graph, model, (x,)), model(x.clone())), text
        for mesh in () if op in SENDS or not calls else (TWO, THREE, GRID):
            check(function, x, mesh, draw.layout(SHAPE, mesh))


# Options, shapes and layouts at random: a call from a source of random choices, and the shape of its input.


def pool(draw: Draw, kind: str) -> tuple[Function, tuple[int, ...]]:
    num = draw.choice([1, 2, 2, 3])
    kernel, is_max = draw.randint(1, 5), kind == "max_pool"
    options: dict[str, Any] = {"stride": draw.randint(1, 3), "padding": draw.randint(0, kernel // 2)}
    options["ceil_mode"] = draw.random() < 0.5
    if is_max:
        options["dilation"] = 2 if 2 * kernel - 1 <= 5 and draw.random() < 0.4 else 1
    else:
        options["count_include_pad"] = draw.random() < 0.5
        options["padding"] *= num < 3  # torch pads no volumes that are smaller than the kernel
        options |= {"divisor_override": 4} if num > 1 and draw.random() < 0.3 else {}
    function, sizes = getattr(F, f"{kind}{num}d"), (draw.randint(5, 12 if num < 3 else 6) for _ in range(num))
    return lambda m, x: function(x, kernel, **options), (2, 3, *sizes)


def adaptive(draw: Draw, kind: str) -> tuple[Function, tuple[int, ...]]:
    num = draw.choice([1, 2, 2, 3])
    sizes = tuple(draw.choice([4, 6, 8] if num < 3 else [4, 6]) for _ in range(num))
    out = draw.choice([tuple(draw.choice([1, draw.randint(1, 6), size // 2]) for size in sizes), (1,) * num])
    function = getattr(F, f"{kind}{num}d")
    return lambda m, x: function(x, out), (2, 3, *sizes)


def resize(draw: Draw) -> tuple[Function, tuple[int, ...]]:
    num = draw.choice([1, 2, 2, 3])
    modes = ["nearest", "nearest-exact", "area", {1: "linear", 2: "bilinear", 3: "trilinear"}[num]]
    shape, factors = tuple(draw.randint(3, 6) for _ in range(num)), tuple(draw.choice([1, 2, 3]) for _ in range(num))
    size = {"size": tuple(side * factor for side, factor in zip(shape, factors, strict=True))}
    odd = {"scale_factor": draw.choice([1.5, 2.1])} if num == 2 else {"size": (7,) * num}
    options: dict[str, Any] = {"mode": draw.choice([*["nearest"] * 3, *modes])}
    options |= draw.choice([size, size, {"scale_factor": 2.0}, odd])
    return lambda m, x: F.interpolate(x, **options), (2, 3, *shape)


def select(draw: Draw) -> tuple[Function, tuple[int, ...]]:
    shape, key = (4, 3, 8, 5), list[Any]()
    for dim, size in enumerate(shape):
        start = draw.randint(0, size - 1)
        one = draw.random() < 0.1 * dim
        key.append(start if one else slice(start, draw.randint(start + 1, size), draw.randint(1, 3)))
    return lambda m, x: x[tuple(key)], shape


def chunks(draw: Draw) -> tuple[Function, tuple[int, ...]]:
    shape, dim = (4, 8, 6), draw.randint(0, 2)
    cuts = sorted(draw.randint(0, shape[dim]) for _ in range(draw.randint(1, 4)))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, shape[dim]], strict=True)]
    return lambda m, x: torch.split(x, sizes, draw.choice([dim, dim - 3])), shape


def pad(draw: Draw) -> tuple[Function, tuple[int, ...]]:
    mode, flat = draw.choice(["reflect", "replicate", "circular"]), tuple(draw.randint(0, 3) for _ in range(4))
    if draw.random() < 0.8:
        mode, flat = "constant", (*(draw.randint(-2, 3) for _ in range(4)), *draw.choice([(), (1, 2)]))
    value = draw.choice([None, 2.5]) if mode == "constant" else None
    return lambda m, x: F.pad(x, flat, mode, value), (2, 4, 7, 6)


def reduce(draw: Draw) -> tuple[Function, tuple[int, ...]]:
    dims = tuple(draw.choice([dim, dim - 4]) for dim in draw.sample(range(4), draw.randint(1, 4)))
    function, keepdim = draw.choice([torch.mean, torch.sum, torch.amax]), draw.random() < 0.5
    return lambda m, x: function(x, dims, keepdim), (4, 3, 5, 6)


def convolution(draw: Draw) -> tuple[Function, tuple[int, ...]]:
    groups, options = draw.choice([1, 1, 2]), {"stride": draw.randint(1, 2), "padding": draw.randint(0, 2)}
    function: Any = F.conv2d
    if groups == 1 and draw.random() < 0.4:
        function, options = F.conv_transpose2d, options | {"output_padding": options["stride"] - 1}
    options |= {"dilation": draw.randint(1, 2), "groups": groups}
    return lambda m, x: function(x, m.plain if groups == 1 else m.w, m.b, **options), (4, 4, 9, 10)


DRAWN: dict[str, Callable[[Draw], tuple[Function, tuple[int, ...]]]] = {
    **{kind: partial(pool, kind=kind) for kind in ("max_pool", "avg_pool")},
    **{kind: partial(adaptive, kind=kind) for kind in ("adaptive_avg_pool", "adaptive_max_pool")},
}
DRAWN |= {"interpolate": resize, "select": select, "split": chunks, "pad": pad, "reduce": reduce, "conv": convolution}


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", DRAWN)
def test_options_shapes_and_layouts_at_random(op: str, count: int) -> None:
    for number in range(count):
        draw = Draw(f"{op} {number}")
        function, shape = DRAWN[op](draw)
        x, mesh = tensor(*shape), draw.choice([TWO, THREE, GRID])
        x = x.to(memory_format=torch.channels_last) if len(shape) == 4 and draw.random() < 0.3 else x
        strategy = tuple(draw.sample(STRATEGIES, len(mesh.sizes))) if op == "conv" and mesh is not THREE else ()
        try:
            placed = check(function, x, mesh, draw.layout(shape, mesh), strategy)
        except ConvoyError:  # the plan's strategies do not fit the layer
            assert op == "conv"
            continue
        except Exception as error:
            raise AssertionError(f"call {number} of {op}") from error
        assert op not in ("split", "conv") or not placed.note


def test_no_rank_is_left_without_channels_and_means_do_not_overflow() -> None:
    given = Layout.of({1: Split((0,), (range(2), range(2, 4), range(4, 4)))})
    placed = check(lambda m, x: F.conv2d(x, m.plain), tensor(*SHAPE), THREE, given, ("channel",))
    assert all(part for split in placed.inputs["x"].splits for part in split[1].parts)
    halves, given = torch.full((2, 4), 6e4, dtype=torch.float16), Layout.of({1: Split((0,), balanced(4, 2))})
    check(lambda m, x: x.mean(1), halves, TWO, given)


def test_mistakes_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls: padding at inner borders, a wrong order, a mean over a rank's own count."""
    needed, places = Window.needed, slices.places

    def padded(self: Window, output: range) -> Need:
        need = needed(self, output)
        return Need(need.rows, self.before, max(need.after, self.before - need.before))

    with monkeypatch.context() as patch, pytest.raises((AssertionError, RuntimeError)):
        patch.setattr(Window, "needed", padded)
        rows = Layout.of({2: Split((0,), balanced(8, 2))})
        check(lambda m, x: F.avg_pool2d(x, 3, 1, 1), tensor(1, 1, 8, 8), TWO, rows)
    with monkeypatch.context() as patch, pytest.raises((AssertionError, RuntimeError)):
        patch.setattr(slices, "places", lambda part, chosen: tuple(places(part, chosen))[::-1])
        check(lambda m, x: x[:, :3], tensor(2, 4, 3), TWO, Layout.of({1: Split((0,), ((0, 2), (1, 3)))}))
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setitem(OPERATIONS, "reduce", replace(OPERATIONS["reduce"], build=as_called))
        check(lambda m, x: x.mean(1), tensor(3, 7), THREE, Layout.of({1: Split((0,), balanced(7, 3))}))
