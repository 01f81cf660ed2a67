"""The final weights as a safetensors file that plain PyTorch loads."""

from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from convoy.training.files import write_atomically


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the model's parameters and buffers, whole and under its own names."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))
