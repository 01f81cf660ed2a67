"""Weights from a file: Convoy's own, torchvision's, timm's, or anybody's state dict of the same network.

Also which layers of a network give its classes, and which one reads its images.

Nothing in a file is executed: safetensors hold numbers only, and `.pth` files are read with `weights_only=True`.
"""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError, reason
from convoy.files import expanded
from convoy.terminal import listed

# Put before every name by DistributedDataParallel, torch.compile, and trainers that hold the network in `model`.
PREFIXES = ("module.", "_orig_mod.", "model.")
# Under which key training checkpoints keep the weights.
ENTRIES = ("state_dict", "model")
# What makes a folder a run directory, and where that keeps its weights.
RUN, OF_RUN = "config.yaml", "weights.safetensors"


def load_weights(model: nn.Module, path: str | Path, published: Mapping[str, Tensor] | None = None) -> list[str]:
    """Read weights into `model`: a `.safetensors` file, a `.pth` or `.pt` file with a state dict, or a run directory;
    or take those that a library has `published` under that name. A file with another number of classes leaves the
    classifier's fresh weights in place; auxiliary heads that the file or the network lacks are left out. Returns a
    sentence for each such thing. Raises ConvoyError, with `model` unchanged, for a file that belongs to another
    network."""
    path = expanded(path)
    if (path / RUN).is_file():
        if not (path / OF_RUN).is_file():
            raise ConvoyError(
                f"the run {path} has no {OF_RUN} yet: finish it with convoy train {path} --resume, or name another"
            )
        path = path / OF_RUN
    state = model.state_dict()
    tensors = _without_prefixes(_read(path) if published is None else dict(published), state)
    notes = []

    fresh = _other_classes(model, state, tensors)
    if fresh:
        key = fresh[-1]
        notes.append(
            f"{path.name} has {len(tensors[key])} classes and this net {len(state[key])}: "
            f"fresh weights stay in {_list(list(dict.fromkeys(key.rpartition('.')[0] for key in fresh)))}"
        )
    missing = state.keys() - tensors.keys()
    unexpected = tensors.keys() - state.keys()
    missing -= {key for key in missing if key.endswith(".num_batches_tracked")}  # files older than PyTorch 0.4.1
    heads = auxiliary_names(model)
    missing_heads = [head for head in heads if not any(key.startswith(f"{head}.") for key in tensors)]
    if missing_heads:
        missing -= {key for key in missing if key.partition(".")[0] in missing_heads}
        notes.append(f"{path.name} lacks the auxiliary heads: fresh weights stay in {_list(missing_heads)}")
    extra_heads = {key for key in unexpected if key.lower().startswith("aux") and not heads}
    if extra_heads:
        unexpected -= extra_heads
        notes.append(f"{path.name} has auxiliary heads and this net none: they are left out")
    misfits = [
        f"{key} is {_kind(tensors[key])} where the net has {_kind(x)}"
        for key, x in state.items()
        if key in tensors and key not in fresh
        if (tensors[key].shape, tensors[key].is_floating_point()) != (x.shape, x.is_floating_point())
    ]
    faults = [f"it lacks {listed([key for key in state if key in missing], 3)}"] if missing else []
    if unexpected:
        faults.append(f"it has {listed([key for key in tensors if key in unexpected], 3)}, which the net has not")
    if misfits:
        faults.append(listed(misfits, 3))
    if faults:
        raise ConvoyError(
            f"{path} does not fit {type(model).__name__}: {'; '.join(faults)}; give the weights of this net, or train "
            f"the net they were made for"
        )

    loaded = {key: tensors[key] for key in state if key in tensors and key not in fresh and not state[key].is_meta}
    model.load_state_dict(loaded, strict=False)  # what is on the meta device another rank has
    if (
        path.stem in ("googlenet-1378be20", "torchvision:googlenet")
        and getattr(model, "transform_input", True) is False
    ):
        notes.append(
            f"{path.name} was published for images in the range -1..1: set the model's option transform_input=true"
        )
    return notes


def _read(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        raise ConvoyError(
            f"weights {path} are a folder and no run directory: name the .safetensors, .pth or .pt file in it"
        )
    if not path.exists():
        raise ConvoyError(f"weights file {path} does not exist: check the path")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise ConvoyError(
            f"{path} cannot be read as weights ({_why(error)}): give a whole .safetensors file, or a .pth or .pt "
            f"file with a state dict"
        ) from error
    for entry in ENTRIES:
        if isinstance(content, dict) and isinstance(content.get(entry), dict):
            content = content[entry]
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConvoyError(
            f"{path} holds no state dict, by itself or under 'state_dict' or 'model': save model.state_dict()"
        )
    for key, x in content.items():
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else "on the meta device" if x.is_meta else ""
        if kind := kind or str(x.layout).removeprefix("torch.").removeprefix("strided"):
            raise ConvoyError(
                f"{key} in {path} is {kind}, and weights are plain numbers: save plain tensors in its place"
            )
    return {str(key): value for key, value in content.items()}


def _why(error: Exception) -> str:
    forbidden = re.search(r"GLOBAL (\S+)", str(error))
    if forbidden is None and "weights_only" in str(error):  # which advises to run what the file holds
        return "it is no whole file of torch.save, or holds more than tensors"
    return f"it holds Python code or objects, {forbidden[1]}, which are not loaded" if forbidden else reason(error)


def _without_prefixes(tensors: dict[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    while not tensors.keys() & state.keys():
        for prefix in PREFIXES:
            if all(key.startswith(prefix) for key in tensors):
                tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
                break
        else:
            break
    return tensors


def _other_classes(model: nn.Module, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the classifier's tensors that differ in the number of classes and in nothing else."""
    keys = [f"{head}.{kind}" for head in classifier_names(model) for kind in ("weight", "bias")]
    pairs = [key for key in keys if key in state and key in tensors and tensors[key].dim() == state[key].dim()]
    return [
        key for key in pairs if len(tensors[key]) != len(state[key]) and tensors[key].shape[1:] == state[key].shape[1:]
    ]


def _kind(tensor: Tensor) -> str:
    shape = "x".join(str(size) for size in tensor.shape) or "one number"
    return shape if tensor.is_floating_point() else f"{shape} of {str(tensor.dtype).removeprefix('torch.')}"


def _list(items: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


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
