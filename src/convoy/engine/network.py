"""A network that runs under a plan: this rank's parameters, and one program for every batch and image size."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from convoy.engine.collectives import gather_ints
from convoy.engine.context import StepContext
from convoy.engine.gradients import GradientReducer
from convoy.engine.groups import Groups
from convoy.engine.output import scale_gradient
from convoy.engine.program import Program
from convoy.graph.capture import capture
from convoy.graph.graph import Graph, Ref
from convoy.graph.tree import leaves, replace
from convoy.plans import Layout
from convoy.plans.layout import WHOLE, balanced, consecutive
from convoy.plans.place import Placement, Strategies, place, sample_axes
from convoy.plans.rules import Batch

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
MAX_PROGRAMS = 32


@dataclass(frozen=True)
class Signature:
    """What a program is made for: the mode, the samples of every sample rank, and the inputs' other sizes."""

    training: bool
    samples: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass
class Network:
    """Runs the forward pass of `model` under `plan`.

    Attributes:
        shapes: serial shape and dtype of every parameter and buffer, by serial name.
        layouts: how each of them lies over the mesh; a parameter's gradient is added over the axes in `copied`.
        sample_axes: axes along which ranks are given different samples.
        samples: how many samples each sample rank passes next, where the caller knows; None asks the other ranks.
    """

    model: nn.Module
    plan: Strategies
    groups: Groups
    context: StepContext
    shapes: Shapes = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    sample_axes: tuple[int, ...] = ()
    samples: tuple[int, ...] | None = None
    reducer: GradientReducer | None = None
    _programs: dict[Signature, tuple[Placement, Program]] = field(default_factory=dict, repr=False)
    _step: int = 0

    def __post_init__(self) -> None:
        self.shapes = {name: (tuple(t.shape), t.dtype) for name, t in named_tensors(self.model).items()}

    def place_parameters(self, signature: Signature) -> None:
        """Decide where every parameter and buffer is kept: where the calls of this signature want it."""
        graph = self._capture(signature)
        self.sample_axes = sample_axes(graph, self.plan)
        total = sum(signature.samples)
        placement = self._place(graph, balanced(total, self.num_sample_ranks))
        self.layouts = {name: placement.layouts.get(name, WHOLE) for name in self.shapes}

    def forward(self, *inputs: Tensor) -> Any:
        """The network's output for this rank's own samples."""
        samples = self._exchange_samples(inputs)
        rest = tuple((tuple(x.shape[1:]), x.dtype) for x in inputs)
        signature = Signature(self.model.training, samples, rest)
        if self.samples is None and self.model.training:
            self.context.enter(self._step, range(sum(samples)), (sum(samples),), inputs[0].device)
            self._step += 1
        placement, program = self._program(signature)
        named = named_tensors(self.model)
        tensors = dict(zip(placement.graph.inputs, inputs, strict=True))
        outputs = program([tensors[name] if name in tensors else named[name] for name in program.sources])
        weight = samples[self.sample_rank] / max(1, sum(samples))
        if len(samples) > 1 and torch.is_grad_enabled():
            outputs = [scale_gradient(y, weight) if y.requires_grad else y for y in outputs]
        found = dict(zip(program.outputs, outputs, strict=True))
        return replace(placement.graph.output, Ref, lambda ref: found[ref.name])

    @property
    def sample_rank(self) -> int:
        """This rank's place on the sample axes."""
        return self.groups.mesh.index(self.groups.coordinates, self.sample_axes)

    @property
    def num_sample_ranks(self) -> int:
        """How many parts a global batch is divided into."""
        return self.groups.mesh.size(self.sample_axes)

    def placement(self, signature: Signature) -> Placement:
        """How the network is placed for a batch."""
        return self._program(signature)[0]

    def _exchange_samples(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        if self.samples is not None:
            return self.samples
        return tuple(gather_ints(len(inputs[0]), self.groups.of(self.sample_axes)))

    def _program(self, signature: Signature) -> tuple[Placement, Program]:
        found = self._programs.get(signature)
        if found is None:
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            placement = self._place(self._capture(signature), consecutive(signature.samples))
            found = self._programs[signature] = placement, Program(placement, self.groups, self.context)
        return found

    def _capture(self, signature: Signature) -> Graph:
        total = sum(signature.samples)
        inputs = [torch.empty(total, *shape, dtype=dtype, device="meta") for shape, dtype in signature.inputs]
        return capture(self.model, tuple(inputs), training=signature.training, shapes=self.shapes)

    def _place(self, graph: Graph, parts: tuple[range, ...]) -> Placement:
        batch = Batch(self.plan.mesh, self.sample_axes, parts)
        return place(graph, self.plan, batch, [ref.name for ref in leaves(graph.output, Ref)], self.layouts.get)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Network":
        twin = Network.__new__(Network)
        memo[id(self)] = twin
        twin.__dict__ |= self.__dict__
        twin.model = copy.deepcopy(self.model, memo)
        twin._programs = {}
        twin.reducer = None
        return twin


def named_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
