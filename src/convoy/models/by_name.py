"""From a name to a network: the registry, timm, torchvision, or a factory of the user's."""

from typing import Any

from torch import nn

from convoy.errors import ConvoyError
from convoy.models.factory import Factory
from convoy.models.libraries import Timm, Torchvision
from convoy.models.registry import REGISTRY, ModelInfo, Registered, check_name


def create(name: str, *, num_classes: int | None = None, in_channels: int | None = None, **options: Any) -> nn.Module:
    """Build the network `name` with fresh weights, on the device of torch's context.

    `name` is one of `list_models()`, `timm:NAME`, `torchvision:NAME` or `package.module:factory`. `num_classes` and
    `in_channels` of None stand for the network's own. `options` go to its constructor.
    It takes images [N, in_channels, H, W] and gives logits [N, num_classes].
    Raises ConvoyError for an unknown name, an unknown option, a missing extra, or classes and channels that the network
    cannot be built for.
    """
    for key, number in (("num_classes", num_classes), ("in_channels", in_channels)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConvoyError(f"{key} of {name} is {number!r}: give a whole number of at least 1")
    return find(name).build(num_classes, in_channels, options)


def accepts(name: str, option: str) -> bool:
    """Whether the network `name` takes the keyword `option`; raises ConvoyError for an unknown name.

    A network of timm or torchvision is built on the meta device to find out.
    """
    return find(name).accepts(option)


def describe(name: str) -> ModelInfo:
    """What is known of the network `name` before it is built; raises ConvoyError for an unknown name."""
    return find(name).info


def find(name: str) -> Registered | Timm | Torchvision | Factory:
    """Where the network `name` comes from; raises ConvoyError for a name that is none of the four kinds."""
    check_name(name)
    if name in REGISTRY:
        return REGISTRY[name]
    origin = name.partition(":")[0]
    if origin == "timm":
        return Timm(name)
    return Torchvision(name) if origin == "torchvision" else Factory(name)
