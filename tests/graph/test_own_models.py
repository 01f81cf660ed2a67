import pytest
import torch

from convoy.models import create, list_models
from convoy.models.factory import describe
from convoy.ops import OPERATIONS, capture
from graph.replay import replay, same

NAMES = [info.name for info in list_models()]
LARGE = ("vgg", "resnet101", "resnet152")  # their small-image versions run the same code


def images_for(name: str) -> torch.Tensor:
    shape = describe(name).input_shape
    assert shape is not None
    size = min(shape[1], 95 if name.startswith("alexnet") else 64)
    return torch.randn(2, shape[0], size, size, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(LARGE) or ("-cifar" in n and "152" not in n)])
def test_a_replayed_graph_gives_what_the_network_gives(name: str) -> None:
    torch.manual_seed(0)
    model, images = create(name).double().eval(), images_for(name)
    graph = capture(model, (images,))
    with torch.no_grad():
        assert same(replay(graph, model, (images,)), model(images))
        before = replay(graph, model, (images,))
        next(iter(model.parameters())).add_(1)
        assert not same(before, model(images))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_call_has_an_op_and_every_parameter_is_used(name: str, mode: bool) -> None:
    with torch.device("meta"):
        model = create(name)
    graph = capture(model, (images_for(name).float(),), training=mode)
    used, present = {value.name for value in graph.parameters()}, {name for name, _ in model.named_parameters()}
    assert used == present if mode else used == {name for name in present if not name.startswith("aux")}
    assert graph.training == mode
    assert {call.op for call in graph.calls} <= set(OPERATIONS) - {"opaque"}
    assert len({call.name for call in graph.calls}) == len(graph.calls)
