"""A placed network on one rank: kernels and transfers in the order in which they run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from convoy.engine.context import StepContext
from convoy.engine.groups import Groups
from convoy.engine.in_place import Overwriting
from convoy.engine.kernels import Alone, Recorded, Site, build_kernel
from convoy.engine.position import here
from convoy.engine.shards import cut
from convoy.engine.stretches import Instruction, compiled
from convoy.engine.transfer import redistribute
from convoy.plans.layout import Layout
from convoy.plans.place import Placement
from convoy.plans.transfer import Step

LOW_PRECISION = {"conv", "linear"}
"""Calls that autocast computes in low precision: what they need is sent so."""

Place = tuple[str, Layout]
"""A value in one layout: what a slot of the program holds."""


BuildTransfer = Callable[[tuple[Step, ...], tuple[int, ...]], Callable[[Tensor], Tensor]]
"""From steps and the shape of the whole tensor to what does them on this rank."""


class Watch(Protocol):
    """Sees the instructions of a program as they run."""

    def before(self, name: str) -> None:
        """An instruction begins: that of the call of this name, or a transfer, whose name is empty."""

    def after(self, name: str, results: Sequence[Any]) -> None:
        """It has given its results."""


class Program:
    """Runs a network's forward pass on this rank.

    Args:
        placement: of the network.
        groups: the process groups.
        context: of the step.
        channels_last: whether images travel with the channels innermost in memory; the same on all ranks.
        compile: whether what lies between the exchanges runs through `torch.compile`.
        transfer: builds what redistributes a value; by default what does it over the groups.

    Attributes:
        sources: names of the tensors that it is given, in order: inputs, parameters and buffers.
        outputs: names of those that it gives, in order.
    """

    def __init__(
        self,
        placement: Placement,
        groups: Groups,
        context: StepContext,
        channels_last: bool = False,
        compile: bool = False,
        transfer: BuildTransfer | None = None,
    ) -> None:
        self._slots: dict[Place, int] = {}
        self._num_slots = 0
        self._instructions: list[Instruction] = []
        records: list[Instruction] = []
        self._placement = placement
        self._groups = groups
        self._channels_last = channels_last
        self._build_transfer = transfer or self._redistribution
        graph, mesh, coordinates = placement.graph, placement.mesh, groups.coordinates
        constants = graph.constants
        self.sources = [n for n, v in graph.values.items() if v.origin in ("input", "parameter", "buffer")]
        self.sources = [name for name in self.sources if name in placement.layouts]
        self._sources = [self._slot(name, placement.layouts[name]) for name in self.sources]
        self._constants = {
            self._slot(name, placement.layouts[name]): cut(value, placement.layouts[name], mesh, coordinates)
            for name, value in constants.items()
            if name in placement.layouts
        }
        others = {
            (name, layout)
            for placed in placement.calls
            for name, layout in placed.placed.inputs.items()
            if placed.call.op not in LOW_PRECISION
        }
        overwriting = Overwriting(placement)
        for placed in placement.calls:
            for name, steps in placed.transfers.items():
                target = placed.placed.inputs[name]
                self._transfer(name, target, steps, placed.call.name, cast=(name, target) not in others)
            layouts = {**placed.placed.inputs, **placed.placed.outputs}
            site = Site(graph, mesh, coordinates, groups, context, placed.call, layouts)
            inputs = [self._slot(name, placed.placed.inputs[name]) for name in placed.call.inputs]
            outputs = [self._slot(name, placed.placed.outputs[name]) for name in placed.call.outputs]
            kernel = overwriting.kernel(placed) or build_kernel(site)
            if compile and isinstance(kernel, Recorded):
                terms = self._new_slot()
                self._add(kernel.compute, inputs, [*outputs, terms], name=placed.call.name)
                buffers = tuple(inputs[place] for place in kernel.buffers)
                records.append(Instruction(_recording(kernel), (*buffers, terms), (), alone=True))
            else:
                self._add(kernel, inputs, outputs, isinstance(kernel, Alone), placed.call.name)
        for name, steps in placement.outputs.items():
            self._transfer(name, placement.output_layouts[name], steps, "the output")
        self.outputs = list(placement.outputs)
        self._outputs = [self._slot(name, placement.output_layouts[name]) for name in self.outputs]
        self._instructions += records
        if compile:
            self._instructions = compiled(self._instructions, self._outputs)
        self._instructions = self._freeing()

    def __call__(self, tensors: Sequence[Tensor], watch: Watch | None = None) -> list[Tensor]:
        """Run the pass.

        Args:
            tensors: this rank's part of every source, in order.
            watch: is told of every instruction.

        Returns:
            This rank's part of every output, in order.
        """
        slots: list[Any] = [None] * self._num_slots
        for slot, constant in self._constants.items():
            slots[slot] = constant
        for slot, tensor in zip(self._sources, tensors, strict=True):
            slots[slot] = tensor
        for instruction in self._instructions:
            here.at(instruction.layer)
            if watch is not None:
                watch.before(instruction.name)
            results = instruction.run(*[slots[slot] for slot in instruction.inputs])
            if watch is not None:
                watch.after(instruction.name, results)
            for slot, result in zip(instruction.outputs, results, strict=True):
                slots[slot] = result
            for slot in instruction.free:
                slots[slot] = None
        found = [slots[slot] for slot in self._outputs]
        return [tensor for tensor in found if tensor is not None]

    def _slot(self, name: str, layout: Layout) -> int:
        if (name, layout) not in self._slots:
            self._slots[name, layout] = self._new_slot()
        return self._slots[name, layout]

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _add(
        self,
        run: Callable[..., Sequence[Any]],
        inputs: Sequence[int],
        outputs: Sequence[int],
        alone: bool = False,
        name: str = "",
        layer: str = "",
    ) -> None:
        self._instructions.append(
            Instruction(run, tuple(inputs), tuple(outputs), alone, name=name, layer=layer or name)
        )

    def _transfer(self, name: str, target: Layout, steps: tuple[Step, ...], layer: str, cast: bool = False) -> None:
        """Redistribute a value, once for all who want it in the same layout; `cast` sends it as autocast computes."""
        if not steps or (name, target) in self._slots:
            return
        source = self._slot(name, steps[0].source)
        move = self._build_transfer(steps, self._placement.graph.shape(name))
        slot = self._slot(name, target)
        self._add((lambda x: [move(_low(x))]) if cast else (lambda x: [move(x)]), [source], [slot], True, layer=layer)

    def _redistribution(self, steps: tuple[Step, ...], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        groups = self._groups
        return redistribute(steps, self._placement.mesh, groups.coordinates, groups, shape, self._channels_last)

    def _freeing(self) -> list[Instruction]:
        """The instructions, each emptying the slots that it reads last."""
        wanted = set(self._outputs) | set(self._constants)
        found: list[Instruction] = []
        for instruction in reversed(self._instructions):
            read = set(instruction.inputs) | set(instruction.outputs)
            free = tuple(sorted(read - wanted))
            wanted |= read
            found.append(replace(instruction, free=free))
        return found[::-1]


def _recording(kernel: Recorded) -> Callable[..., Sequence[Any]]:
    def run(*tensors: Any) -> Sequence[Any]:
        *buffers, terms = tensors
        kernel.record(buffers, terms)
        return ()

    return run


def _low(x: Tensor) -> Tensor:
    """The tensor in the precision in which autocast would have the next layer compute."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
