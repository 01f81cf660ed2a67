"""From a module to the list of the calls that it makes.

The network runs once on tensors without numbers while every torch function it calls is written down, so python's own
control flow over shapes and modes is followed as it is. A graph therefore holds for one mode and one size of input.
Fake tensors stand in for parameters and buffers, and the pass leaves no trace: in modules, in what they keep in lists
and dicts, in random states. What is no network that can be divided is refused before (`check_given`).

Not by torch.fx, which stops where code looks at a shape, nor by torch.export, which takes seconds to minutes and fixes
the batch size: a run takes 0.3 s for ResNet-50.
"""

import copy
import gc
import inspect
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointFunction

from convoy.errors import ConvoyError
from convoy.graph import tree
from convoy.graph.fake import Constants, Fakes
from convoy.graph.graph import Apply, Call, CaptureError, ChangedError, Graph, KeptError, LayerStack, Recognize, Ref
from convoy.graph.reads import Reads, Texts, described
from convoy.graph.recorder import Recorder


def unwrapped(model: nn.Module) -> nn.Module:
    """The network that `torch.compile`, DataParallel or DistributedDataParallel wraps and computes the same as."""
    if isinstance(model, DataParallel | DistributedDataParallel):
        return unwrapped(cast(nn.Module, model.module))
    return unwrapped(cast(nn.Module, model._modules["_orig_mod"])) if _is_compiled(model) else model


def copied(model: nn.Module) -> nn.Module:
    """A copy, also with tensors that the network computed (`torch.nn.utils.weight_norm`), which torch does not copy."""
    tensors = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf})


def prepare_given(model: nn.Module, needs_numbers: bool = True) -> None:
    """Let parts that are compiled or in DataParallel run as they are; ConvoyError for what is no network to divide."""
    check_given(model, needs_numbers)
    for module in model.modules():
        if isinstance(module, DataParallel):
            module.device_ids = []  # it then calls its network
        elif _is_compiled(module):
            module.forward = cast(nn.Module, module._modules["_orig_mod"]).__call__
        elif compiled := vars(module).get("forward"):
            module.forward = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        module._compiled_call_impl = None


def check_given(model: nn.Module, needs_numbers: bool = False) -> None:
    """Refuse what is no network that can be divided, in a sentence that says what to give in its place."""
    if not isinstance(model, nn.Module):
        raise ConvoyError(f"the network is of type {type(model).__name__}: give an nn.Module")
    if _is_compiled(model):
        raise ConvoyError(
            "the network is what torch.compile returned: give the network that it was given (net._orig_mod), with "
            "compile=True if it is to be compiled"
        )
    for name, module in model.named_modules():
        layer = f"layer {name}" if name else "the network"
        if why := _refused(module):
            raise ConvoyError(f"{layer} {why}")
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                why = "has no shape before a first pass: call the network once, net(example), then convoy.parallelize"
            elif needs_numbers and tensor is not None and tensor.is_meta:
                why = "is on the meta device and has no numbers: build the network within convoy.deferred() instead"
            if why:
                raise ConvoyError(f"{key} of {layer} {why}")


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules


def _refused(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, which does not show what it calls: give the module that was scripted or traced"
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
        return f"is in {kind}, which adds up gradients as Convoy does: give the network in it (net.module)"
    if isinstance(module, fx.GraphModule) and "train" in vars(module):
        return "comes from torch.export, which fixes its mode: give the module that was exported"
    return ""


@contextmanager
def custom_functions(recorder: Recorder) -> Iterator[None]:
    """Within it the recorder is told of `F.apply(...)` of custom functions. Activation checkpointing, which is such a
    function too, runs what it is given as if it were called directly; the recorder knows of it meanwhile, and where
    autograd is asked in another way not to keep what it needs."""
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
    contexts: list[AbstractContextManager[None]] = []
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            with recorder.recomputing():
                return args[0](*args[2:])
        if cls.__module__ == CheckpointFunction.__module__:  # torch 2.11 keeps the inputs by one, of no result
            return original.__get__(None, cls)(*args, **kwargs)
        return recorder.custom(Apply(cls), args, kwargs, original.__get__(None, cls))

    def begin(self: saved_tensors_hooks) -> None:
        enter(self)
        contexts.append(recorder.recomputing())
        contexts[-1].__enter__()

    def end(self: saved_tensors_hooks, *error: Any) -> None:
        contexts.pop().__exit__(None, None, None)
        leave(self, *error)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = begin, end  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = enter, leave  # type: ignore[method-assign]
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]


@contextmanager
def swapped(
    model: nn.Module, tensors: Mapping[str, Tensor], fakes: Mapping[str, Tensor], constant: Callable[[Tensor], bool]
) -> Iterator[None]:
    """Within it the modules hold `fakes` for `tensors`, wherever they are held, also by several modules at once.
    CaptureError where the model replaces one of them by another tensor, unless that is `constant`, a table made at
    first use."""
    places = {id(tensor): fakes[name] for name, tensor in tensors.items()}
    names = {id(fake): name for name, fake in fakes.items()}
    holders = [
        (vars(module), kind, vars(module)[kind]) for module in model.modules() for kind in ("_parameters", "_buffers")
    ]
    stand_ins_held = []
    for attributes, kind, originals in holders:
        attributes[kind] = {name: places.get(id(tensor), tensor) for name, tensor in originals.items()}
        stand_ins_held.append(dict(attributes[kind]))
    try:
        yield
        for (attributes, kind, _), stand_ins_before in zip(holders, stand_ins_held, strict=True):
            for name, tensor in stand_ins_before.items():
                current = attributes[kind].get(name)
                if current is not tensor and not (current is not None and constant(current)):
                    raise CaptureError(f"it replaces {names.get(id(tensor), name)} in its forward pass")
    finally:
        for attributes, kind, originals in holders:
            attributes[kind] = originals


_DEPTH = 3


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo what is left behind by what runs within it. Raises CaptureError where it has drawn from the random numbers
    of python or numpy, which a graph cannot repeat."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), nothing_left(model):
            yield
        if random.getstate() != python or not _same(np.random.get_state(), numpy):
            raise CaptureError("it draws from the random numbers of python or numpy in its forward pass")
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[None]:
    """Undo what passes within it have left in attributes of modules, and hooks in what is theirs."""
    copies: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        _keep(vars(module), copies, _DEPTH)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            _keep(_held_by_hook(hook), copies, _DEPTH)
    try:
        yield
    finally:
        for container, contents in copies.values():
            if isinstance(container, list):
                container[:] = contents
            else:
                container.clear()
                container.update(contents)


def _keep(container: Any, copies: dict[int, tuple[Any, Any]], depth: int) -> None:
    if depth == 0 or id(container) in copies or type(container) not in (dict, list, set):
        return
    copies[id(container)] = (container, type(container)(container))
    if not isinstance(container, set):
        for item in container.values() if isinstance(container, dict) else container:
            _keep(item, copies, depth - 1)


def _held_by_hook(hook: Any) -> list[Any]:
    """What a hook can change that lies outside of the network."""
    objects = [vars(owner)] if hasattr(owner := getattr(hook, "__self__", hook), "__dict__") else []
    if inspect.isfunction(hook) or inspect.ismethod(hook):
        with suppress(ValueError):  # a variable that is not set yet
            closure = inspect.getclosurevars(hook)
            objects += [*closure.nonlocals.values(), *closure.globals.values()]
    return objects


def _same(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def capture(
    recognize: Recognize,
    model: nn.Module,
    inputs: Sequence[Any],
    training: bool | None = None,
    *,
    shapes: Shapes | None = None,
    forward: Callable[..., Any] | None = None,
    reads: Reads | None = None,
) -> Graph:
    """The calls that `model(*inputs)` makes, with the shapes of every tensor; the model is left as it is.

    Only the shapes and types of `inputs`, the global batch's, are used, on any device (`meta` too); a bare shape stands
    for a tensor of the default type, and other objects are passed on. `training=None` keeps the mode of each module,
    `shapes` are the serial ones where the module holds others, `forward` runs in place of `model.forward`, and `reads`
    collects what the network reads beside its inputs, parameters and buffers. KeptError where somebody keeps tensors of
    the pass, ChangedError where it counts passes or the like, and CaptureError, which names the layer, where it does
    something else that a graph cannot say.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError("it is TorchScript, which does not show what it calls", name)
        if module is not model and (module._backward_hooks or module._backward_pre_hooks):
            raise CaptureError("it has a backward hook, which is to see whole gradients", name)
    reads, constants, texts = reads or Reads(), Constants(Fakes()), Texts()
    run = partial(_once, recognize, model, inputs, constants, shapes, forward or model.forward, reads, texts)
    with untouched(model), _mode(model, training), torch.enable_grad():
        texts_before = described(model, texts)
        graph, references = run()
        texts_after = described(model, texts)
        changes = [at for at, text in texts_after.items() if texts_before.get(at) != text]
        own_fakes = set(map(id, constants.kept))
        _check_kept(model, changes, [(tensor, layer) for tensor, layer in references if id(tensor()) not in own_fakes])
        # tables that are made at first use do not change again
        tables = [at for at in changes if "Tensor #" not in texts_before.get(at, "") and "Tensor #" in texts_after[at]]
        # what the pass itself has changed and read: it may be a counter, which a second pass shows
        if own_reads := [at for at in changes if at[1] in reads.names.get(at[0], ()) and at not in tables]:
            second_graph, _ = run()
            texts_again = described(model, texts)
            drifts = [at for at in own_reads if texts_again.get(at) != texts_after[at]]
            if drifts or second_graph.calls != graph.calls:
                name = _path(model, *(drifts or own_reads)[0])
                raise ChangedError(f"it changes {name} by itself, and reads it in later passes")
    reads.tensors |= constants.outside
    return graph


Made = list[tuple["weakref.ref[Tensor]", str]]


def _once(
    recognize: Recognize,
    model: nn.Module,
    inputs: Sequence[Any],
    constants: Constants,
    shapes: Shapes | None,
    forward: Callable[..., Any],
    reads: Reads,
    texts: Texts,
) -> tuple[Graph, Made]:
    fakes, layers = constants.fakes, LayerStack(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    device = next((t.device for t in tensors.values() if t.device.type != "meta"), torch.device("cpu"))
    mode = model.training
    with fakes:
        fake = {name: _stand_in(tensor, (shapes or {}).get(name), device) for name, tensor in tensors.items()}
        arguments = [_fake_input(value, device) for value in inputs]
    sizes = [value.shape for value in arguments if isinstance(value, Tensor) and value.dim()]
    recorder = Recorder(constants, layers, recognize, sizes[0][0] if sizes else None)
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in fake.items():
        texts.alias(tensor, tensors[name])  # a layer may take it for its own
        if (is_buffer := name in buffers) and tensors[name].requires_grad:
            raise CaptureError(f"its buffer {name} has a gradient, as only parameters have")
        recorder.give(name, tensor, "buffer" if is_buffer else "parameter", is_buffer or tensors[name].requires_grad)
    if shapes is None:
        recorder.know(tensors.items())
    names = _input_names(forward, arguments, set(tensors))
    for name, value in zip(names, arguments, strict=True):
        if isinstance(value, Tensor):
            recorder.give(name, value, "input")
    with swapped(model, tensors, fake, constants.known), reads.followed():
        output = _run(forward, arguments, fakes, layers, recorder)
    graph = _finish(recorder, [n for n, v in zip(names, arguments, strict=True) if isinstance(v, Tensor)], output, mode)
    return graph, recorder.made


def _check_kept(model: nn.Module, changes: Sequence[tuple[nn.Module, str]], references: Made) -> None:
    """Raise KeptError where the network, a hook or anybody else keeps tensors of the pass."""
    living = {id(tensor) for reference, _ in references if (tensor := reference()) is not None}
    for module, name in changes:
        if any(id(tensor) in living for tensor in tree.leaves(vars(module)[name], Tensor)):
            raise KeptError(f"it keeps a tensor of its forward pass in {_path(model, module, name)}")
    if living:
        gc.collect()  # most are in cycles
        for reference, layer in references:
            if reference() is not None:
                raise KeptError(f"a hook or function keeps a tensor of its forward pass ({layer or 'an input'})")


def _path(model: nn.Module, module: nn.Module, name: str) -> str:
    return ".".join(
        filter(None, [next(path for path, submodule in model.named_modules() if submodule is module), name])
    )


def _run(
    forward: Callable[..., Any], arguments: Sequence[Any], fakes: Fakes, layers: LayerStack, recorder: Recorder
) -> Any:
    try:
        with warnings.catch_warnings(), fakes.quiet():
            warnings.simplefilter("ignore")  # those of this pass are of no interest to anybody
            # the caller's autocast is for the calls when they run
            autocast_off = torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)
            with autocast_off[0], autocast_off[1], fakes, layers.follow(), custom_functions(recorder), recorder:
                output = forward(*arguments)
        output = recorder.reference(output)
    except CaptureError:
        raise
    except Exception as error:
        if type(error).__name__.startswith("DataDependent"):
            raise CaptureError("it asks for the numbers in a tensor", layers.name) from error
        first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        reason = f"it raises {type(error).__name__} in a trial without data: {first}"
        raise CaptureError(reason, layers.name) from error
    if recorder.updates:
        raise CaptureError(f"it counts in {recorder.updates[0]}, which no batch norm uses")
    return output


def _finish(recorder: Recorder, inputs: list[str], output: Any, training: bool) -> Graph:
    used_names = {ref.name for ref in tree.leaves(output, Ref)}
    calls: list[Call] = []
    for call in reversed(recorder.calls):
        if call.updates or used_names.intersection(call.outputs):
            calls.append(call)
            used_names.update(call.inputs, call.outputs)
            used_names.update(filter(None, [call.attributes.get("num_batches_tracked")]))
    values = {name: value for name, value in recorder.values.items() if name in used_names or name in inputs}
    constants = {name: tensor for name, tensor in recorder.constants.named.items() if name in values}
    return Graph(tuple(reversed(calls)), values, tuple(inputs), output, constants, training)


def _stand_in(tensor: Tensor, kind: tuple[Sequence[int], torch.dtype] | None, device: torch.device) -> Tensor:
    """A fake of a parameter or buffer, of a shape and type or else of the tensor's own. Tensors on the meta device,
    which fakes know not, are taken to `device`."""
    shape, dtype = kind or (tensor.shape, tensor.dtype)
    fake = torch.empty(tuple(shape), dtype=dtype, device=device if tensor.is_meta else tensor.device)
    return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake


def _fake_input(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(tuple(value.shape), dtype=value.dtype, device=device)
    if isinstance(value, torch.Size) or (isinstance(value, tuple) and all(type(size) is int for size in value)):
        return torch.empty(tuple(value), device=device)
    return value


def _input_names(forward: Callable[..., Any], arguments: Sequence[Any], tensor_names: set[str]) -> list[str]:
    try:
        parameters = inspect.signature(forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        names = []
    names = [names[place] if place < len(names) else f"input_{place}" for place in range(len(arguments))]
    return [f"{name}_" if name in tensor_names else name for name in names]


@contextmanager
def _mode(model: nn.Module, training: bool | None) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    flags = [(p, p.requires_grad) for p in model.parameters()]  # `train` may be the model's own, and freeze some
    try:
        if training is not None:
            model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for p, requires_grad in flags:
            if p.requires_grad is not requires_grad:
                p.requires_grad_(requires_grad)
