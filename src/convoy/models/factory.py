"""From a name to a network: the registry's; `timm:NAME` and `torchvision:NAME`, of two libraries that are extras; or
`package.module:factory` or `mine.py:factory`, a function or class of the user's that returns an `nn.Module`.

No library is imported before a name asks for it, and nothing is downloaded but by `published`, where a user names
weights of a library. A failure of a constructor becomes one sentence.
"""

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError, reason
from convoy.graph.capture import unwrapped
from convoy.models.registry import REGISTRY, ModelInfo, Registered, UnknownOptionError, check_name
from convoy.models.weights import classifier_names, first_convolution
from convoy.own import function_of
from convoy.terminal import did_you_mean, pip_install

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


_USUAL = {"num_classes": 1000, "in_channels": 3, "image_size": 224}  # where a function needs them, and nobody says
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

    def weights(self) -> dict[str, Tensor]:
        """Those that timm publishes."""
        model: nn.Module = _extra("timm").create_model(self._model(), pretrained=True)
        return model.state_dict()

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

    def weights(self) -> dict[str, Tensor]:
        """Those that torchvision's `weights="DEFAULT"` stands for."""
        published = _extra("torchvision.models").get_model_weights(self._model())
        state: dict[str, Tensor] = published.DEFAULT.get_state_dict(progress=False, check_hash=True)
        return state

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
        raise ConvoyError(f"{need.format(package)}: {pip_install(package)}") from error
    except Exception as error:
        raise ConvoyError(
            f"{package} is installed but does not import beside torch {torch.__version__} ({reason(error)}): "
            f"install torch and torchvision from the same index"
        ) from error


_LIBRARIES: dict[str, type[Timm | Torchvision]] = {"timm": Timm, "torchvision": Torchvision}


def published(name: str) -> dict[str, Tensor] | None:
    """The weights of `torchvision:NAME` or `timm:NAME`, which the library fetches unless it has them already; None for
    other names, as of a file."""
    origin, colon, _ = name.partition(":")
    if not colon or origin not in _LIBRARIES:
        return None
    try:
        return _LIBRARIES[origin](name).weights()
    except ConvoyError:
        raise
    except Exception as error:
        raise ConvoyError(
            f"the weights {name} cannot be fetched ({reason(error)}): fetch them where there is a network, and give "
            "their file with --weights FILE"
        ) from error


def _refuse_downloads(name: str, options: Mapping[str, Any]) -> None:
    for option in DOWNLOADS & options.keys():
        raise ConvoyError(
            f"option {option!r} of {name} would download or unpickle weights: give a file with --weights FILE, or "
            f"--weights {name}"
        )


@dataclass(frozen=True)
class Factory:
    """A function or class of the user's that returns an `nn.Module`. It gets `num_classes` and `in_channels` where its
    signature has them, those of ImageNet where it needs them and there are no data; where it has not, the network it
    returns must already have what was asked for."""

    name: str

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(self.name, f"{self.name} (own factory)", None, None)

    def accepts(self, option: str) -> bool:
        return takes(self.function(), option)

    def build(self, num_classes: int | None, in_channels: int | None, options: Mapping[str, Any]) -> nn.Module:
        function = self.function()
        for option in options:
            if not takes(function, option):
                raise UnknownOptionError(self.name, option, parameters(function), "leave it out")
        request = {"num_classes": num_classes, "in_channels": in_channels}
        sizes = {key: value for key, value in request.items() if takes(function, key, by_name=True)}
        required = {key for key, each in parameters(function).items() if each.default is each.empty}
        keywords = {key: usual for key, usual in _USUAL.items() if key in required}
        keywords |= {key: value for key, value in request.items() if value is not None and takes(function, key)}
        model = self._call(function, keywords, options)
        if not isinstance(model, nn.Module):
            raise ConvoyError(f"{self.name} returned {type(model).__name__}: it has to return an nn.Module")
        model = unwrapped(model)
        _check_sizes(self.name, model, {key: value for key, value in request.items() if key not in sizes})
        return model

    def _call(self, function: Callable[..., Any], sizes: dict[str, int], options: Mapping[str, Any]) -> Any:
        """Call with the sizes, less those that **kwargs took and the code behind it refused."""
        while True:
            try:
                return called(self.name, function, **(sizes | dict(options)))
            except UnknownOptionError as error:
                if error.option not in sizes or takes(function, error.option, by_name=True):
                    raise
                del sizes[error.option]

    def function(self) -> Callable[..., Any]:
        return function_of(self.name, "a function or class that returns an nn.Module")


def _check_sizes(name: str, model: nn.Module, request: Mapping[str, int | None]) -> None:
    """Compare the network with what was asked for, as far as its first and last layers tell."""
    stem = first_convolution(model)
    channels, num_classes = request.get("in_channels"), request.get("num_classes")
    if channels and stem and stem.in_channels not in (0, channels):  # 0 in a lazy convolution
        raise ConvoyError(
            f"{name} reads images of {stem.in_channels} channel{'s' * (stem.in_channels > 1)} where the data has "
            f"{channels}: give the factory an argument in_channels, or --set data.channels={stem.in_channels}"
        )
    for head in classifier_names(model):
        layer = model.get_submodule(head)
        classes = layer.out_features if isinstance(layer, nn.Linear) else getattr(layer, "out_channels", None)
        if num_classes and classes and classes != num_classes:
            raise ConvoyError(
                f"{name} tells {classes} classes apart where {num_classes} are needed: "
                f"give the factory an argument num_classes"
            )


def create(name: str, *, num_classes: int | None = None, in_channels: int | None = None, **options: Any) -> nn.Module:
    """Build the network `name` (of `list_models()`, `timm:NAME`, `torchvision:NAME` or `package.module:factory`) with
    fresh weights, on the device of torch's context. It takes images [N, in_channels, H, W] and gives logits
    [N, num_classes], both its own where None; `options` go to its constructor. Raises ConvoyError."""
    for key, number in (("num_classes", num_classes), ("in_channels", in_channels)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConvoyError(f"{key} of {name} is {number!r}: give a whole number of at least 1")
    return find(name).build(num_classes, in_channels, options)


def accepts(name: str, option: str) -> bool:
    """Whether the network `name` takes an option of Convoy's networks."""
    return find(name).accepts(option)


def describe(name: str) -> ModelInfo:
    """What is known of the network `name` before it is built."""
    return find(name).info


def find(name: str) -> Registered | Timm | Torchvision | Factory:
    """The origin of the network `name`."""
    check_name(name)
    return REGISTRY[name] if name in REGISTRY else _LIBRARIES.get(name.partition(":")[0], Factory)(name)
