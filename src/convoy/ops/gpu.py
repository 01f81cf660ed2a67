"""Convoy's own kernels on a GPU: where they can run, and on which of several GPUs."""

import contextlib
import functools
import importlib
import importlib.util
import warnings
from types import ModuleType

import torch
from torch import Tensor

from convoy.comm.memory import lack_of_memory


def triton_kernels(module: str, what: str, x: Tensor) -> ModuleType | None:
    """Kernels written in Triton, where they run; elsewhere torch's own operations do their work.

    Args:
        module: of this folder; its `try_out` launches one of the kernels on a device.
        what: needs them, for the warning that they cannot be built.
        x: what they are to work on.
    """
    return _tried(module, what, x.device) if x.device.type == "cuda" else None


@functools.cache
def _tried(module: str, what: str, device: torch.device) -> ModuleType | None:
    """Triton builds its launchers when it first needs them, with the host's compiler."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        kernels = importlib.import_module(f"convoy.ops.{module}")
        kernels.try_out(device)
    except Exception as error:
        if lack_of_memory(error) is not None:  # later it may go well, and the run's rounding hangs on it
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"{what} runs without Triton's kernels and so more slowly, as they cannot be built here: {first}",
            stacklevel=2,
        )
        return None
    return kernels


def on_its_gpu(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launches kernels on the GPU of a tensor, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
