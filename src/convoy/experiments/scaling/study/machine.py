"""On what a study was measured, and with which versions."""

import importlib.metadata
from typing import Any

import torch

from convoy.launch.cores import own_cores
from convoy.training.environment import describe

_PACKAGES = ("lightning", "accelerate", "timm", "torchvision", "numpy")


def machine_of(device: torch.device) -> dict[str, Any]:
    """The facts, by name."""
    about = describe("", device)
    found: dict[str, Any] = {key: about[key] for key in ("machine", "convoy", "torch", "python")}
    found |= {"cores": len(own_cores()), "device": device.type}
    if device.type == "cuda":
        found |= {"gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
