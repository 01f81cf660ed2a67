"""Networks of two libraries that are extras: `timm:NAME` and `torchvision:NAME`.

Neither library is imported before a name asks for it, and nothing is downloaded: published weights are read from a
file, by `load_weights`. A failure of their constructors becomes one sentence.
"""

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from convoy.errors import ConvoyError
from convoy.models.registry import ModelInfo, UnknownOptionError
from convoy.terminal import did_you_mean

_UNKNOWN = "leave it out, or see what its constructor accepts"


def called(name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The result of `function`; raises ConvoyError naming `name` where it fails."""
    try:
        return function(*arguments, **keywords)
    except ConvoyError:
        raise
    except Exception as error:
        option = str(error).partition("unexpected keyword argument '")[2].partition("'")[0]
        if isinstance(error, TypeError) and option in keywords:
            raise UnknownOptionError(name, option, (), _UNKNOWN) from error
        raise ConvoyError(f"{name} could not be built, it failed with {reason(error)}") from error


def reason(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of `function` by name; none where it has no signature to read."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def takes(function: Callable[..., Any], keyword: str, by_name: bool = False) -> bool:
    """Whether `function` takes `keyword` by its name or, unless it has to, among its **kwargs."""
    kinds = {name: parameter.kind for name, parameter in parameters(function).items()}
    is_named = kinds.get(keyword) in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return is_named or (not by_name and inspect.Parameter.VAR_KEYWORD in kinds.values())


DOWNLOADS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "weights", "weights_backbone"}


@dataclass(frozen=True)
class Timm:
    """A network of timm (pytorch-image-models); options are those of `timm.create_model`."""

    name: str

    @property
    def info(self) -> ModelInfo:
        config = _extra("timm").get_pretrained_cfg(self._model(), allow_unregistered=True)
        channels, height, width = config.input_size
        return ModelInfo(self.name, f"{self._model()} (timm)", (channels, height, width), config.num_classes)

    def accepts(self, option: str) -> bool:
        """Timm's networks have options of their own names, as `zero_init_last`, which only their construction tells."""
        return False

    def build(self, num_classes: int | None, in_channels: int | None, options: Mapping[str, Any]) -> nn.Module:
        _refuse_downloads(self.name, options)
        sizes = {"num_classes": num_classes, "in_chans": in_channels}
        requested_sizes = {key: value for key, value in sizes.items() if value is not None}
        create = _extra("timm").create_model
        model: nn.Module = called(self.name, create, self._model(), pretrained=False, **requested_sizes, **options)
        return model

    def _model(self) -> str:
        timm = _extra("timm")
        model = self.name.partition(":")[2]
        if not timm.is_model(model):
            near = did_you_mean(model, timm.list_models(), otherwise="timm.list_models() lists them")
            raise ConvoyError(f"timm has no model {model!r}{near}")
        return model


@dataclass(frozen=True)
class Torchvision:
    """An image classifier of torchvision; options are those of its builder."""

    name: str

    @property
    def info(self) -> ModelInfo:
        published = list(_extra("torchvision.models").get_model_weights(self._model()))
        size = min(weights.transforms().crop_size[0] for weights in published)  # larger ones are for fine-tuned weights
        classes = len(published[0].meta["categories"])
        return ModelInfo(self.name, f"{self._model()} (torchvision)", (3, size, size), classes)

    def accepts(self, option: str) -> bool:
        """Whether the builder or the class it names takes `option` by name: some swallow whatever they do not know."""
        return option in self._options()

    def build(self, num_classes: int | None, in_channels: int | None, options: Mapping[str, Any]) -> nn.Module:
        _refuse_downloads(self.name, options)
        if in_channels not in (None, 3):
            raise ConvoyError(
                f"{self.name} reads images of 3 channels and cannot be built for {in_channels}: set data.channels=3, "
                f"or take a network of Convoy's own or of timm"
            )
        accepted = self._options()
        for option in options:
            if option not in accepted:
                raise UnknownOptionError(self.name, option, accepted, _UNKNOWN)
        arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
        if "init_weights" in accepted and self._model() in ("googlenet", "inception_v3"):  # they warn unless told
            arguments["init_weights"] = True
        builder = _extra("torchvision.models").get_model_builder(self._model())
        model: nn.Module = called(self.name, builder, weights=None, **(arguments | dict(options)))
        return model

    def _options(self) -> list[str]:
        builder = _extra("torchvision.models").get_model_builder(self._model())
        network = typing.get_type_hints(builder)["return"]
        names = [*parameters(builder), *parameters(network)]
        return [name for name in names if name not in DOWNLOADS | {"progress", "kwargs", "num_classes"}]

    def _model(self) -> str:
        models = _extra("torchvision.models")
        model = self.name.partition(":")[2]
        classifiers = models.list_models(module=models)
        if model not in classifiers:
            near = did_you_mean(model, classifiers, otherwise="torchvision.models.list_models() lists them")
            raise ConvoyError(f"torchvision has no image classifier {model!r}{near}")
        return model


def _extra(module: str) -> ModuleType:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        need = "models of {} need its extra" if error.name == package else f"{{}} needs the package {error.name!r}"
        raise ConvoyError(f"{need.format(package)}: pip install 'convoy-nn[{package}]'") from error
    except Exception as error:
        raise ConvoyError(
            f"{package} is installed but does not import beside torch {torch.__version__} ({reason(error)}): "
            f"install torch and torchvision from the same index"
        ) from error


def _refuse_downloads(name: str, options: Mapping[str, Any]) -> None:
    for option in DOWNLOADS & options.keys():
        raise ConvoyError(
            f"option {option!r} of {name} would download or unpickle weights: give a file with --weights FILE"
        )
