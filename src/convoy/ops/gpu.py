"""Numbers that lie on a GPU already, and Convoy's own kernels there: where they can run, and how they are launched."""

import contextlib
import functools
import importlib
import importlib.util
import operator
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convoy.comm.position import lack_of_memory


class Constants:
    """Numbers as a tensor, copied once to each device that needs them: with a copy in every pass the host of a GPU
    would wait for it."""

    def __init__(self, numbers: Sequence[Any] | Tensor) -> None:
        # numpy keeps whole numbers whole and others in double precision
        self._numbers = numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers))
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor on the device of `x`, in its type or another."""
        key = x.device, dtype or x.dtype
        tensor = self._copies.get(key)
        if tensor is None:
            with torch.inference_mode(False):  # a training pass may need what an evaluation has made
                tensor = self._numbers.to(*key)
            if not torch.compiler.is_compiling():
                self._copies[key] = tensor
        return tensor


def triton_kernels(module: str, what: str, x: Tensor) -> ModuleType | None:
    """The Triton kernels of a `module` of this folder, where `x` is on a GPU that can run them, which its `try_out`
    shows; otherwise torch's own operations do their work, and a warning names `what` needs them."""
    return _tried(module, what, x.device) if x.device.type == "cuda" else None


@functools.cache
def _tried(module: str, what: str, device: torch.device) -> ModuleType | None:
    """The kernels if Triton can build its launchers, which takes the host's compiler."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        kernels = importlib.import_module(f"convoy.ops.{module}")
        kernels.try_out(device)
    except Exception as error:
        if lack_of_memory(error) is not None:  # later it may go well, and the run's rounding hangs on it
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"{what} runs without Triton's kernels and so more slowly, as they cannot be built here: {reason}",
            stacklevel=2,
        )
        return None
    return kernels


def on_gpu(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch kernels on a GPU, which need not be the current one."""
    is_elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if is_elsewhere else contextlib.nullcontext()


_counters: dict[tuple[torch.device, int, bool], Tensor] = {}
_MANY = 1 << 18


def counters(x: Tensor, number: int) -> Tensor:
    """Zeros, int32 [at least `number`], for kernels that count in them and leave them as they were. Kernels on one
    stream run one after the other, and share them; what is recorded into a graph has its own, as the graph may run
    beside the stream on which it was recorded."""
    is_capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    zeros = _counters.get((x.device, stream, is_capturing))
    if number > _MANY or (zeros is None and is_capturing):  # in a graph they are made each time anew
        return torch.zeros(number, dtype=torch.int32, device=x.device)
    if zeros is None:
        for is_for_graphs in (False, True):
            zeros = torch.zeros(_MANY, dtype=torch.int32, device=x.device)
            _counters[x.device, stream, is_for_graphs] = zeros
        zeros = _counters[x.device, stream, False]
    return zeros


class Launch:
    """A Triton kernel made ready for tensors that differ in nothing but their addresses: Triton inspects every argument
    of every launch, which takes the host longer than the launch. The kernel takes tensors, then `numbers`, and runs
    `grid` programs."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], device: torch.device) -> None:
        self._kernel, self._grid, self._numbers, self._device = kernel, grid, numbers, device
        self._run: Callable[..., object] | None = None
        self._stream: Callable[[int], int] | None = None
        self._handles: tuple[Any, ...] = ()

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        # a kernel is built for places divisible by 16 or for others
        is_aligned = not functools.reduce(operator.or_, [address for address in addresses if address], 0) % 16
        with on_gpu(self._device):
            if is_aligned and self._run is not None and self._stream is not None:
                self._run(self._stream(self._device.index), *self._handles, *addresses, *self._numbers)
                return
            compiled = self._kernel[self._grid](*tensors, *self._numbers)
        if is_aligned and self._device.type == "cuda":
            self._prepare(compiled)

    def _prepare(self, compiled: Any) -> None:
        """Keep the handles of a kernel that has run, as Triton's own launch takes them; another version of Triton may
        lack them."""
        with contextlib.suppress(ImportError, AttributeError):
            from triton.runtime import driver

            nobody_watches = None, None, None
            self._handles = compiled.function, compiled.packed_metadata, *nobody_watches
            self._stream = driver.active.get_current_stream
            grid = *self._grid, *(1,) * (3 - len(self._grid))
            self._run = functools.partial(compiled.run, *grid)
