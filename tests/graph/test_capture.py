from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from convoy.graph import Call, CaptureError, Graph, Ref
from convoy.models import create
from convoy.ops import capture
from graph.replay import replay, same


def ops(graph: Graph) -> list[str]:
    return [call.op for call in graph.calls]


def by_name(graph: Graph) -> dict[str, Call]:
    return {call.name: call for call in graph.calls}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn(self.conv(x)))
        out += x
        return self.relu(self.drop(out))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()
        self.fc = nn.Linear(3, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.block(images), 1), 1)) + 1 + images.shape[0]


def test_names_layers_and_refs() -> None:
    graph = capture(Net(), ((4, 3, 8, 8),))
    assert [(call.name, call.layer, call.op) for call in graph.calls] == [
        ("block.conv", "block.conv", "conv"),
        ("block.bn", "block.bn", "batch_norm"),
        ("block.relu", "block.relu", "elementwise"),
        ("block", "block", "elementwise"),
        ("block.drop", "block.drop", "dropout"),
        ("block.relu#2", "block.relu", "elementwise"),
        ("adaptive_avg_pool2d", "", "adaptive_avg_pool"),
        ("flatten", "", "reshape"),
        ("fc", "fc", "linear"),
        ("add", "", "elementwise"),
        ("add_1", "", "elementwise"),
    ]
    calls = by_name(graph)
    assert graph.inputs == ("images",)
    assert calls["block.conv"].inputs == ("images", "block.conv.weight")
    assert calls["block"].args == (Ref("block.relu"), Ref("images"))
    assert calls["block.relu"].kwargs == {"inplace": False}
    assert graph.output == Ref("add_1")
    assert graph.shape("block.conv") == (4, 3, 8, 8)
    assert calls["block.bn"].attributes == {
        "input": "block.conv",
        "running_mean": "block.bn.running_mean",
        "running_var": "block.bn.running_var",
        "weight": "block.bn.weight",
        "bias": "block.bn.bias",
        "training": True,
        "momentum": 0.1,
        "eps": 1e-5,
        "num_batches_tracked": "block.bn.num_batches_tracked",
    }
    assert graph.values["block.bn.num_batches_tracked"].origin == "buffer"


def test_the_network_is_left_as_it_was() -> None:
    model = Net().eval()
    model.block.train()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    modes = [module.training for module in model.modules()]
    rng = torch.get_rng_state()
    for training in (None, True, False):
        capture(model, ((4, 3, 8, 8),), training)
        after = model.state_dict(keep_vars=True)
        assert {name: id(tensor) for name, tensor in after.items()} == {name: was for name, (was, _) in before.items()}
        assert all(torch.equal(after[name], was) for name, (_, was) in before.items())
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), rng)


def test_the_modes_of_modules_are_kept_where_none_is_asked_for() -> None:
    model = Net()
    model.block.bn.eval()
    graph = capture(model, ((4, 3, 8, 8),))
    assert not by_name(graph)["block.bn"].attributes["training"]
    assert "dropout" in ops(graph)
    assert "dropout" not in ops(capture(model, ((4, 3, 8, 8),), training=False))
    assert model.training
    assert not model.block.bn.training


def test_repeated_with_shards_in_the_place_of_parameters() -> None:
    model = Net()
    whole = capture(model, ((4, 3, 8, 8),))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    forward = model.forward
    for name, parameter in model.named_parameters():
        model.get_submodule(name.rpartition(".")[0]).register_parameter(
            name.rpartition(".")[2], nn.Parameter(parameter.detach()[:1])
        )
    model.forward = lambda images: images  # type: ignore[method-assign]
    again = capture(model, ((4, 3, 8, 8),), shapes=shapes, forward=forward)
    assert again.values == whole.values
    assert [(c.name, c.op, c.attributes) for c in again.calls] == [(c.name, c.op, c.attributes) for c in whole.calls]
    assert model.fc.weight.shape == (1, 3)
    larger = capture(model, ((2, 3, 16, 16),), False, shapes=shapes, forward=forward)
    assert larger.shape("block.conv") == (2, 3, 16, 16)


@pytest.mark.parametrize("given", [torch.empty(2, 3, 8, 8, device="meta"), torch.ones(2, 3, 8, 8), (2, 3, 8, 8)])
def test_inputs_are_tensors_of_any_kind_or_shapes(given: Any) -> None:
    assert capture(Net(), (given,)).values["images"].shape == (2, 3, 8, 8)


def test_a_double_network() -> None:
    model, images = Net().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    graph = capture(model, (images,))
    assert graph.values[graph.output.name].dtype == torch.float64
    assert same(replay(graph, model, (images,)), model(images))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.first(x)))


def test_tied_weights_and_modules_have_their_first_names() -> None:
    model = Tied()
    graph = capture(model, ((2, 4),))
    assert [value.name for value in graph.parameters()] == ["first.weight", "first.bias", "second.bias"]
    assert [call.name for call in graph.calls] == ["first", "second", "first#2"]
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        self.bn(x * 2)  # only the statistics are used
        return x.relu()


def test_batch_norm_without_momentum_or_reader_stays() -> None:
    graph = capture(Cumulative(), ((2, 3, 4, 4),))
    assert ops(graph) == ["elementwise", "batch_norm", "elementwise"]
    assert graph.calls[1].attributes["momentum"] is None
    assert graph.calls[1].attributes["num_batches_tracked"] == "bn.num_batches_tracked"
    assert ops(capture(Cumulative(), ((2, 3, 4, 4),), training=False)) == ["elementwise"]


@dataclass
class Outputs:
    logits: Tensor
    sizes: tuple[int, int]


class ModelOutput(OrderedDict):
    """As in transformers."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__(values)
        self.__dict__.update(values)

    def __reduce__(self) -> Any:
        return _model_output, (dict(self),)


def _model_output(values: dict[str, Tensor]) -> ModelOutput:
    return ModelOutput(**values)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, {"b": b, "none": None}],
        lambda a, b: Outputs(a, (1, 2)),
        lambda a, b: ModelOutput(logits=a, hidden=b),
        lambda a, b: (a, a, (a.shape[0], b)),
    ],
)
def test_outputs_of_any_kind(make: Any) -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return make(x + 1, x * 2)

    images = torch.randn(2, 3)
    graph = capture(Several(), (images,))
    assert same(replay(graph, Several(), (images,)), Several()(images))


def test_named_outputs_of_googlenet() -> None:
    with torch.device("meta"):
        model = create("googlenet")
    output = capture(model, ((2, 3, 64, 64),)).output
    assert type(output).__name__ == "GoogLeNetOutputs"
    assert output.aux_logits1 == Ref("aux1.fc2")


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros(4, 4)
        mask[1:3, :2] = 1
        mask[0] += 2
        grid = torch.arange(4, dtype=x.dtype)[None, :] * torch.linspace(0, 1, 4)[:, None]
        if (mask > 2).any():
            mask = mask.neg()
        return x * mask + grid.to(x) + self.table + torch.zeros_like(x) + torch.empty(4).fill_(3)


def test_what_does_not_depend_on_the_input_is_computed_once() -> None:
    images = torch.randn(2, 4, 4)
    graph = capture(Constants(), (images,))
    assert set(ops(graph)) == {"elementwise"}
    assert len(graph.calls) == 5
    assert same(replay(graph, Constants(), (images,)), Constants()(images))
    assert all(graph.values[name].origin == "constant" for name in graph.constants)


class StochasticDepth(nn.Module):
    """The ways of torchvision, timm and plain code."""

    def forward(self, x: Tensor) -> Tensor:
        keep = x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.8).div_(0.8)
        floor = (0.8 + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)).floor_()
        drawn = torch.bernoulli(torch.full((x.shape[0], 1, 1), 0.8))
        return x * keep + x.div(0.8) * floor + x * drawn + torch.rand_like(x)


def test_stochastic_depth_is_a_draw_and_products() -> None:
    graph = capture(StochasticDepth(), ((2, 3, 3),))
    drawn = [call for call in graph.calls if call.op == "random"]
    assert [call.attributes for call in drawn] == [
        {"draw": "bernoulli", "p": 0.8},
        {"draw": "uniform", "p": None},
        {"draw": "bernoulli", "p": pytest.approx(0.8)},
        {"draw": "uniform", "p": None},
    ]
    assert all(call.inputs == () for call in drawn)
    assert set(ops(graph)) == {"random", "elementwise"}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return (x * 2).clone() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 3, None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x, self.scale) + 1  # type: ignore[no-any-return, no-untyped-call]


def test_a_custom_function_is_one_call() -> None:
    images = torch.randn(2, 3, requires_grad=True)
    graph = capture(Custom(), (images,))
    assert ops(graph) == ["opaque", "elementwise"]
    replay(graph, Custom(), (images,)).sum().backward()
    assert images.grad is not None
    assert torch.equal(images.grad, torch.full((2, 3), 3.0))
    assert "apply" in vars(torch.autograd.Function)
    assert Doubled.apply(torch.ones(1), torch.ones(1)).item() == 2  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_seen_through(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Residual()

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant)
            return made + 1

    graph = capture(Checkpointed(), ((2, 3, 8, 8),))
    assert [call.name for call in graph.calls][:2] == ["block.conv", "block.bn"]
    assert not any(call.name.startswith("detach") for call in graph.calls)


def test_no_grad_inside_stops_the_gradient() -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x * 2
            return x * scale

    images = torch.randn(2, 3, requires_grad=True)
    graph = capture(Frozen(), (images,))
    with torch.no_grad():
        assert len(capture(Frozen(), (images,)).calls) == len(graph.calls)
    replay(graph, Frozen(), (images,)).sum().backward()
    assert images.grad is not None
    assert torch.allclose(images.grad, images.detach() * 2)


def test_what_depends_on_parameters_only_is_opaque() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0)
            return F.conv2d(x, weight.reshape_as(self.weight), self.bias)

    graph = capture(Standardised(3, 4, 3), ((2, 3, 8, 8),))
    assert ops(graph) == ["opaque", "opaque", "opaque", "conv"]


class Cached(nn.Module):
    grid: Tensor | None = None
    table: Tensor

    def __init__(self, keeps: str = "") -> None:
        super().__init__()
        self.keeps = keeps
        self.cache: dict[str, dict[str, Tensor]] = {"all": {}}
        self.seen: list[Tensor] = []
        self.bias = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.grid is None:
            self.grid = torch.arange(3.0)
        if "bias" not in self.cache["all"]:
            self.cache["all"]["bias"] = self.bias * 2 if self.keeps == "weights" else torch.arange(3.0)
        if self.table.shape != (3,):
            self.table = torch.arange(3.0)
        if self.keeps == "inputs":
            self.seen.append(x)
        return x + self.grid + self.cache["all"]["bias"] + self.table


def test_what_a_network_keeps_for_later_does_not_stay_in_it() -> None:
    def has_nothing(model: Cached) -> bool:
        return model.grid is None and model.cache == {"all": {}} and model.seen == [] and model.table.shape == (1,)

    model = Cached()
    graph = capture(model, ((2, 3),))
    assert has_nothing(model)
    images = torch.randn(2, 3)
    assert same(replay(graph, model, (images,)), model(images))
    model = Cached("inputs")
    with pytest.raises(CaptureError, match="it keeps a tensor of its forward pass in seen"):
        capture(model, ((2, 3),))
    assert has_nothing(model)
    model = Cached("weights")
    graph = capture(model, ((2, 3),))
    assert has_nothing(model)
    assert same(replay(graph, model, (images,)), model(images))
    with pytest.raises(CaptureError, match="computed from parameters before"):
        capture(model, ((2, 3),))


def test_dead_calls_are_dropped() -> None:
    class Dead(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            F.softmax(x * 3, 1)
            return x + 1

    graph = capture(Dead(), ((2, 3),))
    assert [call.name for call in graph.calls] == ["add"]
    assert set(graph.values) == {"x", "add"}


class Halves(nn.Module):
    """Its output has a row for each two samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[: (len(x) + 1) // 2] * len(x)


@pytest.mark.parametrize("name", ["lenet", "resnet18", "googlenet"])
def test_a_network_at_another_batch_size_follows_from_two(name: str) -> None:
    model = create(name)
    size = (1, 28, 28) if name == "lenet" else (3, 64, 64)
    at = {n: capture(model, (torch.empty(n, *size, device="meta"),), training=True) for n in (6, 4, 10)}
    assert at[6].scaled(at[4], 10) == at[10] != at[6]


def test_a_network_that_does_not_grow_with_the_batch_has_to_be_looked_at() -> None:
    first, second, third = (capture(Halves(), (torch.empty(n, 3, 4, 4, device="meta"),)) for n in (5, 4, 10))
    assert first.scaled(second, 10) is None
    assert third.shape(third.calls[-1].outputs[0]) == (5, 48)


def test_layers_that_keep_lists_of_their_weights() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0][:, -1]

    model, sequence = Recurrent(), torch.randn(2, 3, 4)
    graph = capture(model, (sequence,))
    assert same(replay(graph, model, (sequence,)), model(sequence))
