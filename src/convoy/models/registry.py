"""The networks that Convoy brings along, as one table.

A new network is a file beside this one and a line in the table. The names are torchvision's where it has the network;
`NAME-cifar` is the same network with a first layer and a head for 32x32 images.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from convoy.errors import ConvoyError
from convoy.models.alexnet import AlexNet
from convoy.models.alexnet_2012 import AlexNet2012
from convoy.models.cifar_quick import CifarQuick
from convoy.models.googlenet import GoogLeNet
from convoy.models.lenet import LeNet
from convoy.models.resnet import DEPTHS, ResNet
from convoy.models.squeezenet import SqueezeNet
from convoy.models.vgg import STAGES, VGG


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a network before it is built.

    `title` is the network and its paper in one line; `input_shape` is (channels, height, width) of the images it was
    made for and `num_classes` its default. Both are None for a factory of the user's, of which nothing is known.
    """

    name: str
    title: str
    input_shape: tuple[int, int, int] | None
    num_classes: int | None


@dataclass(frozen=True)
class Registered:
    """A line of the table: the network's class, and what its name already says (`fixed` arguments)."""

    info: ModelInfo
    factory: Callable[..., nn.Module]
    fixed: Mapping[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """The options a user may set, with their defaults."""
        parameters = inspect.signature(self.factory).parameters.values()
        taken = {"num_classes", "in_channels", *self.fixed}
        return {parameter.name: parameter.default for parameter in parameters if parameter.name not in taken}

    def accepts(self, option: str) -> bool:
        """Whether `option` may be given to `build`."""
        return option in self.options

    def build(self, num_classes: int | None, in_channels: int | None, options: Mapping[str, Any]) -> nn.Module:
        """The network; None stands for its own number of classes or channels.

        Raises ConvoyError for an option that it does not have or of which it refuses the value.
        """
        for option, value in options.items():
            self._check(option, value)
        assert self.info.input_shape is not None
        sizes = {
            "num_classes": self.info.num_classes if num_classes is None else num_classes,
            "in_channels": self.info.input_shape[0] if in_channels is None else in_channels,
        }
        try:
            return self.factory(**sizes, **self.fixed, **options)
        except ValueError as error:
            if isinstance(error, ConvoyError) or not options:
                raise
            given = ", ".join(f"{option}={value!r}" for option, value in options.items())
            raise ConvoyError(f"{self.info.name} refuses {given}: {error}") from error

    def _check(self, option: str, value: object) -> None:
        name, accepted = self.info.name, self.options
        if option not in accepted:
            choices = f"it accepts {', '.join(accepted)}" if accepted else "it has none"
            raise ConvoyError(f"{name} has no option {option!r}: {choices}")
        kind = type(accepted[option])
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            example = f"of type {kind.__name__}, like {accepted[option]!r}"
            raise ConvoyError(f"option {option!r} of {name} is {value!r}: give a value {example}")


DIGITS, SMALL, PHOTOGRAPHS = (1, 28, 28), (3, 32, 32), (3, 224, 224)


def _both_sizes(name: str, title: str, factory: Callable[..., nn.Module], **fixed: Any) -> Iterator[Registered]:
    yield Registered(ModelInfo(name, title, PHOTOGRAPHS, 1000), factory, fixed | {"small_images": False})
    small = ModelInfo(f"{name}-cifar", f"{title}, for 32x32 images", SMALL, 10)
    yield Registered(small, factory, fixed | {"small_images": True})


def _table() -> Iterator[Registered]:
    yield Registered(ModelInfo("lenet", "LeNet-5 with ReLU (LeCun et al., 1998)", DIGITS, 10), LeNet, {})
    yield Registered(ModelInfo("cifar-quick", "cuda-convnet's quick net (Krizhevsky, 2012)", SMALL, 10), CifarQuick, {})
    two_columns = "AlexNet, two columns (Krizhevsky et al., 2012)"
    yield Registered(ModelInfo("alexnet-2012", two_columns, PHOTOGRAPHS, 1000), AlexNet2012, {})
    yield from _both_sizes("alexnet", "AlexNet, one tower (Krizhevsky, 2014)", AlexNet)
    for depth in STAGES:
        title = f"VGG-{depth} (Simonyan and Zisserman, 2014)"
        yield from _both_sizes(f"vgg{depth}", title, VGG, depth=depth, batch_norm=False)
        title = f"VGG-{depth} with batch norm (Simonyan and Zisserman, 2014)"
        yield from _both_sizes(f"vgg{depth}_bn", title, VGG, depth=depth, batch_norm=True)
    yield from _both_sizes("googlenet", "GoogLeNet with batch norm (Szegedy et al., 2014)", GoogLeNet)
    for depth in DEPTHS:
        yield from _both_sizes(f"resnet{depth}", f"ResNet-{depth} (He et al., 2015)", ResNet, depth=depth)
    for version in ("1.0", "1.1"):
        title = f"SqueezeNet {version} (Iandola et al., 2016)"
        yield from _both_sizes(f"squeezenet{version.replace('.', '_')}", title, SqueezeNet, version=version)


REGISTRY: dict[str, Registered] = {entry.info.name: entry for entry in _table()}


def list_models() -> list[ModelInfo]:
    """The networks of the registry, in the order of their papers."""
    return [entry.info for entry in REGISTRY.values()]
