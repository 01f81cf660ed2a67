"""A network that cannot be captured: its own Python code runs, and every layer in it is divided by itself.

Between the layers activations are whole but for the samples, so this sends more than a program would. What the code
does between its layers must treat samples one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from convoy.engine.network import Network, plain_forward
from convoy.errors import ConvoyError
from convoy.graph.tree import replace
from convoy.plans import Layout
from convoy.plans.mesh import Axes
from convoy.plans.place import sample_axes

LAYERS = (_ConvNd, nn.Linear, _BatchNorm, _DropoutNd)


@dataclass
class Layerwise(Network):
    """Runs the model's own forward pass, with a `Network` in place of each of its layers."""

    def look(self, examples: Sequence[Tensor], training: bool) -> None:
        """Run the examples once and find the layers that they reach."""
        self._training = training
        self._seen = _inputs_of_layers(self.model, examples)
        self.layers = tuple((name, _op(self.model.get_submodule(name))) for name in self._seen)

    def place_parameters(self, axes: Axes | None = None) -> None:
        """Divide every layer that was found."""
        self.sample_axes = sample_axes(self.layers, self.plan) if axes is None else axes
        shared = Layout.of(copied=self.sample_axes)
        parameters = dict(self.model.named_parameters())
        self.layouts = {name: shared if name in parameters else Layout() for name in self.shapes}
        self.context.draws = True
        self._parts: dict[str, Network] = {}
        for name, shapes in self._seen.items():
            layer = self.model.get_submodule(name)
            part = Network(layer, self.plan, self.groups, self.context, prefix=name)
            inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
            part.channels_last = self.channels_last
            part.look(inputs, self._training)
            part.place_parameters(self.sample_axes)
            self.layouts |= {f"{name}.{key}": layout for key, layout in part.layouts.items()}
            self._parts[name] = part
            layer.forward = part.part

    def forward(self, *inputs: Tensor) -> Any:
        """The network's output for this rank's own samples."""
        samples = self.exchange_samples(inputs)
        self.begin_pass(samples, inputs[0].device)
        with plain_forward(self.model):
            outputs = self.model.forward(*inputs)
        return replace(outputs, Tensor, lambda output: self.weigh(output, samples))


def _inputs_of_layers(model: nn.Module, examples: Sequence[Tensor]) -> dict[str, list[Any]]:
    """Shapes and types of what every layer is given, by the layer's name."""
    seen: dict[str, list[Any]] = {}
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, LAYERS):

            def note(layer: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                seen.setdefault(name, [(tuple(x.shape), x.dtype) for x in inputs])

            handles.append(layer.register_forward_pre_hook(note))
    state = torch.get_rng_state()
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()(*examples)
            drawn = not torch.equal(state, torch.get_rng_state())
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    if drawn:
        raise ConvoyError(
            "the network draws random numbers by itself, outside of dropout layers, and cannot be captured: "
            "ranks would draw different ones; use nn.Dropout or write its forward pass without tests on tensors"
        )
    return seen


def _op(layer: nn.Module) -> str:
    return "conv" if isinstance(layer, _ConvNd) else "linear" if isinstance(layer, nn.Linear) else "other"
