"""From a module to the list of the calls that it makes.

The network runs once on tensors without numbers while every torch function it calls is written down, so python's own
control flow over shapes and modes is followed as it is. A graph therefore holds for one mode and one size of input.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from convoy.graph import tree
from convoy.graph.autograd import custom_functions
from convoy.graph.errors import CaptureError
from convoy.graph.fake import Fakes
from convoy.graph.graph import Call, Graph, Ref
from convoy.graph.layers import LayerStack
from convoy.graph.recorder import Recorder
from convoy.graph.stand_ins import Shapes, stand_ins, swapped
from convoy.graph.untouched import untouched


def capture(
    model: nn.Module,
    inputs: Sequence[Any],
    training: bool | None = None,
    *,
    shapes: Shapes | None = None,
    forward: Callable[..., Any] | None = None,
) -> Graph:
    """The calls that `model(*inputs)` makes, with the shapes of every tensor.

    Args:
        model: is left as it is: parameters, buffers, modes and random states.
        inputs: tensors of the shapes and types of the global batch, on any device (`meta` too), of which nothing
            else is used; a bare shape stands for a tensor of the default type; other objects are passed on.
        training: the mode to capture in; None is the one that each module is in.
        shapes: serial shapes and types of parameters and buffers by name, where the module holds others.
        forward: what to run in place of `model.forward`.

    Raises:
        CaptureError: the network does something that a graph cannot say; its message names the layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError("it is TorchScript, which does not show what it calls", name)
    fakes, layers = Fakes(), LayerStack(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    device = next((t.device for t in tensors.values() if t.device.type != "meta"), torch.device("cpu"))
    with untouched(model), _mode(model, training), torch.enable_grad():
        mode = model.training
        with fakes:
            fake = stand_ins(tensors, shapes or {}, device)
            given = [_fake_input(value, device) for value in inputs]
        sizes = [value.shape for value in given if isinstance(value, Tensor) and value.dim()]
        recorder = Recorder(fakes, layers, sizes[0][0] if sizes else None)
        buffers = {name for name, _ in model.named_buffers()}
        for name, tensor in fake.items():
            recorder.give(name, tensor, "buffer" if name in buffers else "parameter")
        if shapes is None:
            recorder.know(tensors.items())
        names = _input_names(forward or model.forward, given, set(tensors))
        for name, value in zip(names, given, strict=True):
            if isinstance(value, Tensor):
                recorder.give(name, value, "input")
        with swapped(model, tensors, fake, recorder.constants.known):
            output = _run(forward or model.forward, given, fakes, layers, recorder)
    return _finish(recorder, [n for n, v in zip(names, given, strict=True) if isinstance(v, Tensor)], output, mode)


def _run(
    forward: Callable[..., Any], given: Sequence[Any], fakes: Fakes, layers: LayerStack, recorder: Recorder
) -> Any:
    try:
        with warnings.catch_warnings(), fakes.quiet():
            warnings.simplefilter("ignore")  # those of this pass are of no interest to anybody
            custom = custom_functions(recorder.custom, recorder.recompute)
            with _without_autocast(), fakes, layers.follow(), custom, recorder:
                output = forward(*given)
        output = recorder.reference(output)
    except CaptureError:
        raise
    except Exception as error:
        if type(error).__name__.startswith("DataDependent"):
            raise CaptureError("it asks for the numbers in a tensor", layers.name) from error
        first = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(f"{type(error).__name__} without numbers: {first}", layers.name) from error
    if recorder.updates:
        raise CaptureError(f"it counts in {recorder.updates[0]}, which no batch norm uses")
    return output


@contextmanager
def _without_autocast() -> Iterator[None]:
    """The caller may be in a context of autocast, which is for the calls when they run."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _finish(recorder: Recorder, inputs: list[str], output: Any, training: bool) -> Graph:
    """Leave out the calls whose results nobody uses."""
    needed = {ref.name for ref in tree.leaves(output, Ref)}
    calls: list[Call] = []
    for call in reversed(recorder.calls):
        updates = call.op == "batch_norm" and call.attributes["training"] and call.attributes["running_mean"]
        if updates or needed.intersection(call.outputs):
            calls.append(call)
            needed.update(call.inputs, call.outputs)
            needed.update(filter(None, [call.attributes.get("num_batches_tracked")]))
    values = {name: value for name, value in recorder.values.items() if name in needed or name in inputs}
    constants = {name: tensor for name, tensor in recorder.constants.named.items() if name in values}
    recomputed = tuple(dict.fromkeys(recorder.recomputed))
    return Graph(tuple(reversed(calls)), values, tuple(inputs), output, constants, training, recomputed)


def _fake_input(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(tuple(value.shape), dtype=value.dtype, device=device)
    if isinstance(value, torch.Size) or (isinstance(value, tuple) and all(type(size) is int for size in value)):
        return torch.empty(tuple(value), device=device)
    return value


def _input_names(forward: Callable[..., Any], given: Sequence[Any], taken: set[str]) -> list[str]:
    try:
        parameters = inspect.signature(forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        names = []
    names = [names[place] if place < len(names) else f"input_{place}" for place in range(len(given))]
    return [f"{name}_" if name in taken else name for name in names]


@contextmanager
def _mode(model: nn.Module, training: bool | None) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        if training is not None:
            model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
