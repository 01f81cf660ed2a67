"""The final weights as a safetensors file that plain PyTorch loads."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from convoy.files import write_atomically


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a model's parameters and buffers, whole and under its own names."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))
