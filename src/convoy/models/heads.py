"""Which layers of a network give its classes, and which one reads its images."""

from typing import Any

from torch import nn


def classifier_names(model: nn.Module) -> list[str]:
    """Names of the modules that turn features into classes, in the model's order. That is what timm says of its
    networks; elsewhere the last linear layer, or the last convolution where there is none (SqueezeNet), and the same of
    each auxiliary head (a child whose name begins with "aux": GoogLeNet, Inception)."""
    config: Any = getattr(model, "pretrained_cfg", None)
    entry = config.get("classifier") if isinstance(config, dict) else None
    if entry:
        modules = dict(model.named_modules())
        return [name for name in ([entry] if isinstance(entry, str) else entry) if name in modules]
    auxiliary = auxiliary_names(model)
    heads = [_last(model.get_submodule(name), f"{name}.") for name in auxiliary]
    heads.append(_last(model, "", skip=auxiliary))
    return [name for name in heads if name is not None]


def auxiliary_names(model: nn.Module) -> list[str]:
    """Names of the children that are classifiers in the middle of the network."""
    return [name for name, _ in model.named_children() if name.lower().startswith("aux")]


def first_convolution(model: nn.Module) -> nn.Conv2d | None:
    """The convolution that was defined first, which reads the images; None in a network without one."""
    return next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)


def image_channels(model: nn.Module) -> int:
    """Channels of the images that a network of which nothing is known takes: as many as its first convolution, or 3."""
    stem = first_convolution(model)
    return 3 if stem is None else int(stem.in_channels)


def _last(model: nn.Module, prefix: str, skip: list[str] | None = None) -> str | None:
    layers: list[tuple[str, nn.Module]] = [
        (name, layer) for name, layer in model.named_modules() if name.partition(".")[0] not in (skip or [])
    ]
    for kind in (nn.Linear, nn.Conv2d):
        names = [name for name, layer in layers if isinstance(layer, kind)]
        if names:
            return (prefix + names[-1]).removesuffix(".")  # the head may be a layer by itself
    return None
