"""The networks that Convoy brings along, as one table.

A new network is a file beside this one and a line in the table. The names are torchvision's where it has the network;
`NAME-cifar` is the same network with a first layer and a head for 32x32 images.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convoy import own
from convoy.errors import ConvoyError
from convoy.terminal import brief, did_you_mean, pip_install

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a network before it is built. `title` is the network and its paper in one line; `input_shape` is
    (channels, height, width) of the images it was made for and `num_classes` its default. Both are None for a factory
    of the user's, of which nothing is known."""

    name: str
    title: str
    input_shape: tuple[int, int, int] | None
    num_classes: int | None


class UnknownOptionError(ConvoyError):
    """A keyword that a network does not take."""

    def __init__(self, name: str, option: str, accepted: Iterable[str], otherwise: str) -> None:
        choices = ", ".join(accepted)
        super().__init__(f"{name} has no option {option!r}: {f'it accepts {choices}' if choices else otherwise}")
        self.option = option


@dataclass(frozen=True)
class Registered:
    """A line of the table: the network's class, and what its name already says (`fixed` arguments). The class is
    written `module.Class`, below this package: it is imported when it is asked for, and torch with it."""

    info: ModelInfo
    source: str
    fixed: Mapping[str, Any]

    @property
    def factory(self) -> "Callable[..., nn.Module]":
        module, _, name = self.source.partition(".")
        constructor: Callable[..., nn.Module] = getattr(importlib.import_module(f"convoy.models.{module}"), name)
        return constructor

    @property
    def options(self) -> dict[str, Any]:
        parameters = inspect.signature(self.factory).parameters.values()
        fixed_names = {"num_classes", "in_channels", *self.fixed}
        return {parameter.name: parameter.default for parameter in parameters if parameter.name not in fixed_names}

    def accepts(self, option: str) -> bool:
        return option in self.options

    def build(self, num_classes: int | None, in_channels: int | None, options: Mapping[str, Any]) -> "nn.Module":
        """The network; None stands for its own number of classes or channels."""
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
            setting = ", ".join(f"{option}={value!r}" for option, value in options.items())
            raise ConvoyError(f"{self.info.name} refuses {setting}: {error}") from error

    def _check(self, option: str, value: object) -> None:
        name, accepted = self.info.name, self.options
        if option not in accepted:
            raise UnknownOptionError(name, option, accepted, "it has none")
        kind = type(accepted[option])
        if type(value) is not kind and (kind, type(value)) != (float, int):
            example = f"of type {kind.__name__}, like {accepted[option]!r}"
            raise ConvoyError(f"option {option!r} of {name} is {value!r}: give a value {example}")


DIGITS, SMALL, PHOTOGRAPHS = (1, 28, 28), (3, 32, 32), (3, 224, 224)


def _one(name: str, title: str, source: str, shape: tuple[int, int, int], classes: int, **fixed: Any) -> Registered:
    return Registered(ModelInfo(name, title, shape, classes), source, fixed)


def _both_sizes(name: str, title: str, source: str, **fixed: Any) -> Iterator[Registered]:
    yield _one(name, title, source, PHOTOGRAPHS, 1000, **fixed, small_images=False)
    yield _one(f"{name}-cifar", f"{title}, for 32x32 images", source, SMALL, 10, **fixed, small_images=True)


def _table() -> Iterator[Registered]:
    yield _one("lenet", "LeNet-5 with ReLU (LeCun et al., 1998)", "lenet.LeNet", DIGITS, 10)
    yield _one("cifar-quick", "cuda-convnet's quick net (Krizhevsky, 2012)", "cifar_quick.CifarQuick", SMALL, 10)
    title = "the network of 94% on CIFAR-10 in 3.29 seconds (Jordan, 2024)"
    yield _one("airbench94", title, "airbench.Airbench94", SMALL, 10)
    two_columns = "AlexNet, two columns (Krizhevsky et al., 2012)"
    yield _one("alexnet-2012", two_columns, "alexnet.AlexNet2012", PHOTOGRAPHS, 1000)
    yield from _both_sizes("alexnet", "AlexNet, one tower (Krizhevsky, 2014)", "alexnet.AlexNet")
    for depth in (11, 13, 16, 19):
        title = f"VGG-{depth} (Simonyan and Zisserman, 2014)"
        yield from _both_sizes(f"vgg{depth}", title, "vgg.VGG", depth=depth, batch_norm=False)
        title = f"VGG-{depth} with batch norm (Simonyan and Zisserman, 2014)"
        yield from _both_sizes(f"vgg{depth}_bn", title, "vgg.VGG", depth=depth, batch_norm=True)
    yield from _both_sizes("googlenet", "GoogLeNet with batch norm (Szegedy et al., 2014)", "googlenet.GoogLeNet")
    for depth in (18, 34, 50, 101, 152):
        yield from _both_sizes(f"resnet{depth}", f"ResNet-{depth} (He et al., 2015)", "resnet.ResNet", depth=depth)
    for version in ("1.0", "1.1"):
        name, title = f"squeezenet{version.replace('.', '_')}", f"SqueezeNet {version} (Iandola et al., 2016)"
        yield from _both_sizes(name, title, "squeezenet.SqueezeNet", version=version)
    for depth in (121, 161, 169, 201):
        title = f"DenseNet-{depth} (Huang et al., 2016)"
        yield from _both_sizes(f"densenet{depth}", title, "densenet.DenseNet", depth=depth)
    title = "U-Net, padded and with batch norm (Ronneberger et al., 2015)"
    yield _one("unet", title, "unet.UNet", (3, 256, 256), 2)


REGISTRY: dict[str, Registered] = {entry.info.name: entry for entry in _table()}


def list_models() -> list[ModelInfo]:
    """The networks of the registry, in the order of their papers."""
    return [entry.info for entry in REGISTRY.values()]


def check_name(name: str, here: bool = True) -> None:
    """Refuse a network's name that is none of the four kinds, as far as the name alone says it. With `here` it is to be
    built on this machine, which then needs its library."""
    if name in REGISTRY:
        return
    origin, colon, rest = name.partition(":")
    quoted = repr(brief(name))
    if not colon:
        near = did_you_mean(name, REGISTRY, otherwise="`convoy models` lists them")
        module, _, function = name.rpartition(".")
        if module.isidentifier() and own.is_installed(module):
            near = f": did you mean {module}:{function}?" if function != "py" else f": write {name}:FUNCTION"
        raise ConvoyError(f"unknown model {quoted}{near} (others: timm:NAME, torchvision:NAME, package.module:factory)")
    if not origin or not rest:
        raise ConvoyError(f"model {quoted} is incomplete: write timm:NAME, torchvision:NAME or package.module:factory")
    if origin in ("timm", "torchvision"):
        if here and not own.is_installed(origin):
            raise ConvoyError(f"models of {origin} need its extra: {pip_install(origin)}")
    elif here:
        own.check_name(name, "model")
