"""Counts what PyTorch dispatches on a GPU, on a machine without one too.

`FakeGpu` is a GPU that computes nothing: tensors on it have shapes, types and strides, and no numbers (torch's
`FakeTensorMode`). Tensors on the CPU are real, so that what the host decides is as ever. `fake_ranks` lets this process
be rank 0 of many that nobody else runs: its collectives are dispatched, and on the CPU give its own numbers. Together
they show every operation, copy and wait of a large job's rank 0, and no times.

Optimizers need `foreach=True` to do there what they do on a GPU by themselves, and `torch.autocast` does nothing.
`Counter` counts on a real device.
"""

import ctypes
import sys
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from convoy.comm import collectives
from convoy.engine.recorded import READS

_BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense"}
_NO_KERNEL |= {"lift_fresh", "detach", "_unsafe_view", "set_", "resize_"}
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Event:
    """What the host waits for, or copies to the GPU."""

    what: str  # the operation
    line: str  # of Python that asked for it: file, number and function


@dataclass
class Counts:
    """What was dispatched, by name of operation."""

    operations: Tally[str] = field(default_factory=Tally)  # those that launch kernels on the GPU; not the collectives
    # those on the GPU that launch none: views, and memory without contents
    views: Tally[str] = field(default_factory=Tally)
    host: Tally[str] = field(default_factory=Tally)  # those on tensors of the CPU alone
    collectives: Tally[str] = field(default_factory=Tally)  # messages between ranks, of tensors on the GPU
    synchronizations: list[Event] = field(default_factory=list)  # where the host waits for the GPU
    # where the host copies to the GPU; what it does not wait for is no synchronization as well
    uploads: list[Event] = field(default_factory=list)

    def totals(self) -> dict[str, int]:
        """How many of each."""
        found = {name: getattr(self, name).total() for name in ("operations", "views", "host", "collectives")}
        return {**found, "waits": len(self.synchronizations), "uploads": len(self.uploads)}


class Counter(TorchDispatchMode):
    """While it is entered, `count` counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self._counting: list[Counts] = []
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            waits = self._waiting(f"{owner.__name__}.synchronize", owner.synchronize)
            self._stack.enter_context(mock.patch.object(owner, "synchronize", waits))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    @contextmanager
    def count(self) -> Iterator[Counts]:
        """Count what is dispatched within."""
        seen = Counts()
        self._counting.append(seen)
        try:
            yield seen
        finally:
            self._counting = [other for other in self._counting if other is not seen]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._counting:
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _waiting(self, name: str, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*args: Any, **kwargs: Any) -> Any:
            self._event("synchronizations", name)
            return wait(*args, **kwargs)

        return waits

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        name = _name(func)
        if func.namespace == "profiler":
            return
        if not _on_gpu(args, kwargs):
            self._tally("host", name)
        elif func.namespace in ("c10d", "_c10d_functional", "fake_ranks"):
            self._tally("collectives", name)
        else:
            self._tally("views" if func.is_view or name in _NO_KERNEL else "operations", name)
            self._note_events(name, args, kwargs)

    def _note_events(self, name: str, args: Any, kwargs: Any) -> None:
        if name in READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self._event("synchronizations", name)
        if name in _BY_INDEX:
            for index in (index for index in args[1] if index is not None):
                if index.dtype in (torch.bool, torch.uint8):
                    self._event("synchronizations", f"{name} by a mask")
                elif index.is_cpu:
                    self._copied(f"{name} by a list")
        if name == "_to_copy":
            source, target = args[0].device, kwargs.get("device") or args[0].device
            blocks = not kwargs.get("non_blocking")
        elif name in ("copy_", "_copy_from"):
            source, target = args[1].device, args[0].device
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            return
        if source.type == "cpu" and target.type != "cpu":
            self._copied(name, blocks)
        elif source.type != target.type and blocks:
            self._event("synchronizations", name)

    def _copied(self, what: str, blocks: bool = True) -> None:
        """A copy to the GPU waits for all that was queued before it, unless asked not to."""
        self._event("uploads", what)
        if blocks:
            self._event("synchronizations", what)

    def _tally(self, kind: str, name: str) -> None:
        for seen in self._counting:
            getattr(seen, kind)[name] += 1

    def _event(self, kind: str, what: str) -> None:
        event = Event(what, _line())
        for seen in self._counting:
            getattr(seen, kind).append(event)


class _Stream:
    """One of a GPU that computes nothing."""

    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


class _Moment:
    """`torch.cuda.Event` of a GPU that computes nothing: it has always passed."""

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


Taken = TypeVar("Taken", nn.Module, Tensor)


class FakeGpu(Counter):
    """A GPU, `cuda:0`, that computes nothing; whatever is read from it is zero."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> "FakeGpu":
        answers = {
            **dict.fromkeys(("synchronize", "set_device", "empty_cache", "set_rng_state"), None),
            "current_device": 0,
            "current_stream": _Stream(),
            "stream": nullcontext(),
            "get_device_properties": SimpleNamespace(total_memory=80 * 2**30),
            "get_device_capability": (9, 0),
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        }
        here: dict[str, Any] = {name: lambda *_, value=value: value for name, value in answers.items()}
        of_fakes: dict[str, Any] = {"data_ptr": _place, "record_stream": lambda *_: None}
        of_fakes |= {"tolist": lambda x: x.cpu().tolist(), "is_cuda": property(lambda x: x.device.type == "cuda")}
        self._stack.enter_context(mock.patch.multiple(torch.cuda, Stream=_Stream, Event=_Moment, **here))
        self._stack.enter_context(mock.patch.multiple(FakeTensor, create=True, **of_fakes))
        self._stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda x: x))
        self._stack.enter_context(_guards())
        self._stack.enter_context(self._fake)
        super().__enter__()
        return self

    def take(self, given: Taken) -> Taken:
        """Something of the CPU as it is here: a tensor, or a network, whose tensors are replaced in place."""
        if isinstance(given, Tensor):
            like = torch.empty_like(given.detach(), device=self.device)
            return nn.Parameter(like, given.requires_grad) if isinstance(given, nn.Parameter) else like
        made: dict[Tensor, Any] = {}
        for module in given.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        made[tensor] = made[tensor] if tensor in made else self.take(tensor)
                        held[name] = made[tensor]
        return given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not self._fake:
            return func(*args, **(kwargs or {}))  # Convoy captures a network
        if func is torch.ops.prim.device.default:
            return _ALIAS
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and kwargs["device"].type == _ALIAS.type:
            kwargs["device"] = self.device
        if _stays(func, args, kwargs):
            return torch.empty_like(args[0])
        if self._counting:
            self._note(func, args, kwargs)
        if not _on_gpu(args, kwargs):
            with no_dispatch():
                return func(*args, **kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = _name(func)
        if name == "_local_scalar_dense":
            with no_dispatch():
                return torch.zeros((), dtype=args[0].dtype).item()
        if name == "equal":
            return True
        if name == "copy_" and args[0].is_cpu:
            with no_dispatch():
                return args[0].zero_()
        found = _SHAPES[name](*args, **kwargs) if name in _SHAPES else func(*args, **kwargs)
        with no_dispatch():
            return tree_map_only(FakeTensor, _real_on_cpu, found)


def _numbers(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """So many numbers a channel, in the type in which batch norm adds up."""
    dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    return tuple(torch.empty(x.shape[1], dtype=dtype, device=x.device) for _ in range(count))


def _reduced(gradient: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    wanted = (rest[3], rest[3], rest[4], rest[5])
    return tuple(one if asked else None for one, asked in zip(_numbers(x, 4), wanted, strict=True))


_STATISTICS = ("stats", "update_stats", "gather_stats", "gather_stats_with_counts")
_SHAPES: dict[str, Callable[..., Any]] = {
    **{f"batch_norm_{name}": lambda x, *_, **__: _numbers(x, 2) for name in _STATISTICS},
    "batch_norm_elemt": lambda x, *_, **__: torch.empty_like(x),
    "batch_norm_backward_reduce": _reduced,
    "batch_norm_backward_elemt": lambda gradient, x, *_, **__: torch.empty_like(x),
}
"""Results of operations of which torch itself knows no shapes without computing."""


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    """Be rank 0 of so many, of which the others are not there."""
    if number == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        with mock.patch.object(collectives, "_gather_single", _gather):
            yield
    finally:
        dist.destroy_process_group()


torch.library.define("fake_ranks::all_gather", "(Tensor(a!) output, Tensor input) -> ()")


def _copy_to_all(output: Tensor, input: Tensor) -> None:
    output.view(-1, input.numel()).copy_(input.view(1, -1))


torch.library.impl("fake_ranks::all_gather", "default", _copy_to_all)
torch.library.register_fake("fake_ranks::all_gather", lambda output, input: None)


def _gather(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> None:
    """In one kernel, as NCCL's: the fake group itself copies once for each rank."""
    torch.ops.fake_ranks.all_gather(output, input)


_ALIAS = torch.device("lazy", 0)
"""What torch's C++ is told to be the device of a fake tensor. Autograd would ask a build without CUDA for the streams
of an accelerator; what is on this device it runs on the thread that calls it. Python is told `cuda:0`."""


@contextmanager
def _guards() -> Iterator[None]:
    """Let torch make these devices the current ones, as indexing a tensor does, which here does nothing."""
    library = ctypes.CDLL(str(Path(_TORCH) / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta, lazy = 1, 14, 17  # of c10::DeviceType
    before = guards[cuda], guards[lazy]
    guards[cuda] = guards[lazy] = guards[meta]
    try:
        yield
    finally:
        guards[cuda], guards[lazy] = before


def _place(tensor: Tensor) -> int:
    """A number in place of the address, which fake memory has none of."""
    return int(tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize)


def _name(func: Any) -> str:
    found: str = func._schema.name.rpartition("::")[2]
    return found


def _on_gpu(args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    return any(isinstance(value, Tensor) and value.device.type == "cuda" for value in tree_leaves((args, kwargs)))


def _stays(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a copy is to the device and type that the tensor has: torch was told of another device."""
    return (
        func is torch.ops.aten._to_copy.default
        and kwargs.get("device") == args[0].device
        and kwargs.get("dtype") in (None, args[0].dtype)
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    )


def _real_on_cpu(tensor: FakeTensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.device.type == "cpu" else tensor


def _line() -> str:
    """Who asked, outside of PyTorch and of this file."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__, "<")):
        frame = frame.f_back
    if frame is None:
        return "a thread of PyTorch"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
