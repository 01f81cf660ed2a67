"""A network that cannot be captured: its own forward pass runs on every rank, on the samples of all.

Nobody knows what such code does with samples and channels, so nothing of it is divided. It brings no speed, and never
computes anything else than one device: where statistics are those of microbatches each of these runs by itself, and
what is drawn, by torch, Python or NumPy, follows from (seed, update, place of the first sample), alike on every rank.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from convoy.comm.redistribution import redistribute
from convoy.engine.agreement import Form, arguments
from convoy.engine.gradients.reducer import writable
from convoy.engine.network import Network
from convoy.errors import ConvoyError
from convoy.graph.tree import leaves, replace
from convoy.ops.random_bits import fold
from convoy.plans.layout import WHOLE, Layout, consecutive
from convoy.plans.place import Batch, own_samples, sample_axes
from convoy.plans.transfer import transfer


class Uncaptured(Network):
    """Runs the model's own forward pass on the samples of all ranks, and gives each rank the outputs of its own."""

    def look(self, examples: Sequence[Tensor], form: Form | None) -> None:
        """Note the layers, of which a plan may name some."""
        self.example, self.form = tuple((tuple(x.shape), x.dtype) for x in examples), form
        kinds = ((name, _op(layer)) for name, layer in self.model.named_modules())
        self.layers = tuple((name, op) for name, op in kinds if op)

    def place_parameters(self) -> None:
        """Every rank has all parameters, and computes their whole gradients."""
        self.sample_axes = sample_axes(self.layers, self.plan)
        self.layouts = dict.fromkeys(self.shapes, WHOLE)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs, form = arguments(self.model, args, kwargs, self._own_forward)
        inputs, samples = self.open_pass(inputs, form)
        total, device = sum(samples), inputs[0].device
        batch = Batch(self.plan.mesh, self.sample_axes, consecutive(samples))
        self.begin_pass(samples, device)
        own_layout = own_samples((total,), batch)
        whole = [writable(self._move(x, own_layout, WHOLE, (total, *x.shape[1:]))) for x in inputs]
        parts, end = [], 0
        for size, key in self._microbatches(total):
            start, end = end, end + size
            tensors = whole if size == total else [writable(x[start:end]) for x in whole]
            positional, named = (tensors, {}) if form is None else form.fill(tensors)
            with self.plain_forward(), drawing(key, device):
                parts.append((size, self.model.forward(*positional, **named)))
        self.end_pass()

        def mine(output: Tensor) -> Tensor:
            layout = own_samples(tuple(output.shape), batch)
            return writable(self.weigh(self._move(output, WHOLE, layout, output.shape), samples))

        outputs = _joined(parts)
        if self.passes == 1:
            self.look_at_rows([x.shape for x in leaves(outputs, Tensor)], total)
        return replace(outputs, Tensor, mine)

    def _microbatches(self, total: int) -> list[tuple[int, int | None]]:
        """The sizes of the parts that run one after the other, and the keys of what they draw."""
        context = self.context
        if not self.trains:  # whoever draws then asks for other numbers in every pass
            return [(total, None)]
        is_whole = context.batch_norm != "microbatch" or len(context.sizes) == 1
        parts = [(total, context.starts[0])] if is_whole else zip(context.sizes, context.starts, strict=True)
        return [(size, fold(context.seed, context.step, start)) for size, start in parts if size or is_whole]

    @property
    def shows_uses(self) -> bool:
        """Its own code takes the parameters from the layers themselves."""
        return False

    def python_state(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Modules in another mode than the network; its own code reads everything else as it is."""
        return self._unchanged.modules_in_other_mode(), ()

    def _move(self, x: Tensor, source: Layout, target: Layout, shape: Sequence[int]) -> Tensor:
        steps = transfer(source, target, self.groups.mesh, shape)
        return redistribute(steps, self.groups, shape, self.channels_last)(x) if steps else x


@contextmanager
def drawing(key: int | None, device: torch.device) -> Iterator[None]:
    """Within it random numbers follow from a key, if there is one; the generators' own states stay as they were."""
    if key is None:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(key)
            random.seed(key)
            np.random.seed(key % 2**32)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _joined(parts: Sequence[tuple[int, Any]]) -> Any:
    """The outputs of several microbatches, with their sizes, as those of one pass."""
    first = parts[0][1]
    if len(parts) == 1:
        return first
    rows = [leaves(part, Tensor) for _, part in parts]
    for (size, _), row in zip(parts, rows, strict=True):
        for output in row:
            if output.shape[:1] != (size,):
                raise ConvoyError(
                    f"the network returns a tensor of shape {list(output.shape)} for a microbatch of {size} samples, "
                    "and those of several cannot be joined: let it return tensors with the samples along dim 0 alone, "
                    "or choose batch_norm='sync'"
                )
    whole = iter([torch.cat(column) for column in zip(*rows, strict=True)])
    return replace(first, Tensor, lambda _: next(whole))


def _op(layer: nn.Module) -> str:
    return "conv" if isinstance(layer, _ConvNd) else "linear" if isinstance(layer, nn.Linear) else ""
