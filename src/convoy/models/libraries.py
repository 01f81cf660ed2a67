"""Networks from elsewhere: `timm:NAME`, `torchvision:NAME` and `package.module:factory`.

Nothing is downloaded: published weights are read from a file, by `load_weights`. timm and torchvision are extras, which
are imported only when a name asks for them.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from convoy.errors import ConvoyError
from convoy.models.heads import classifier_names, first_convolution
from convoy.models.names import did_you_mean
from convoy.models.registry import ModelInfo

DOWNLOADS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "weights", "weights_backbone"}


@dataclass(frozen=True)
class Timm:
    """A network of timm (pytorch-image-models); options are those of `timm.create_model`."""

    name: str

    @property
    def info(self) -> ModelInfo:
        """Name, input and classes as timm's own table has them."""
        config = _extra("timm").get_pretrained_cfg(self._model(), allow_unregistered=True)
        channels, height, width = config.input_size
        return ModelInfo(self.name, f"{self._model()} (timm)", (channels, height, width), config.num_classes)

    def accepts(self, option: str) -> bool:
        """Whether the network takes `option`; found out by building it on the meta device."""
        self._model()
        return option not in DOWNLOADS and _builds_with(self, option)

    def build(self, num_classes: int | None, in_channels: int | None, options: Mapping[str, Any]) -> nn.Module:
        """The network with fresh weights; None stands for its own number of classes or channels."""
        _refuse_downloads(self.name, options)
        sizes = {"num_classes": num_classes, "in_chans": in_channels}
        given = {key: value for key, value in sizes.items() if value is not None}
        create = _extra("timm").create_model
        model: nn.Module = _called(self.name, create, self._model(), pretrained=False, **given, **options)
        return model

    def _model(self) -> str:
        timm = _extra("timm")
        model = self.name.partition(":")[2]
        if not timm.is_model(model):
            raise ConvoyError(f"timm has no model {model!r}{did_you_mean(model, timm.list_models())}")
        return model


@dataclass(frozen=True)
class Torchvision:
    """An image classifier of torchvision; options are those of its builder."""

    name: str

    @property
    def info(self) -> ModelInfo:
        """Name, and the input and classes of the weights that torchvision publishes for it."""
        published = list(_extra("torchvision.models").get_model_weights(self._model()))
        size = min(weights.transforms().crop_size[0] for weights in published)  # larger ones are for fine-tuned weights
        classes = len(published[0].meta["categories"])
        return ModelInfo(self.name, f"{self._model()} (torchvision)", (3, size, size), classes)

    def accepts(self, option: str) -> bool:
        """Whether the network takes `option`; found out by building it on the meta device."""
        self._model()
        return option not in DOWNLOADS and _builds_with(self, option)

    def build(self, num_classes: int | None, in_channels: int | None, options: Mapping[str, Any]) -> nn.Module:
        """The network with fresh weights; None stands for its own number of classes."""
        _refuse_downloads(self.name, options)
        if in_channels not in (None, 3):
            raise ConvoyError(
                f"{self.name} reads images of 3 channels and cannot be built for {in_channels}: set data.channels=3, "
                f"or take a network of Convoy's own or of timm"
            )
        given = {} if num_classes is None else {"num_classes": num_classes}
        if self._model() in ("googlenet", "inception_v3"):  # they warn unless they are told
            given["init_weights"] = True
        create = _extra("torchvision.models").get_model
        model: nn.Module = _called(self.name, create, self._model(), weights=None, **(given | dict(options)))
        return model

    def _model(self) -> str:
        models = _extra("torchvision.models")
        model = self.name.partition(":")[2]
        classifiers = models.list_models(module=models)
        if model not in classifiers:
            raise ConvoyError(f"torchvision has no image classifier {model!r}{did_you_mean(model, classifiers)}")
        return model


@dataclass(frozen=True)
class Factory:
    """A function or class of the user's, `package.module:factory`, that returns an `nn.Module`.

    It gets `num_classes` and `in_channels` where its signature has them; where it has not, the network it returns must
    already have what was asked for.
    """

    name: str

    @property
    def info(self) -> ModelInfo:
        """The name; a factory says nothing else before it is called."""
        return ModelInfo(self.name, f"{self.name} (own factory)", None, None)

    def accepts(self, option: str) -> bool:
        """Whether the signature of the factory takes the keyword `option`."""
        return _takes(self._function(), option) is not None

    def build(self, num_classes: int | None, in_channels: int | None, options: Mapping[str, Any]) -> nn.Module:
        """What the factory returns.

        Raises ConvoyError where it fails, does not return a module, or ignores the asked classes or channels.
        """
        function = self._function()
        for option in options:
            if _takes(function, option) is None:
                raise ConvoyError(f"{self.name} has no option {option!r}: it accepts {_keywords(function)}")
        asked = {"num_classes": num_classes, "in_channels": in_channels}
        sizes = {key: value for key, value in asked.items() if value is not None and _takes(function, key)}
        model = self._call(function, sizes, options)
        if not isinstance(model, nn.Module):
            raise ConvoyError(f"{self.name} returned {type(model).__name__}: it has to return an nn.Module")
        _check_sizes(self.name, model, asked)
        return model

    def _call(self, function: Callable[..., Any], sizes: dict[str, int], options: Mapping[str, Any]) -> Any:
        """Call with the sizes, less those that **kwargs took and what lies behind it refused."""
        while True:
            try:
                return _called(self.name, function, **(sizes | dict(options)))
            except UnknownOptionError as error:
                if error.option not in sizes or _takes(function, error.option) == "explicitly":
                    raise
                del sizes[error.option]

    def _function(self) -> Callable[..., Any]:
        module, _, path = self.name.partition(":")
        found: Any = _user_module(self.name, module)
        for part in path.split("."):
            if not hasattr(found, part):
                near = did_you_mean(part, [name for name in dir(found) if not name.startswith("_")])
                raise ConvoyError(f"{self.name}: {module} has no {part!r}{near}")
            found = getattr(found, part)
        if not callable(found):
            raise ConvoyError(
                f"{self.name} is of type {type(found).__name__}: name a function or class that returns an nn.Module"
            )
        function: Callable[..., Any] = found
        return function


class UnknownOptionError(ConvoyError):
    """A keyword that a network from elsewhere does not take."""

    def __init__(self, name: str, option: str) -> None:
        super().__init__(f"{name} has no option {option!r}: leave it out, or see what its constructor accepts")
        self.option = option


def _extra(module: str) -> ModuleType:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise ConvoyError(
                f"{package} needs the package {error.name!r}: pip install 'convoy-nn[{package}]'"
            ) from error
        raise ConvoyError(f"models of {package} need its extra: pip install 'convoy-nn[{package}]'") from error
    except Exception as error:
        raise ConvoyError(
            f"{package} is installed but does not import beside torch {torch.__version__} ({_reason(error)}): "
            f"install the build of {package} made for it"
        ) from error


def _user_module(name: str, module: str) -> ModuleType:
    """Import `module`, from the current directory too, and keep that importable for what the module imports later."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise ConvoyError(
                f"{name}: there is no module {error.name!r} in {here} or among the installed packages"
            ) from error
        raise ConvoyError(f"{name}: {module} needs the module {error.name!r}, which is not installed") from error
    except Exception as error:
        raise ConvoyError(f"{name}: importing {module} failed with {_reason(error)}") from error


def _called(name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    try:
        return function(*arguments, **keywords)
    except ConvoyError:
        raise
    except Exception as error:
        option = str(error).partition("unexpected keyword argument '")[2].partition("'")[0]
        if isinstance(error, TypeError) and option in keywords:
            raise UnknownOptionError(name, option) from error
        raise ConvoyError(f"{name} could not be built, it failed with {_reason(error)}") from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _builds_with(origin: Timm | Torchvision, option: str) -> bool:
    with torch.device("meta"):
        try:
            origin.build(None, None, {option: False})
        except UnknownOptionError as error:
            return error.option != option
        except ConvoyError:  # the value or the meta device was refused, not the keyword
            return True
    return True


def _refuse_downloads(name: str, options: Mapping[str, Any]) -> None:
    for option in DOWNLOADS & options.keys():
        raise ConvoyError(
            f"option {option!r} of {name} would download or unpickle weights: give a file with --weights FILE"
        )


def _takes(function: Callable[..., Any], keyword: str) -> str | None:
    """How `function` takes `keyword`: "explicitly", through "**kwargs", or not at all (None)."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    kinds = inspect.Parameter
    if keyword in parameters and parameters[keyword].kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
        return "explicitly"
    if any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values()):
        return "**kwargs"
    return None


def _keywords(function: Callable[..., Any]) -> str:
    try:
        return ", ".join(inspect.signature(function).parameters) or "none"
    except (TypeError, ValueError):
        return "none"


def _check_sizes(name: str, model: nn.Module, asked: Mapping[str, int | None]) -> None:
    """Compare the network with what was asked for, as far as its first and last layers tell."""
    stem = first_convolution(model)
    if asked["in_channels"] and stem and stem.in_channels and stem.in_channels != asked["in_channels"]:
        raise ConvoyError(
            f"{name} reads images of {stem.in_channels} channels where the data has {asked['in_channels']}: "
            f"give the factory an argument in_channels, or set data.channels={stem.in_channels}"
        )
    for head in classifier_names(model):
        layer = model.get_submodule(head)
        classes = layer.out_features if isinstance(layer, nn.Linear) else getattr(layer, "out_channels", None)
        if asked["num_classes"] and classes and classes != asked["num_classes"]:
            raise ConvoyError(
                f"{name} tells {classes} classes apart where {asked['num_classes']} are needed: "
                f"give the factory an argument num_classes"
            )
