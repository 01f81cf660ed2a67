"""`timm:NAME` and `torchvision:NAME`: with stand-ins for the libraries, and with the real ones where they import."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from convoy.errors import ConvoyError
from convoy.models import accepts, classifier_names, count, create, describe


def mistake(call) -> str:
    with pytest.raises(ConvoyError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "extra"), [("timm:resnet18", "timm"), ("torchvision:resnet18", "torchvision")])
@pytest.mark.parametrize("verb", [create, describe, count, lambda name: accepts(name, "option")])
def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str, extra: str, verb) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    monkeypatch.delitem(sys.modules, f"{extra}.models", raising=False)
    assert f"pip install 'convoy-nn[{extra}]'" in mistake(lambda: verb(name))


def test_a_library_for_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    sentence = mistake(lambda: create("torchvision:resnet18"))
    assert f"does not import beside torch {torch.__version__}" in sentence
    assert "operator torchvision::nms does not exist" in sentence


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


def test_timm_is_called_without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = StandIn()
    monkeypatch.setitem(sys.modules, "timm", timm)
    create("timm:tiny")
    create("timm:tiny", num_classes=5, in_channels=1, drop_rate=0.1)
    assert timm.calls == [
        {"name": "tiny", "pretrained": False},
        {"name": "tiny", "pretrained": False, "num_classes": 5, "in_chans": 1, "drop_rate": 0.1},
    ]
    assert "timm has no model 'tini': did you mean tiny?" in mistake(lambda: create("timm:tini"))
    assert "timm has no model 'hf-hub:some/one'" in mistake(lambda: create("timm:hf-hub:some/one"))
    for option in ("pretrained", "checkpoint_path", "pretrained_cfg"):
        assert "give a file with --weights FILE" in mistake(lambda option=option: create("timm:tiny", **{option: "x"}))
    assert len(timm.calls) == 2


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "vgg11_bn", "convnext_tiny", "inception_v3"])
def test_timm(timm: ModuleType, name: str) -> None:
    info = describe(f"timm:{name}")
    assert info.input_shape == ((3, 299, 299) if name == "inception_v3" else (3, 224, 224))
    assert info.num_classes == 1000
    with torch.device("meta"):
        model = create(f"timm:{name}", num_classes=7, in_channels=1)
    assert sum(p.numel() for p in model.parameters()) == count(model, (1, 224, 224)).parameters
    assert model(torch.empty(2, 1, 224, 224, device="meta")).shape == (2, 7)
    (head,) = classifier_names(model)
    assert model.get_submodule(head).out_features == 7


def test_timm_options_and_mistakes(timm: ModuleType) -> None:
    assert accepts("timm:resnet18", "zero_init_last")
    assert not accepts("timm:resnet18", "zero_init_residual")
    assert "has no option 'nonsense'" in mistake(lambda: create("timm:resnet18", nonsense=1))
    assert "did you mean resnet50" in mistake(lambda: create("timm:resnet5"))
    assert "could not be built" in mistake(lambda: create("timm:resnet50.no_such_tag"))
    assert count("timm:resnet50.a1_in1k").parameters == 25_557_032


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "inception_v3", "squeezenet1_0", "mobilenet_v3_small"])
def test_torchvision(torchvision_models: ModuleType, name: str) -> None:
    info = describe(f"torchvision:{name}")
    assert info.input_shape == ((3, 299, 299) if name == "inception_v3" else (3, 224, 224))
    with torch.device("meta"):
        model = create(f"torchvision:{name}", num_classes=7, in_channels=3)
    for head in classifier_names(model):
        assert model.get_submodule(head).weight.shape[0] == 7
    assert model.eval()(torch.empty(2, 3, 299, 299, device="meta")).shape == (2, 7)


def test_torchvision_options_and_mistakes(torchvision_models: ModuleType) -> None:
    assert accepts("torchvision:resnet18", "zero_init_residual")
    assert not accepts("torchvision:mobilenet_v3_small", "zero_init_residual"), "its class would swallow it"
    assert "has no option 'nonsense'" in mistake(lambda: create("torchvision:mobilenet_v3_small", nonsense=1))
    assert "has no image classifier 'resnet5'" in mistake(lambda: create("torchvision:resnet5"))
    assert "has no image classifier 'fcn_resnet50'" in mistake(lambda: create("torchvision:fcn_resnet50"))
    assert "3 channels and cannot be built for 1" in mistake(lambda: create("torchvision:resnet18", in_channels=1))
    assert "--weights FILE" in mistake(lambda: create("torchvision:resnet18", weights="DEFAULT"))
    assert count("torchvision:regnet_y_400mf").parameters == 4_344_144, "cannot be built on the meta device"


def test_torchvision_names_its_options_for_every_classifier(torchvision_models: ModuleType) -> None:
    for name in torchvision_models.list_models(module=torchvision_models):
        assert not accepts(f"torchvision:{name}", "nonsense")
        assert describe(f"torchvision:{name}").num_classes == 1000
