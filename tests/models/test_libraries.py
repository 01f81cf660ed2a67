"""`timm:NAME` and `torchvision:NAME`: with stand-ins for the libraries, and with the real ones where they import."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from convoy.errors import ConvoyError
from convoy.models import accepts, count, create, describe, load_weights, published
from convoy.models.weights import classifier_names


def real(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a wheel made for another build of torch
        pytest.skip(f"needs a {name} that imports beside torch {torch.__version__} ({error})")


def mistake(call) -> str:
    with pytest.raises(ConvoyError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("timm", "torchvision"):
        for name in [name for name in sys.modules if name.partition(".")[0] == extra]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, extra, None)
        for verb in (create, describe, count):
            assert f"pip install -e '.[{extra}]'" in mistake(lambda verb=verb, e=extra: verb(f"{e}:resnet18"))


class StandIn(ModuleType):
    """Answers like timm, and notes how it was called."""

    def __init__(self) -> None:
        super().__init__("timm")
        self.calls: list[dict] = []

    def is_model(self, name: str) -> bool:
        return name == "tiny"

    def list_models(self) -> list[str]:
        return ["tiny", "large"]

    def create_model(self, name: str, **arguments: object) -> nn.Module:
        self.calls.append({"name": name, **arguments})
        return nn.Conv2d(arguments.get("in_chans", 3), arguments.get("num_classes", 1000), 1)


def test_published_weights_are_those_of_the_library_with_a_fresh_head(monkeypatch: pytest.MonkeyPatch) -> None:
    timm, torchvision, vision_models = StandIn(), ModuleType("torchvision"), ModuleType("torchvision.models")
    monkeypatch.setitem(sys.modules, "timm", timm)
    net, fresh = nn.Sequential(nn.Conv2d(3, 5, 1)), nn.Sequential(nn.Conv2d(3, 5, 1)).state_dict()
    monkeypatch.setattr(timm, "create_model", lambda *_, pretrained: nn.Sequential(nn.Conv2d(3, 1000, 1)))
    net.load_state_dict(fresh)
    (note,) = load_weights(net, "timm:tiny", published("timm:tiny"))
    assert note.startswith("timm:tiny has 1000 classes and this net 5: fresh weights stay in ")
    assert torch.equal(net[0].weight, fresh["0.weight"])
    tensors = nn.Sequential(nn.Conv2d(3, 5, 1)).state_dict()
    weights = SimpleNamespace(DEFAULT=SimpleNamespace(get_state_dict=lambda **_: tensors))
    vision_models.get_model_weights = lambda name: weights  # type: ignore[attr-defined]
    vision_models.list_models = lambda module: ["tiny"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setitem(sys.modules, "torchvision.models", vision_models)
    assert load_weights(net, "torchvision:tiny", published("torchvision:tiny")) == []
    assert torch.equal(net[0].weight, tensors["0.weight"])
    assert "torchvision:tiny does not fit Linear: " in mistake(
        lambda: load_weights(nn.Linear(2, 2), "torchvision:tiny", tensors)
    )
    weights.DEFAULT = None
    assert "cannot be fetched" in mistake(lambda: published("torchvision:tiny"))


def test_timm_is_called_without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = StandIn()
    monkeypatch.setitem(sys.modules, "timm", timm)
    create("timm:tiny")
    create("timm:tiny", num_classes=5, in_channels=1, drop_rate=0.1)
    plain = {"name": "tiny", "pretrained": False}
    assert timm.calls == [plain, plain | {"num_classes": 5, "in_chans": 1, "drop_rate": 0.1}]
    assert "timm has no model 'tini': did you mean tiny?" in mistake(lambda: create("timm:tini"))
    assert "timm has no model 'hf-hub:some/one'" in mistake(lambda: create("timm:hf-hub:some/one"))
    for option in ("pretrained", "checkpoint_path", "pretrained_cfg"):
        assert "give a file with --weights FILE" in mistake(lambda option=option: create("timm:tiny", **{option: "x"}))
    assert len(timm.calls) == 2


def test_the_real_libraries() -> None:
    real("timm")
    models = real("torchvision.models")
    for name in ("timm:resnet18", "timm:inception_v3", "torchvision:resnet18", "torchvision:inception_v3"):
        assert describe(name).input_shape == ((3, 299, 299) if "inception" in name else (3, 224, 224))
        with torch.device("meta"):
            model = create(name, num_classes=7, in_channels=3)
        assert all(model.get_submodule(head).weight.shape[0] == 7 for head in classifier_names(model))
        assert "has no option 'nonsense'" in mistake(lambda name=name: create(name, nonsense=1))
    assert accepts("torchvision:resnet18", "zero_init_residual")
    assert not accepts("torchvision:mobilenet_v3_small", "zero_init_residual"), "its class would swallow it"
    for name in models.list_models(module=models):
        assert describe(f"torchvision:{name}").num_classes == 1000
    assert "3 channels and cannot be built for 1" in mistake(lambda: create("torchvision:resnet18", in_channels=1))
    assert "--weights FILE" in mistake(lambda: create("torchvision:resnet18", weights="DEFAULT"))
    assert count("torchvision:regnet_y_400mf").parameters == 4_344_144, "cannot be built on the meta device"


def reference(name: str, **options: object) -> nn.Module:
    options |= {"init_weights": True} if name == "googlenet" else {}
    return real("torchvision.models").get_model(name, weights=None, **options)


@pytest.mark.parametrize("name", ["alexnet", "squeezenet1_1", "vgg11_bn", "googlenet", "resnet50", "densenet121"])
def test_our_networks_start_and_compute_as_torchvisions(name: str) -> None:
    models = []
    for make in (create, reference):
        torch.manual_seed(5)
        models.append(make(name))
    network, original = models
    for key, value in original.state_dict().items():
        assert torch.equal(network.state_dict()[key], value), f"{key} starts otherwise"
    images = torch.randn(4, 3, 96, 96)
    with torch.no_grad():
        for module in original.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # statistics of these images: with the initial ones GoogLeNet's signal fades
        original.train()(images)
        network.load_state_dict(original.state_dict())
        expected = original.eval()(images)
        torch.testing.assert_close(network.eval()(images), expected, rtol=1e-5, atol=1e-5)
        next(network.parameters()).mul_(1.01)
        assert not torch.allclose(network(images), expected, rtol=1e-5, atol=1e-5)
