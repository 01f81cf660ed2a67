"""Convoy's own kernels on a GPU: where they can run, and on which of several GPUs."""

import contextlib
import functools
import importlib
import importlib.util
import operator
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

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
    return _on(x.device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    away = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if away else contextlib.nullcontext()


def is_watched(x: Tensor) -> bool:
    """Whether somebody sees what is dispatched, or the tensor stands for another one. Where nobody does, the function
    of an operation is called by itself, which saves the host half of the time that a small one takes."""
    return type(x) is not Tensor or bool(torch._C._len_torch_dispatch_stack())


_counters: dict[tuple[torch.device, int, bool], Tensor] = {}
_outgrown: list[Tensor | None] = []
"""Graphs may count there."""
_FEWEST = 1 << 16


def counters(x: Tensor, number: int) -> Tensor:
    """Zeros, int32 [at least `number`], for kernels that count in them and leave them as they were.

    Kernels on one stream run one after the other, and share them. What is recorded into a graph has others: the graph
    may run beside the stream on which it was recorded.
    """
    recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    found = _counters.get((x.device, stream, recorded))
    if found is not None and len(found) >= number:
        return found
    if recorded:  # so are the zeros, each time anew
        return torch.zeros(number, dtype=torch.int32, device=x.device)
    for kind in (False, True):
        _outgrown.append(_counters.get((x.device, stream, kind)))
        _counters[x.device, stream, kind] = torch.zeros(max(number, _FEWEST), dtype=torch.int32, device=x.device)
    return _counters[x.device, stream, False]


class Launch:
    """A kernel of Triton made ready for tensors that differ in nothing but their places.

    Triton looks at every argument of every launch for which kernel it needs, and takes the host longer than the launch.

    Args:
        kernel: of tensors, and then of numbers.
        grid: how many programs.
        numbers: these.
        device: of the tensors.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], device: torch.device) -> None:
        self._kernel, self._grid, self._numbers, self._device = kernel, grid, numbers, device
        self._run: Callable[..., object] | None = None
        self._stream: Callable[[int], int] | None = None
        self._handles: tuple[Any, ...] = ()

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Run it."""
        places = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        # a kernel is built for places divisible by 16 or for others
        aligned = not functools.reduce(operator.or_, [place for place in places if place], 0) % 16
        with _on(self._device):
            if aligned and self._run is not None and self._stream is not None:
                self._run(self._stream(self._device.index), *self._handles, *places, *self._numbers)
                return
            compiled = self._kernel[self._grid](*tensors, *self._numbers)
        if aligned and self._device.type == "cuda":
            self._prepare(compiled)

    def _prepare(self, compiled: Any) -> None:
        """Take from a kernel that has run what Triton's own launch takes from it; of another Triton perhaps nothing."""
        with contextlib.suppress(ImportError, AttributeError):
            from triton.runtime import driver

            nobody_watches = None, None, None
            self._handles = compiled.function, compiled.packed_metadata, *nobody_watches
            self._stream = driver.active.get_current_stream
            grid = *self._grid, *(1,) * (3 - len(self._grid))
            self._run = functools.partial(compiled.run, *grid)
