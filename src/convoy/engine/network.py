"""A network that runs under a plan: this rank's parameters, and one program for every batch and image size."""

import contextlib
import copy
import dataclasses
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from convoy.comm.groups import Groups
from convoy.engine.agreement import PASS, Form, Kind, Signature, Unchanged, arguments, exchange_samples, kinds, shared
from convoy.engine.gradients.divided import plain
from convoy.engine.gradients.reducer import GradientReducer, current_backward, scale_gradient, undo_scale, writable
from convoy.engine.program import Program, Watch
from convoy.engine.shards import collect, cut, named_tensors, owners
from convoy.errors import ConvoyError
from convoy.graph.graph import CaptureError, Graph, Ref
from convoy.graph.tree import leaves, replace
from convoy.ops import OPERATIONS, capture, place
from convoy.ops.context import StepContext
from convoy.ops.recompute import Recompute, check_recompute, recomputing
from convoy.plans.layout import WHOLE, Layout, balanced, consecutive
from convoy.plans.mesh import Axes
from convoy.plans.place import Batch, Placement, sample_axes
from convoy.plans.plan import Plan
from convoy.plans.stages import StagedGraph

Loss = Literal["mean", "part"]
MAX_PROGRAMS = 32
WRAPPED = "DistributedDataParallel around a network of convoy.parallelize would add gradients twice: take it away"


class Guard(Protocol):
    """Sees the passes of a network, and how they use its parameters."""

    follows: bool  # whether the uses of parameters are to be given to `use` now

    def look(self, inputs: Sequence[Tensor]) -> None:
        """Before a pass with these inputs."""

    def use(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor to compute with in place of a parameter."""

    def inner_backward(self) -> AbstractContextManager[None]:
        """Within it a backward pass runs others, of parts of its batch."""

    def unfollow(self) -> None:
        """The parameters change: forget their uses so far."""

    def mark_gradients(self) -> None:
        """A backward pass is done that autograd alone does not know the end of."""


@dataclass
class Network:
    """Runs the forward pass of `model` under `plan`."""

    model: nn.Module  # with this rank's shards for parameters and buffers
    plan: Plan
    groups: Groups
    context: StepContext
    loss: Loss = "mean"  # of a rank: the mean over its own samples, or its part of the global batch's loss
    channels_last: bool = False  # whether images travel between ranks with the channels innermost in memory
    compile: bool = False  # whether what lies between the exchanges of a training pass runs through `torch.compile`
    recompute: Recompute = False  # layers whose activations are computed again, beside those that the model asks for
    captured: str = "as one program"  # how the network's calls were found, for people
    # serial shape and dtype of every parameter and buffer, by serial name
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    # how each of them lies over the mesh; a parameter's gradient is added over the axes in `copied`
    layouts: dict[str, Layout] = field(default_factory=dict)
    sample_axes: tuple[int, ...] = ()  # along which ranks are given different samples
    samples: tuple[int, ...] | None = None  # of every sample rank's next pass, where the caller knows; else it is asked
    reducer: GradientReducer | None = None  # adds the gradients during the backward pass
    example: tuple[Kind, ...] = ()  # sizes and types of one rank's inputs that it was made with
    form: Form | None = None  # the other arguments that it was made with; None where there were none
    layers: tuple[tuple[str, str], ...] = ()  # name and kind of every layer that the network calls
    # layers whose parameters another one computes with: its name by theirs
    borrowed: dict[str, str] = field(default_factory=dict)
    # whether there is one device and nothing is drawn, so that the model's own forward pass does the same;
    # torch.compile then sees the plain network
    undivided: bool = False
    normalizes: bool = False  # whether it has batch norm in training, for which Convoy has kernels of its own on a GPU
    watch: Callable[[Placement], Watch] | None = None  # makes what watches a pass of a placement
    guard: Guard | None = None  # notices what ranks should have alike and have not
    recomputes: bool = False  # whether some activations are computed again
    counts_passes: bool = False  # whether a pass depends on those before it, beside the weights and buffers

    def __post_init__(self) -> None:
        self.shapes = {name: (tuple(t.shape), t.dtype) for name, t in named_tensors(self.model).items()}
        self._own_forward = vars(self.model).get("forward")  # of the module alone, in place of its class's
        self._forwards = 0  # how often it was replaced
        self._owners: dict[str, tuple[dict[str, Any], str]] = {}
        self._unchanged = Unchanged(self.model, alone=self.plan.mesh.num_devices == 1)
        self._programs: dict[Signature, tuple[Placement, Program]] = {}
        self._state_alone: tuple[str, ...] = ()
        self._alone: dict[tuple[str, ...], tuple[bool, bool]] = {}  # `undivided` and `normalizes` in states before
        self.passes = 0  # in training so far, of a loop that does not announce them
        self._uncompiled: Callable[..., Any] | None = None
        self._graphs: list[Graph] = []

    def look(self, examples: Sequence[Tensor], form: Form | None) -> None:
        """Find the layers that the network calls; where some parameters have no part in that, in the other mode too.
        `examples` are one rank's inputs. CaptureError where the network does something that a graph cannot say."""
        self.example, self.form = tuple((tuple(x.shape), x.dtype) for x in examples), form
        training, total = self.model.training, len(examples[0]) * self.plan.mesh.num_devices
        self._graphs = [self._capture(Signature(training, (total,), kinds(examples), form))]
        names = {value.name for value in self._graphs[0].parameters()}
        if any(name not in names for name, _ in self.model.named_parameters()):
            with contextlib.suppress(CaptureError):
                self._graphs.append(self._capture(Signature(not training, (total,), kinds(examples), form)))
        self.layers = tuple(dict.fromkeys((call.layer, call.op) for graph in self._graphs for call in graph.calls))
        self.borrowed = {owner: layer for graph in self._graphs for owner, layer in graph.borrowed()}
        check_recompute(self.recompute, (layer for layer, _ in self.layers))
        self.recomputes = any(call.recomputed for graph in self._graphs for call in graph.calls)
        if self.plan.mesh.num_devices == 1:
            self._look_alone(self._graphs[0] if training else None)

    def _look_alone(self, graph: Graph | None = None) -> None:
        """On one device: see whether the model's own forward pass does the same as a program in training."""
        state = self._state_alone = self._unchanged.state()
        if state in self._alone:
            self.undivided, self.normalizes = self._alone[state]
            return
        with contextlib.suppress(CaptureError):  # training is not always possible where evaluation is
            graph = graph or self._capture(self._signature_of_example(True, (self.example[0][0][0],)))
            draws = any(OPERATIONS[call.op].is_random for call in graph.calls)
            self.undivided = not draws and not self.recompute
            self.normalizes = any(c.op == "batch_norm" and c.attributes["training"] for c in graph.calls)
            if len(self._alone) >= MAX_PROGRAMS:
                self._alone.clear()
            self._alone[state] = self.undivided, self.normalizes

    def place_parameters(self) -> None:
        """Decide where every parameter and buffer is kept: where the calls that were found want it."""
        self.sample_axes = sample_axes(self.layers, self.plan)
        first, *more_graphs = self._graphs
        total = first.shape(first.inputs[0])[0]
        placement = self._place(first, balanced(total, self.num_sample_ranks))
        self.layouts = {name: placement.layouts[name] for name in self.shapes if name in placement.layouts}
        for graph in more_graphs:
            with contextlib.suppress(ConvoyError):  # it is said when the network first runs in that mode
                layouts = self._place(graph, balanced(total, self.num_sample_ranks)).layouts
                self.layouts |= {name: layouts[name] for name in self.shapes if name in layouts}
        self.layouts = {name: self.layouts.get(name, WHOLE) for name in self.shapes}
        self._graphs = []
        self.look_at_rows([first.shape(ref.name) for ref in leaves(first.output, Ref)], total)

    def look_at_rows(self, outputs: Sequence[Sequence[int]], total: int) -> None:
        """Warn of outputs, by their shapes, of which a row may be that of several samples."""
        rows = [shape[0] for shape in outputs if len(shape) > 1]
        grouped = total not in rows and any(1 < number < total and total % number == 0 for number in rows)
        if grouped and self.num_sample_ranks > 1 and self.groups.rank == 0:
            warnings.warn(
                f"the network gives {rows[0]} rows for {total} samples, of which each rank gets all: if they are of "
                "clips, give frames as [clips, frames, ...], so that a clip is a sample",
                stacklevel=2,
            )

    @property
    def shows_uses(self) -> bool:
        """Whether all uses of parameters go through `use`: compiled programs would be compiled anew for it."""
        return not self.compile

    @property
    def silent(self) -> bool:
        """Whether passes exchange nothing between ranks, as far as they were seen; gradients do not count."""
        return bool(self._programs) and not any(
            any(any(call.transfers.values()) for call in placement.calls) or any(placement.outputs.values())
            for placement, _ in self._programs.values()
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's output for this rank's own samples."""
        alone = self.plan.mesh.num_devices == 1 and not torch.compiler.is_compiling()
        if alone and self._unchanged.state() != self._state_alone:
            self._look_alone()
        plain = self.undivided and self.context.batch_norm != "microbatch" and not self.compile
        if plain and (torch.compiler.is_compiling() or not self._has_kernels()):
            return self._plain(*args, **kwargs)
        if self._uncompiled is None and "torch._dynamo" in sys.modules:  # importing it takes seconds
            self._uncompiled = torch.compiler.disable(self._forward)
        run = self._uncompiled or self._forward
        if not plain:
            return run(*args, **kwargs)
        try:
            return run(*args, **kwargs)
        except ConvoyError:  # the plain network can what no program can, such as branch on a number
            self.normalizes = False
            return self._plain(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What `model(...)` runs: its forward pass may be another one by now (`net.forward = ...`)."""
        forward = vars(self.model).get("forward")
        if not torch.compiler.is_compiling() and getattr(forward, "__self__", None) is not self:
            self._own_forward, self._forwards = forward, self._forwards + 1
            vars(self.model)["forward"] = self.forward
        return self.model._call_impl(*args, **kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self.samples is None and not torch.compiler.is_compiling() and self.trains:
            self.passes += 1  # as on several devices: random numbers follow it, should the network draw some later
        if self._own_forward is not None:
            return self._own_forward(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    @contextlib.contextmanager
    def plain_forward(self) -> Iterator[None]:
        """The model with the forward pass that it had."""
        forward = vars(self.model).pop("forward", None)
        vars(self.model).update({} if self._own_forward is None else {"forward": self._own_forward})
        try:
            yield
        finally:
            vars(self.model).pop("forward", None)
            vars(self.model).update({} if forward is None else {"forward": forward})

    def _has_kernels(self) -> bool:
        """Whether a pass of the undivided network is faster by Convoy's kernels, and nobody would miss its layers."""
        if not (self.normalizes and self.model.training and self.device.type == "cuda"):
            return False
        return len(self._programs) < MAX_PROGRAMS and not self._unchanged.has_hooks()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs, form = arguments(self.model, args, kwargs, self._own_forward)
        inputs, samples = self.open_pass(inputs, form)
        placement, program = self._program(self._signature(samples, inputs, form))
        self.begin_pass(samples, inputs[0].device)
        outputs = self._run(placement, program, inputs)
        self.end_pass()
        return replace(placement.graph.output, Ref, lambda ref: writable(self.weigh(outputs[ref.name], samples)))

    def open_pass(
        self, inputs: Sequence[Tensor], form: Form | None, call: str = PASS
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """The inputs to compute a pass with, and how many samples every sample rank has. All ranks call it. `call` is
        what all ranks are to be in; see `exchange_samples`."""
        cast = self._unchanged.check(inputs)

        def ask() -> tuple[int, ...]:
            state = zlib.crc32(shared(repr(self.python_state())).encode(), self._unchanged.types)
            return exchange_samples(inputs, form, state, self.model.training, self.groups, self.sample_axes, call)

        samples = self.samples  # as announced, or asked of the other ranks
        if samples is None:
            samples = ask() if self.context.tape is None else self.context.tape.samples(ask)
        if cast:
            self._recast()
        if self.samples is None and not self.context.replays:
            if self.model.training and current_backward() != -1 and not self.undivided:
                raise ConvoyError(
                    "activation checkpointing around a parallelized network would run it as another pass, with other "
                    "random numbers: checkpoint the parts of the network, before convoy.parallelize"
                )
            if self.guard is not None:
                self.guard.look(inputs)
        share = self._share(samples)
        return tuple(inputs if share == 1 else (undo_scale(x, share) for x in inputs)), samples

    def _share(self, samples: tuple[int, ...]) -> float:
        """By what the gradient of an output is multiplied: this rank's share, where its loss does not do so itself."""
        alone = self.loss == "part" or len(samples) == 1
        return 1.0 if alone else samples[self.sample_rank] / max(1, sum(samples))

    def _recast(self) -> None:
        """Take note that parameters have another type or device than before. All ranks call it."""
        if self.guard is not None:
            self.guard.unfollow()
        tensors = named_tensors(self.model)
        self.shapes = {name: (shape, tensors[name].dtype) for name, (shape, _) in self.shapes.items()}
        self._programs, self._owners = {}, {}
        if self.reducer is not None:
            self.reducer = self.reducer.anew()

    def train_others(self) -> None:
        """Take note that other parameters than before are trained: programs, and what is sent, depend on that."""
        self._programs = {}

    def begin_pass(self, samples: tuple[int, ...], device: torch.device) -> None:
        """Announce a training pass over one microbatch, where the caller does not announce passes."""
        if self.samples is None and self.trains:
            self.context.enter(self.passes, 0, (sum(samples),), device)
            self.passes += 1

    def end_pass(self) -> None:
        """Bring running statistics up to date, where the caller does not do so at the end of an update."""
        if self.samples is None and self.trains:
            self.context.statistics.fold(self.groups)

    def abandon(self) -> None:
        """Forget training passes that broke off before `end_pass`, or before the end of their backward pass."""
        self.context.statistics.abandon()
        if self.reducer is not None:
            self.reducer.abandon()

    def weigh(self, output: Tensor, samples: tuple[int, ...]) -> Tensor:
        """Scale an output's gradient by this rank's share of the samples, where its loss does not do so itself."""
        share = self._share(samples)
        return scale_gradient(output, share) if share != 1 and output.requires_grad else output

    def use(self, name: str, tensor: Tensor) -> Tensor:
        """What is computed with in place of a parameter or input: itself, or where the guard looks an alias of it."""
        return self.guard.use(name, tensor) if self.guard is not None and name in self.shapes else tensor

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of something that lies as a parameter or buffer does: itself, its gradient. All ranks call it.
        `name` is any under which the state of the plain network has it; a tied tensor has several."""
        shape, layout = self.entry(name)
        return collect(plain(tensor), layout, shape, self.groups)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of such a whole; it may share the whole's memory."""
        return cut(tensor, self.entry(name)[1], self.groups.mesh, self.groups.coordinates)

    def entry(self, name: str) -> tuple[tuple[int, ...], Layout]:
        """Serial shape and layout of a parameter or buffer, under any of its names."""
        if name not in self.shapes:
            tensor = self.model.state_dict(keep_vars=True)[name]
            if self.plan.mesh.num_devices == 1:  # where layers may have changed
                return tuple(tensor.shape), WHOLE
            name = next(
                serial_name for serial_name, candidate in named_tensors(self.model).items() if candidate is tensor
            )
        return self.shapes[name][0], self.layouts[name]

    def reduced(self) -> list[tuple[nn.Parameter, Axes]]:
        """This rank's parameters, each with the axes over which its gradient is added, in the order in which a forward
        pass reads them, as far as that is known: backwards their gradients come, and are sent. Those that it does not
        read come first here, and last there: all others would wait for them until the backward pass ends."""
        parameters = dict(self.model.named_parameters())
        with contextlib.suppress(CaptureError, ConvoyError):  # a network that cannot be captured
            calls = self.example_placement(True).calls if self.plan.mesh.num_devices > 1 else ()
            used = dict.fromkeys(name for placed in calls for name in placed.call.inputs if name in parameters)
            unread = [name for name in parameters if name not in used]
            parameters = {name: parameters[name] for name in (*unread, *used)}
        return [
            (parameter, tuple(sorted(self.layouts[name].copied)))
            for name, parameter in parameters.items()
            if self.owns(name)
        ]

    def owns(self, name: str) -> bool:
        """Whether this rank computes with a parameter, if only with a part of it."""
        return True

    @property
    def trains(self) -> bool:
        return self.model.training or bool(self._unchanged.modules_in_other_mode())

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def sample_rank(self) -> int:
        return self.groups.mesh.index(self.groups.coordinates, self.sample_axes)

    @property
    def num_sample_ranks(self) -> int:
        return self.groups.mesh.size(self.sample_axes)

    def example_placement(
        self, training: bool, samples: Sequence[int] | None = None, sides: tuple[int, int] | None = None
    ) -> Placement:
        """How the network is placed where every sample rank has as many samples as its example, or as is said, and its
        first input the example's height and width, or `sides`."""
        signature = self._signature_of_example(training, self.example_samples(samples))
        if sides is not None:
            (shape, dtype), *others = signature.inputs
            signature = dataclasses.replace(signature, inputs=(((*shape[:-2], *sides), dtype), *others))
        return self._placement(signature)

    def _signature_of_example(self, training: bool, samples: tuple[int, ...]) -> Signature:
        return Signature(training, samples, tuple((shape[1:], dtype) for shape, dtype in self.example), self.form)

    def example_samples(self, samples: Sequence[int] | None) -> tuple[int, ...]:
        """The samples of every sample rank, by default the example's; ConvoyError for another number of ranks."""
        if samples is None:
            return (self.example[0][0][0],) * self.num_sample_ranks
        if len(samples) != self.num_sample_ranks:
            raise ConvoyError(
                f"samples names {len(samples)} parts of the batch, but the plan divides it into "
                f"{self.num_sample_ranks}: give {self.num_sample_ranks} numbers"
            )
        return tuple(samples)

    def python_state(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Modules in another mode than the network, and how what `forward` reads has changed; as in a `Signature`."""
        replacements = (f"forward {self._forwards}",) if self._forwards else ()
        return self._unchanged.modules_in_other_mode(), (*replacements, *self._unchanged.state())

    def _run(
        self,
        placement: Placement,
        program: Program,
        inputs: Sequence[Tensor],
        arrivals: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        values = {**dict(zip(placement.graph.inputs, inputs, strict=True)), **(arrivals or {})}
        if not self._owners:
            self._owners = owners(self.model)
        owners_of = self._owners
        tensors = [values[n] if n in values else owners_of[n][0][owners_of[n][1]] for n in program.sources]
        if self.guard is not None and self.guard.follows:
            tensors = [self.use(n, x) for n, x in zip(program.sources, tensors, strict=True)]
        watch = self.watch(placement) if self.watch is not None else None
        return dict(zip(program.outputs, program(tensors, watch), strict=True))

    def _signature(self, samples: tuple[int, ...], inputs: Sequence[Tensor], form: Form | None) -> Signature:
        return Signature(self.model.training, samples, kinds(inputs), form, *self.python_state())

    def _program(self, signature: Signature) -> tuple[Placement, Program]:
        entry = self._programs.get(signature)
        if entry is None:
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            with torch.inference_mode(False):  # the program, and the tensors in it, serve training too
                placement = self._placement(signature)
                compile = self.compile and signature.training
            entry = self._programs[signature] = placement, self._made(placement, compile)
        return entry

    def staged(self, placement: Placement) -> StagedGraph | None:
        """The stages of a graph of this network; None where every rank runs all of it."""
        return None

    def _made(self, placement: Placement, compile: bool) -> Program:
        return Program(placement, self.groups, self.context, self.channels_last, compile)

    def _placement(self, signature: Signature) -> Placement:
        return self._place(self.capture_again(signature), consecutive(signature.samples))

    def capture_again(self, signature: Signature) -> Graph:
        """The graph of another kind of pass; ConvoyError where the network cannot take such samples."""
        try:
            return self._capture(signature)
        except CaptureError as error:
            if signature.state:
                changes = ", ".join(text.partition(" ")[0] for text in signature.state)
                raise ConvoyError(
                    f"the network, of which something was changed after convoy.parallelize ({changes}), cannot be run: "
                    f"{error}; change it before, or build the network anew"
                ) from error
            inputs, example = (
                ", ".join(f"{list(shape)} of {dtype}" for shape, dtype in kinds_of)
                for kinds_of in (signature.inputs, [(shape[1:], dtype) for shape, dtype in self.example])
            )
            mode = "in training" if signature.training else "in evaluation"
            raise ConvoyError(
                f"the network cannot be run {mode} with samples of {inputs}: {error}; the example "
                f"given to convoy.parallelize has samples of {example}"
            ) from error

    def _capture(self, signature: Signature) -> Graph:
        total = sum(signature.samples)
        inputs = [torch.empty(total, *shape, dtype=dtype, device="meta") for shape, dtype in signature.inputs]
        with self.plain_forward(), torch.inference_mode(False):
            forward = None if signature.form is None else signature.form.caller(self.model.forward)
            # where it is in this mode already, it is as its modules are, and a mode of its own stays
            training = None if signature.training == self.model.training else signature.training
            reads = self._unchanged.reads
            graph = capture(self.model, inputs, training, shapes=self.shapes, forward=forward, reads=reads)
        self._unchanged.noted()
        return recomputing(graph, self.recompute)

    def _place(self, graph: Graph, parts: tuple[range, ...]) -> Placement:
        batch = Batch(self.plan.mesh, self.sample_axes, parts)
        outputs = [ref.name for ref in leaves(graph.output, Ref)]
        return place(graph, self.plan, batch, outputs, self._kept)

    def _kept(self, name: str) -> Layout | None:
        """How a parameter or buffer lies among the ranks that compute with it; None where that is still open."""
        return self.layouts.get(name)

    def __reduce__(self) -> Any:
        raise ConvoyError("a parallelized network cannot be pickled: save it by convoy.save or convoy.state_dict")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Network":
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__
        memo[id(self)] = twin
        twin.model = copy.deepcopy(self.model, memo)
        twin._own_forward = copy.deepcopy(self._own_forward, memo)
        if "_compiled_call_impl" in vars(self.model):  # which torch does not copy
            vars(twin.model)["_compiled_call_impl"] = twin.call
        twin.reducer = twin.guard = None
        twin._owners = {}  # the model's own copy is not complete yet
        twin._unchanged = self._unchanged.of_copy(twin.model)
        twin._programs, twin._alone = {}, {}
        twin._uncompiled = None
        return twin


def network_of(net: nn.Module) -> Network:
    """What runs a parallelized network."""
    network = getattr(net, "_convoy", None)
    if isinstance(net, DistributedDataParallel) and hasattr(net.module, "_convoy"):
        raise ConvoyError(WRAPPED)
    if not isinstance(network, Network):
        raise ConvoyError("this network is not parallelized: pass what convoy.parallelize returned")
    return network
