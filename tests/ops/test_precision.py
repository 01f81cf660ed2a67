"""The types under autocast: those that a real pass under autocast gives."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from convoy.models import create
from convoy.ops import capture
from convoy.ops.memory import predict_memory
from convoy.ops.precision import under_autocast
from convoy.planner import workload_of
from convoy.plans.plan import Plan


class Mixed(nn.Module):
    """What follows a layer in lower precision, and what mixes the two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.lrn, self.pool, self.group = nn.LocalResponseNorm(3), nn.MaxPool2d(2), nn.GroupNorm(2, 8)
        self.relu, self.last = nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm(self.conv(x)))
        z: torch.Tensor = self.group(self.pool(self.lrn(y)))
        found: torch.Tensor = self.last((self.other(z) + z).mean((2, 3)).softmax(1))
        return found


def lenet() -> nn.Module:
    return create("lenet")


def resnet() -> nn.Module:
    return create("resnet18", num_classes=4)


@pytest.mark.parametrize(("build", "types"), [(Mixed, 2), (lenet, 1), (resnet, 1)])
def test_layers_give_what_they_give_in_a_real_pass(build: Callable[[], nn.Module], types: int) -> None:
    model = build()
    channels = next(p for p in model.parameters() if p.dim() == 4).shape[1]
    images = torch.randn(2, channels, 28, 28)
    graph = capture(model, (images.to("meta"),), training=True)
    seen: dict[str, torch.dtype] = {}
    for name, layer in model.named_modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        model(images)
    typed = under_autocast(graph, torch.bfloat16, "cpu")
    found = {call.layer: typed.values[call.outputs[0]].dtype for call in typed.calls if call.layer in seen}
    assert found == {name: seen[name] for name in found}
    assert len(set(found.values())) == types
    assert all(typed.values[value.name].dtype == torch.float32 for value in graph.parameters())
    assert under_autocast(graph, None, "cpu") is graph


def test_a_gpu_keeps_more_in_float32() -> None:
    graph = capture(Mixed(), (torch.empty(2, 3, 28, 28, device="meta"),), training=True)
    typed = under_autocast(graph, torch.float16, "cuda")
    types = {call.layer or call.op: typed.values[call.outputs[0]].dtype for call in typed.calls}
    assert (types["norm"], types["group"], types["last"]) == (torch.float16, torch.float32, torch.float16)


def test_doubles_stay_as_they_are() -> None:
    images = torch.empty(2, 1, 28, 28, dtype=torch.float64, device="meta")
    graph = capture(create("lenet").double(), (images,), training=True)
    typed = under_autocast(graph, torch.bfloat16, "cpu")
    assert {value.dtype for value in typed.values.values()} == {torch.float64}


def kept(precision: torch.dtype | None) -> int:
    """Bytes that a real pass keeps, but for parameters."""
    torch.manual_seed(0)
    model, images = resnet(), torch.randn(8, 3, 32, 32)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    autocast = torch.autocast("cpu", precision, enabled=precision is not None)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), autocast:
        output = model(images)
    assert output.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_memory_is_that_of_a_real_pass(precision: torch.dtype | None) -> None:
    workload = workload_of(resnet(), torch.randn(1, 3, 32, 32), 8, precision=precision)
    (memory,) = predict_memory(workload.place(Plan.parse("serial")))
    assert memory.activations == pytest.approx(kept(precision), rel=0.03)
