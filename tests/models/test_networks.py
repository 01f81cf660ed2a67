"""What the papers say of each network, and that the small ones train."""

import pytest
import torch
from torch import Tensor, nn

from convoy.models import GoogLeNetOutputs, create, list_models
from convoy.models.alexnet_2012 import response_norm

SMALL = [info for info in list_models() if info.input_shape is not None and info.input_shape[1] <= 32]


@pytest.mark.slow
@pytest.mark.parametrize("info", SMALL, ids=lambda info: info.name)
def test_forward_and_backward_of_two_images(info) -> None:
    torch.manual_seed(0)
    model = create(info.name)
    out = model(torch.randn(2, *info.input_shape))
    logits = out if isinstance(out, tuple) else (out,)
    assert [one.shape for one in logits] == [(2, info.num_classes)] * len(logits)
    sum(nn.functional.cross_entropy(one, torch.tensor([1, 3])) for one in logits).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.dtype == torch.float32


def test_lenet_reads_28_and_32_pixels_and_any_channels() -> None:
    assert create("lenet")(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    assert create("lenet", image_size=32, in_channels=3)(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    model, larger = create("lenet"), create("lenet", image_size=32)
    larger.load_state_dict(model.state_dict())
    digits = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(model(digits), larger(nn.functional.pad(digits, (2, 2, 2, 2))))


def normalized_by_the_paper(x: Tensor, alpha: float) -> Tensor:
    """Section 3.3 of Krizhevsky et al. (2012), as written there: k = 2, n = 5, beta = 0.75."""
    out = torch.empty_like(x)
    for i in range(x.shape[1]):
        window = x[:, max(0, i - 2) : min(x.shape[1] - 1, i + 2) + 1]
        out[:, i] = x[:, i] / (2 + alpha * window.square().sum(1)) ** 0.75
    return out


def test_response_normalization_is_the_papers() -> None:
    x = 50 * torch.randn(2, 9, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(response_norm()(x), normalized_by_the_paper(x, alpha=1e-4))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(response_norm()(x), normalized_by_the_paper(x, alpha=1e-4 / 5))


def test_alexnet_2012_is_two_columns_that_start_as_in_the_paper() -> None:
    model = create("alexnet-2012", num_classes=10)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [layer.groups for layer in layers if isinstance(layer, nn.Conv2d)] == [1, 2, 1, 2, 2]
    assert [set(layer.bias.tolist()) for layer in layers] == [{0}, {1}, {0}, {1}, {1}, {1}, {1}, {0}]
    for layer in layers:
        assert layer.weight.std().item() == pytest.approx(0.01, rel=0.05)
    with torch.device("meta"):
        images = torch.empty(1, 3, 224, 224)
        sizes = [images.shape[-1]]
        for layer in create("alexnet-2012").features:
            images = layer(images)
            sizes.append(images.shape[-1])
    assert list(dict.fromkeys(sizes)) == [224, 55, 27, 13, 6], "the map sizes of the paper"


@pytest.mark.parametrize(("name", "last"), [("resnet18-cifar", "bn2"), ("resnet50-cifar", "bn3")])
def test_zero_init_residual_makes_every_block_its_shortcut(name: str, last: str) -> None:
    scales = {key: value for key, value in create(name).state_dict().items() if key.endswith(f"{last}.weight")}
    zeroed = create(name, zero_init_residual=True).state_dict()
    for key in scales:
        assert key == "bn1.weight" or (scales[key].eq(1).all() and zeroed[key].eq(0).all())
    assert zeroed["bn1.weight"].eq(1).all()


def test_googlenet_gives_auxiliary_logits_in_training_only() -> None:
    images = torch.empty(2, 3, 224, 224, device="meta")
    with torch.device("meta"):
        model, plain = create("googlenet"), create("googlenet", aux_logits=False)
    out = model(images)
    assert isinstance(out, GoogLeNetOutputs)
    assert out._fields == ("logits", "aux_logits2", "aux_logits1")
    assert all(logits.shape == (2, 1000) for logits in out)
    assert isinstance(model.eval()(images), Tensor)
    assert isinstance(plain(images), Tensor)
    assert model.state_dict().keys() - plain.state_dict().keys() == {
        key for key in model.state_dict() if key.startswith("aux")
    }


def test_transform_input_takes_imagenet_normalized_images_to_the_unit_range() -> None:
    torch.manual_seed(0)
    model = create("googlenet-cifar", transform_input=True).eval()
    plain = create("googlenet-cifar").eval()
    plain.load_state_dict(model.state_dict())
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = torch.rand(2, 3, 32, 32)
    normalized = (pixels - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(model(normalized), plain((pixels - 0.5) / 0.5))


def test_the_same_seed_gives_the_same_weights() -> None:
    def weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(create("squeezenet1_1-cifar").state_dict().values())

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(1), weights(2), strict=True))
