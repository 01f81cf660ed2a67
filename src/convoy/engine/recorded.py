"""Work of a GPU that is recorded once, as a CUDA graph, and replayed: the host then issues an update in one call.

A recording is a list of kernels and of the addresses that they read and write. What changes from update to update has
to lie in memory that is written before a replay: the inputs, and the keys of random numbers (`KeyTape`). The optimizer
is not recorded, so that learning rates, momentum, clipping and the loss scale stay numbers of Python (torch's fused one
is some 1 ms of the host), nor are stages, which send to each other. A recording proves itself before it is used:

1. Two updates run as ever: programs are made, kernels are chosen, ranks agree on the order of their messages.
2. Two more run on the static inputs while their operations are noted (`Trace`). What a replay would freeze shows as a
   difference between the two, and what a recording cannot hold (a number read back, a copy from the host) by itself.
3. The next one runs twice, is recorded with the announcement of the update before, and replayed. Outputs, gradients and
   buffers must have the bits of the first run, or be as near to it as the second.

All of it happens on one stream, which is not the default one: a gradient's accumulator keeps the stream on which it was
made, and cannot be recorded on another (pytorch#137483).
"""

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from convoy.comm.position import current, lack_of_memory
from convoy.engine.gradients.divided import plain
from convoy.graph.fake import storage
from convoy.ops.context import KeyTape, StepContext

WARM_UP, TRACED = 2, 2
# Operations whose result, or its size, the host waits for.
READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"}
READS |= {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
SMALL = 256  # numbers of a tensor of the host that are compared one by one
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


class CudaGraph:
    """A CUDA graph of work on the current stream, which replays it."""

    def __init__(self) -> None:
        self._graph: Any = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Record what `work` issues; its results, which have no contents before the first replay."""
        device = torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        state = generator.clone_state()
        try:
            # other threads, of a loader, go on allocating pinned memory and asking for events meanwhile
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                return work()
        except BaseException:
            # torch leaves its generator in the middle of the recording: "Offset increment outside graph capture"
            generator.graphsafe_set_state(state)
            raise

    def replay(self) -> None:
        self._graph.replay()


def graph_on(device: torch.device) -> Callable[[], CudaGraph] | None:
    """What makes recordings on a device; None where nothing is to be gained."""
    return CudaGraph if device.type == "cuda" else None


def leave_default_stream(device: torch.device) -> None:
    """Have this thread give its work to another stream of a GPU than the default one, where nothing is recorded."""
    if device.type != "cuda":
        return
    default = torch.cuda.default_stream(device)
    if torch.cuda.current_stream(device) == default:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(default)
        torch.cuda.set_stream(stream)


class Recorded:
    """A function of tensors that leaves gradients behind: run, then recorded, then replayed.

    `function` takes the number of the update and tensors, and gives tensors; it finds no gradients in the parameters of
    `model`, and leaves them there. Its random numbers follow `context`, and `graph` makes a recording. All ranks call
    `agree`, which takes a reason not to record and gives the first that any rank has, and `fit`, which says whether the
    call is on all ranks like those recorded. `abandon` has others forget a call that broke off, and `tell` takes the
    outcome in one sentence. `refusal` is why it is not recorded, if it never will be.
    """

    def __init__(
        self,
        function: Callable[[int, Sequence[Tensor]], list[Tensor]],
        model: nn.Module,
        context: StepContext,
        graph: Callable[[], CudaGraph],
        *,
        agree: Callable[[str | None], str | None] = lambda reason: reason,
        fit: Callable[[bool], bool] = lambda fits: fits,
        abandon: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._function, self._model, self._context = function, model, context
        self._make_graph, self._agree, self._fit, self._abandon, self.tell = graph, agree, fit, abandon, tell
        self.refusal: str | None = None
        self._warmed_up = 0
        self._form: list[Any] | None = None
        self._inputs: list[Tensor] = []
        self._traces: list[Trace] = []
        self._tape = KeyTape()
        self._graph: CudaGraph | None = None
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._kept: list[Tensor] = []
        self._state: list[Any] = []

    @property
    def is_recorded(self) -> bool:
        return self._graph is not None

    def __call__(self, step: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What `function(step, inputs)` gives and does, on whatever way."""
        if self.refusal is not None:
            return self._function(step, inputs)
        form = [self._model.training, torch.is_grad_enabled(), *_precision(), *map(_form, inputs)]
        if self._form is None:
            self._form = form
        as_recorded = self._graph is None or _state(self._model) == self._state
        # a rank whose part of a smaller batch is as ever would replay while the others ask it for its samples
        if not self._fit(form == self._form and as_recorded):
            return self._function(step, inputs)
        if self._warmed_up < WARM_UP:
            self._tape = KeyTape()
            with self._context.taped(self._tape, step):
                outputs = self._function(step, inputs)
            self._warmed_up += 1  # calls that break off do not count
            return outputs
        self._tape.is_complete = True
        if not self._inputs:
            self._inputs = [torch.empty_like(x.detach()) for x in inputs]
        for target, x in zip(self._inputs, inputs, strict=True):
            target.copy_(x, non_blocking=True)
        if self._graph is not None:
            return self._replay(step)
        if len(self._traces) < TRACED:  # where a mode of dispatch is on, what is compiled runs as it was written
            return self._traced(step)
        return self._recorded(step)

    def forget(self) -> None:
        """Let go of the recording and its memory, and record no more."""
        self._graph, self._outputs, self._gradients, self._inputs, self._traces = None, [], [], [], []
        self._kept, self._state = [], []

    def record_anew(self) -> None:
        """Let go of the recording, and make another of the calls to come, whose inputs have another form. All ranks
        call it."""
        self.forget()
        self._form, self._warmed_up, self._tape = None, 0, KeyTape()

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self.forget()
        gc.collect()  # a recording that failed holds its memory in cycles of its traceback
        self.tell(f"updates are not recorded as CUDA graphs: {reason}")

    def _run(self, step: int) -> list[Tensor]:
        # where autocast is on around the call, what it has cast outside of a recording would be frozen there
        torch.clear_autocast_cache()
        with self._context.taped(self._tape, step):
            outputs = self._function(step, self._inputs)
        torch.clear_autocast_cache()
        return outputs

    def _traced(self, step: int) -> list[Tensor]:
        self._tape.write(self._context.seed, step)
        trace = Trace(self._inputs[0].device, self._model)
        parameters = list(self._model.parameters())
        earlier = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        with _watching_optimizers(trace), trace:
            outputs = self._run(step)
        self._leave(parameters, [p.grad for p in parameters], earlier)
        self._traces.append(trace)
        if len(self._traces) == TRACED:
            reason = self._agree(trace.refusal or self._traces[0].difference(trace))
            if reason is not None:
                self._refuse(reason)
        return [x.clone() for x in outputs]  # the next call writes to the inputs, of which they may be parts

    def _recorded(self, step: int) -> list[Tensor]:
        # constants among them: caches would give their memory away, which the recording reads
        self._kept, self._traces = self._traces[-1].outside(), []
        parameters, buffers = list(self._model.parameters()), list(self._model.buffers())
        earlier = [p.grad for p in parameters]
        values = [buffer.clone() for buffer in buffers]

        def begin(gradients: Sequence[Tensor | None]) -> None:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

        def results(outputs: list[Tensor]) -> list[Tensor | None]:
            return [x if x is None else x.detach().clone() for x in (*outputs, *(p.grad for p in parameters), *buffers)]

        def run() -> list[Tensor]:
            begin([None] * len(parameters))
            return self._run(step)

        refusal, error_of_replay = None, 0.0
        self._tape.write(self._context.seed, step)
        first = results(run())
        try:
            noise = distance(results(run()), first)
            begin([None] * len(parameters))
            graph = self._make_graph()
            # with the announcement of another update: a number of Python's that follows it would be frozen, and show
            self._outputs = graph.record(lambda: self._run(step - 1))
            self._gradients = [p.grad for p in parameters]
        except Exception as error:
            refusal = _why(error)
        refusal = self._agree(refusal)  # a replay waits for those of the other ranks
        if refusal is not None:
            self._abandon()
        if refusal is None:
            begin(self._gradients)
            graph.replay()
            error_of_replay = distance(results(self._outputs), first)
            if not error_of_replay <= 4 * noise or error_of_replay == float("inf"):
                refusal = f"a replay was off by {error_of_replay:.1e}, where two runs are by {noise:.1e}"
            refusal = self._agree(refusal)
        count = len(first) - len(buffers) - len(parameters)
        if refusal is None:
            self._graph, self._state = graph, _state(self._model)
            bits = "has the same bits" if error_of_replay == 0 else f"differs by {error_of_replay:.0e}, as two runs do"
            self.tell(f"updates are replayed as a CUDA graph: the first {bits} (--cuda-graphs off: as before)")
            begin_from, outputs = self._gradients, [x.clone() for x in self._outputs]
        else:
            self._refuse(refusal)
            begin_from = first[count : count + len(parameters)]
            outputs = [x for x in first[:count] if x is not None]
        for buffer, value in zip(buffers, first[count + len(parameters) :], strict=True):
            assert value is not None
            buffer.copy_(value)
        self._leave(parameters, begin_from, earlier)
        return outputs

    def _replay(self, step: int) -> list[Tensor]:
        assert self._graph is not None
        parameters = list(self._model.parameters())
        # what accumulates may lie where the replay writes
        earlier = [None if p.grad is None else p.grad.clone() for p in parameters]
        self._tape.write(self._context.seed, step)
        self._graph.replay()
        self._leave(parameters, self._gradients, earlier)
        return [x.clone() for x in self._outputs]

    def _leave(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], earlier: Sequence[Tensor | None]
    ) -> None:
        for p, gradient, earlier_gradient in zip(parameters, gradients, earlier, strict=True):
            if gradient is not None and earlier_gradient is not None:
                gradient.add_(earlier_gradient)
            p.grad = gradient if gradient is not None else earlier_gradient


def distance(results: Sequence[Tensor | None], first: Sequence[Tensor | None]) -> float:
    """How far some tensors are from others: the largest difference in one, over its largest number or a thousandth of
    the largest of all; 0 where all bits are the same, infinite where one is missing or not a number as the other is."""
    pairs = [(plain(a), plain(b)) for a, b in zip(results, first, strict=True) if a is not None and b is not None]
    if len(pairs) < sum(a is not None or b is not None for a, b in zip(results, first, strict=True)):
        return float("inf")
    pairs = [(a, b) for a, b in pairs if not torch.equal(a, b) and a.numel()]
    if not pairs:
        return 0.0
    scales = [b.double().abs().nan_to_num(0.0, 0.0).max() for _, b in pairs]
    floor = (torch.stack(scales).max() * 1e-3).clamp(min=sys.float_info.min)
    errors = [_apart(a.double(), b.double()) / torch.maximum(s, floor) for (a, b), s in zip(pairs, scales, strict=True)]
    worst = float(torch.stack(errors).nan_to_num(float("inf"), float("inf")).max())
    return max(worst, sys.float_info.min)


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference; a loss scale that is too large gives both the same infinite numbers."""
    return (a - b).abs().masked_fill_((a == b) | (a.isnan() & b.isnan()), 0.0).max()


@dataclass(frozen=True)
class Noted:
    """An operation, and what of it a replay would freeze."""

    name: str
    numbers: str  # its arguments that are no tensors
    outside: tuple[tuple[Tensor, list[Any] | None], ...]  # tensors from before the update; numbers of small host ones
    where: str  # in which layer and line it was called, for people


class Trace(TorchDispatchMode):
    """Notes the operations of an update; `refusal` says what cannot be recorded, None for nothing."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        super().__init__()
        self.refusal: str | None = None
        self._device = device
        self._parameters = {id(p) for p in model.parameters()}
        self._noted: list[Noted] = []
        # weak, so that memory is given back, and no other storage gets the number of one that is gone
        self._made: dict[int, StorageWeakRef] = {}

    def refuse(self, what: str) -> None:
        if self.refusal is None:
            self.refusal = f"{what} {_where()}".rstrip()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # gradients that are marked as parts have answered already
            return self._note(func, args, kwargs or {})

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        arguments, _ = tree_flatten((args, kwargs))
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        name = func._schema.name.partition("::")[2]
        if func.namespace != "profiler":
            self._look(func, name, tensors, kwargs)
            numbers = repr([_plain(x) for x in arguments if not isinstance(x, Tensor)])
            outside = tuple((x, _contents(x)) for x in tensors if storage(x) not in self._made)
            self._noted.append(Noted(name, numbers, outside, _where()))
        storages = {storage(x) for x in tensors}
        results = func(*args, **kwargs)
        for x in tree_flatten(results)[0]:
            if isinstance(x, Tensor) and storage(x) not in storages:
                self._made[storage(x)] = StorageWeakRef(x.untyped_storage())
        return results

    def _look(self, func: Any, name: str, tensors: Sequence[Tensor], kwargs: dict[str, Any]) -> None:
        on_device = [x for x in tensors if x.device.type == self._device.type]
        if name in READS and on_device:
            self.refuse("the host reads a number or a size back from the device")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(f"{name} draws random numbers from torch's generator")
        target = (
            kwargs.get("device")
            if name == "_to_copy"
            else on_device[0].device
            if name == "copy_" and on_device
            else None
        )
        if target is not None and target.type != "cpu" and any(x.is_cpu and x.numel() for x in tensors):
            self.refuse("something is copied from the host to the device")
        if any(
            x.requires_grad and x.is_leaf and isinstance(x, nn.Parameter) and id(x) not in self._parameters
            for x in on_device
        ):
            self.refuse("a parameter is used that is none of the network's")

    def outside(self) -> list[Tensor]:
        return list({id(x): x for noted in self._noted for x, _ in noted.outside}.values())

    def difference(self, other: "Trace") -> str | None:
        """What changes from one update to the next, in words; None where nothing does."""
        if len(self._noted) != len(other._noted):
            count = f"{len(self._noted):,} and {len(other._noted):,} operations"
            return f"two updates after each other have {count}"
        for a, b in zip(self._noted, other._noted, strict=True):
            if (a.name, a.numbers) != (b.name, b.numbers):
                return f"{a.name} changes from update to update, by a number of Python's {b.where}".rstrip()
            if len(a.outside) != len(b.outside) or not all(map(_alike, a.outside, b.outside)):
                return f"{a.name} takes another tensor in each update {b.where}".rstrip()
        return None


def _plain(x: object) -> object:
    """An argument as it is compared: of objects that are no values their kind alone."""
    return x if x is None or isinstance(x, bool | int | float | complex | str | torch.dtype | torch.device) else type(x)


def _contents(x: Tensor) -> list[Any] | None:
    return x.detach().flatten().tolist() if x.is_cpu and x.numel() <= SMALL else None


def _alike(a: tuple[Tensor, list[Any] | None], b: tuple[Tensor, list[Any] | None]) -> bool:
    """Whether it is the same memory (which `a` keeps from being given away), or the same constant."""
    return a[0].shape == b[0].shape and (a[0].data_ptr() == b[0].data_ptr() or (a[1] is not None and a[1] == b[1]))


def _state(model: nn.Module) -> list[Any]:
    """What a replay would not follow: layers' modes, where tensors lie and which are trained, what else `forward`
    reads."""
    network = getattr(model, "_convoy", None)
    state: list[Any] = [vars(model).get("forward"), *([] if network is None else [network.python_state()[1]])]
    for layer in model.modules():
        state.append(layer.training)
        tensors = (x for x in (*layer._parameters.values(), *layer._buffers.values()) if x is not None)
        state += [(x.data_ptr(), x.requires_grad) for x in tensors]
    return state


def _precision() -> list[Any]:
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device


def _where() -> str:
    """In which layer, and in which line of a user's."""
    layer = (
        f"in layer {current.layer.partition('#')[0]}" if current.part in ("forward", "start") and current.layer else ""
    )
    frame: Any = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith((*_PACKAGES, "<")) or "/triton/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    line = f"({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" if frame is not None else ""
    return f"{layer} {line}".strip()


def _why(error: BaseException) -> str:
    """Of a recording that failed, what was said first."""
    while error.__context__ is not None:
        error = error.__context__
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(_PACKAGES[0])]
    at = f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""
    if lack_of_memory(error) is not None:
        return f"memory lacks for it{at}"
    return f"{(str(error).strip() or type(error).__name__).splitlines()[0].rstrip('.')}{at}"


@contextlib.contextmanager
def _watching_optimizers(trace: Trace) -> Iterator[None]:
    """A step of an optimizer is not to be recorded: its learning rate would be frozen."""
    handle = register_optimizer_step_pre_hook(
        lambda *_: trace.refuse("optimizer.step() is part of it, whose learning rate would be frozen: call it after it")
    )
    try:
        yield
    finally:
        handle.remove()
