"""What must be so before a pass: the network as it was when it was divided, and all ranks in the same call.

What has changed in a network since then and other ranks would not notice is refused (`Unchanged`). What `forward` reads
of Python's objects is part of a pass's signature: the kinds of its inputs, what of them is no tensor, modes and numbers
of samples. Ranks tell each other what they are about to do, so that one that does something else gets a sentence, not a
hang: three numbers, in the message by which they know how many samples each has.
"""

import copy
import inspect
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.collectives import gather_ints
from convoy.comm.groups import Groups
from convoy.errors import ConvoyError
from convoy.graph.reads import MISSING, VALUES, Reads, Texts, version
from convoy.graph.tree import leaves, replace
from convoy.plans.mesh import Axes
from convoy.plans.schedule import SCHEDULES

Kind = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Form:
    """The arguments of a call, by position and by keyword, with `Tensor` in place of each tensor. `words` say what the
    others are: to Python True, 1 and 1.0 are equal, and an object is what it was whatever its attributes are."""

    tree: tuple[tuple[Any, ...], dict[str, Any]] = field(compare=False)
    key: Any  # the same, as something to compare
    words: str

    def fill(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        remaining_tensors = iter(tensors)
        filled: tuple[tuple[Any, ...], dict[str, Any]] = replace(
            self.tree, type, lambda value: next(remaining_tensors) if value is Tensor else value
        )
        return filled

    def caller(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the tensors alone."""

        def call(*tensors: Any) -> Any:
            args, kwargs = self.fill(tensors)
            return forward(*args, **kwargs)

        return call


def arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], own: Callable[..., Any] | None = None
) -> tuple[tuple[Tensor, ...], Form | None]:
    """The tensors of a call `model(*args, **kwargs)` in order, and its form, None where all arguments are tensors by
    position; the same for either way to name an argument. `own` is the forward pass to call where the model has one of
    its own. ConvoyError where there is no tensor, an argument is something that may change, or `forward` does not take
    these arguments."""
    if kwargs:
        try:
            bound = inspect.signature(own or partial(type(model).forward, model)).bind(*args, **kwargs)
        except TypeError as error:
            raise ConvoyError(f"{type(model).__name__}.forward: {error}") from error
        args, kwargs = bound.args, dict(sorted(bound.kwargs.items()))
    if args and not kwargs and all(isinstance(value, Tensor) for value in args):
        return tuple(args), None
    tensors = tuple(leaves((args, kwargs), Tensor))
    if not tensors:
        raise ConvoyError("the network is called without a tensor: pass samples along dim 0 of at least one")
    tree = replace((tuple(args), kwargs), Tensor, lambda _: Tensor)
    texts, words, key = Texts(), [], []
    for name, value in (*enumerate(tree[0]), *tree[1].items()):
        words += [] if value is Tensor else [f"argument {name} = {texts.of(value)}"]
        key.append((name, _frozen(value)))
        try:
            hash(key[-1])
        except TypeError:
            raise ConvoyError(
                f"argument {name} of the network is or holds something that may change, as a set or an array: pass "
                "tensors, by themselves or in tuples, lists and dicts, and beside them numbers, text or None"
            ) from None
    return tensors, Form(tree, tuple(key), shared(", ".join(words)))


def _frozen(tree: Any) -> Any:
    """A nest of containers as one of tuples."""
    if isinstance(tree, dict):
        return type(tree), tuple((name, _frozen(value)) for name, value in tree.items())
    return (type(tree), tuple(map(_frozen, tree))) if isinstance(tree, list | tuple) else tree


def shared(words: str) -> str:
    """The words without what is a rank's own: the numbers of objects, and of a device on its host."""
    return re.sub(r" #[\d.]+|, index=\d+", "", words)


@dataclass(frozen=True)
class Signature:
    """What a program is made for."""

    training: bool
    samples: tuple[int, ...]  # of every sample rank
    inputs: tuple[Kind, ...]  # the inputs' sizes but for the samples, and their types
    form: Form | None = None  # None where all arguments are positional tensors
    exceptions: tuple[int, ...] = ()  # places in `modules()` of those in the other mode, such as frozen batch norm
    state: tuple[str, ...] = ()  # how what `forward` reads of Python's objects has changed since the first capture


def kinds(inputs: Sequence[Tensor]) -> tuple[Kind, ...]:
    """Sizes but for the samples, and types."""
    return tuple((tuple(x.shape[1:]), x.dtype) for x in inputs)


PASS = "a pass of the network"
# Passes in stages, which run forward and backward in an order that all ranks follow.
SCHEDULED = {schedule: f"convoy.forward_backward with schedule={schedule!r}" for schedule in SCHEDULES}
# What all ranks do together; they send each other the place in this list.
_CALLS = (
    PASS,
    *SCHEDULED.values(),
    "convoy.state_dict",
    "convoy.load_state_dict",
    "convoy.optimizer_state_dict",
    "convoy.load_optimizer_state_dict",
    "convoy.save",
    "convoy.load",
    "convoy.gradients",
    "convoy.evaluate",
    "convoy.BatchSampler",
    "convoy.clip_grad_norm_",
)
PATIENCE_S = 20.0  # how long a rank waits for the others before it says so


def exchange_samples(
    inputs: Sequence[Tensor], form: Form | None, state: int, training: bool, groups: Groups, axes: Axes, call: str
) -> tuple[int, ...]:
    """How many samples every rank of the sample `axes` has in this pass. All ranks call it. `state` is a checksum of
    the types and devices of the parameters, of the modules in another mode, and of changes of what `forward` reads;
    `call` is `PASS` or one of `SCHEDULED`. ConvoyError where ranks pass images of different sizes or types, or other
    arguments beside them, run in different modes or calls, or share samples and have different numbers of them."""
    mesh = groups.mesh
    shapes = [f"{list(size)} of {dtype}" for size, dtype in kinds(inputs)]
    beside = f" with {form.words}" if form is not None and form.words else ""
    what = f"{', '.join(shapes)}{beside}{' in training' if training else ' in evaluation'}"
    own_row = [_CALLS.index(call), len(inputs[0]), zlib.crc32(f"{what}, {state}".encode())]
    rows = gather_ints(own_row, groups.world)
    _check(call, groups.rank, [row[0] for row in rows])
    samples_at: dict[int, int] = {}
    for rank, (_, number, kind) in enumerate(rows):
        place = mesh.index(mesh.coordinates(rank), axes)
        if kind != own_row[2]:
            raise ConvoyError(
                f"rank {groups.rank} passes samples of {what}, but rank {rank} passes others: all ranks must pass "
                "images of the same size and type and the same values beside them, with every module in the same mode "
                "and with the same attributes and hooks, to weights of the same types"
            )
        if samples_at.setdefault(place, number) != number:
            raise ConvoyError(
                f"rank {rank} passes {number} samples, and a rank that works on the same ones {samples_at[place]}: "
                "pass the samples that convoy.local_samples says"
            )
    return tuple(samples_at[place] for place in range(mesh.size(axes)))


def agree(call: str, groups: Groups) -> None:
    """Wait until all ranks have made the same call; ConvoyError where one does something else or has ended."""
    if groups.world is None:
        return
    try:
        with _impatient(call, groups.rank):
            rows = gather_ints([_CALLS.index(call), 0, 0], groups.world)
    except RuntimeError as error:
        raise ConvoyError(
            f"rank {groups.rank} has called {call}, which all ranks call together, and others have not "
            f"({str(error).splitlines()[0]}): call it on every rank, also where only one of them uses the result"
        ) from error
    _check(call, groups.rank, [row[0] for row in rows])


def _check(call: str, rank: int, calls: Sequence[int]) -> None:
    for other_rank, number in enumerate(calls):
        other_call = _CALLS[number]
        if other_call != call:
            name = other_call if call == PASS else call
            raise ConvoyError(
                f"rank {rank} is in {call} while rank {other_rank} is in {other_call}: all ranks call {name} together, "
                "also where only one of them uses the result"
            )


@contextmanager
def _impatient(call: str, rank: int) -> Iterator[None]:
    """Say so where the others do not come: they may wait for something else for ever."""
    text = f"rank {rank} has waited {PATIENCE_S:.0f} s in {call} for the other ranks: all ranks call it together"
    timer = threading.Timer(PATIENCE_S, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Unchanged:
    """A network as it was divided, with this rank's parameters; where it is `alone` nobody else could miss anything.
    `types` is a checksum of the parameters' types and kinds of device, as of the last `check`; `reads` is what captures
    of the network have read, and `noted` is to be called after one."""

    def __init__(self, model: nn.Module, alone: bool) -> None:
        self._model = model
        self._alone = alone
        self._is_copy = False
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._begin()
        self._remember()
        self._check_hooks()

    def _begin(self) -> None:
        self.reads, self._texts = Reads(), Texts()
        self._first: dict[tuple[int, str], str] = {}  # words for what was read, as it was then
        self._replaced: dict[str, str] = {}  # layers without parameters that others have taken the place of
        self.noted()

    def of_copy(self, model: nn.Module) -> "Unchanged":
        """The same for a copy of the network, which need not be complete yet."""
        twin = copy.copy(self)
        twin._model = model
        twin._modules = []
        twin._begin()
        twin._is_copy = True
        return twin

    def modules_in_other_mode(self) -> tuple[int, ...]:
        """Modules in another mode than the network (frozen batch norm, for example), by their places in `modules()`."""
        training = self._model.training
        if not self._modules:
            self._remember()
        return tuple(i for i, module in enumerate(self._modules) if module.training is not training)

    def state(self) -> tuple[str, ...]:
        """How what `forward` reads differs from what it was when a capture first read it; some 60 ns an attribute."""
        ids = [id(attribute) for attribute in map(dict.get, self._places, self._names, repeat(MISSING))]
        try:
            same = ids == self._ids and self._texts.live == self._texts.copies
            same = same and all(getattr(kind, name, None) == value for kind, name, value in self._classes)
        except (RuntimeError, ValueError):  # tensors and arrays are compared number by number
            same = False
        if not same or [version(x) for x in self._texts.tensors] != self._versions:
            self.noted()
        return self._state

    def noted(self) -> None:
        """Take what `reads` has as it is now."""
        self._texts.clear()
        self._places: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._classes: list[tuple[type, str, Any]] = []
        self._values: list[Any] = []  # kept, so that no others get their ids
        state = [f"{name} is {text}" for name, text in self._replaced.items()]
        paths = {module: path for path, module in self._model.named_modules()} if self.reads.names else {}
        for number, (module, names) in enumerate(self.reads.names.items()):
            for name in names:
                value = vars(module).get(name, MISSING)
                self._places.append(vars(module))
                self._names.append(name)
                self._values.append(value)
                if value is MISSING and isinstance(of_class := getattr(type(module), name, None), VALUES):
                    self._classes.append((type(module), name, of_class))
                    value = of_class
                text = self._texts.of_attribute(name, value)
                if self._first.setdefault((number, name), text) != text:
                    state.append(f"{paths.get(module, '')}.{name} = {text}".strip("."))
        for tensor in self.reads.tensors.values():
            text = self._texts.of(tensor)
            if self._first.setdefault((id(tensor), ""), text) != text:
                state.append(text)
        self._ids = list(map(id, self._values))
        self._versions = [version(x) for x in self._texts.tensors]
        self._state = tuple(state)

    def has_hooks(self) -> bool:
        if not self._modules:
            self._remember()
        return any(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
            for module in self._modules[1:]
        )

    def check(self, inputs: Sequence[Tensor]) -> bool:
        """Whether parameters have another type or device than in the pass before; some 0.1 µs a layer and parameter.
        ConvoyError where something else has changed, or the inputs do not fit together."""
        if any(x.shape[:1] != inputs[0].shape[:1] for x in inputs):
            lengths = ", ".join(str(len(x)) if x.dim() else "no" for x in inputs)
            raise ConvoyError(f"the inputs have {lengths} samples along dim 0: pass as many of each")
        if not self._modules:
            self._remember()
        if [id(value) for where in self._trees for value in where.values()] != self._held_ids:
            self._look_at_layers()
        cast = [(p.dtype, p.device) for p in self._parameters] != self._kinds
        if cast:
            self._look_at_types()
        if self._alone:
            return cast
        if any(p.requires_grad for p in self._frozen):
            raise ConvoyError(
                "a parameter that was frozen is to be trained now, and its gradient would stay on its rank: build the "
                "network anew, set requires_grad, then call convoy.parallelize"
            )
        self._check_hooks()
        if self._is_copy and self._model.training and torch.is_grad_enabled():
            raise ConvoyError(
                "this is a copy of a parallelized network, whose gradients nobody adds up: train the original, and "
                "call the copy in eval mode or under torch.no_grad()"
            )
        return cast

    def _check_hooks(self) -> None:
        """Refuse hooks on the gradients of parameters, of which each rank computes a part."""
        if any(map(_has_hook, self._parameters)) and not self._alone:
            name = next(name for name, p in self._model.named_parameters() if _has_hook(p))
            raise ConvoyError(
                f"{name} has a gradient hook, which would see this rank's part of the gradient before the ranks' are "
                "added up: take it away, and do with p.grad what it does, between backward() and optimizer.step()"
            )

    def _remember(self) -> None:
        self._trees: list[dict[str, Any]] = []
        self._held: dict[str, nn.Module | nn.Parameter | None] = {}
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            for where in (module._modules, module._parameters):
                self._trees.append(where)
                self._held |= {f"{prefix}{key}": value for key, value in where.items()}
        self._held_ids = [id(value) for where in self._trees for value in where.values()]
        self._modules = list(self._model.modules())
        self._parameters = list(self._model.parameters())
        self._look_at_types()

    def _look_at_layers(self) -> None:
        """Some were replaced, taken out or added, which are to have neither parameters nor buffers."""
        old = self._held
        self._remember()
        names = [name for name in {**old, **self._held} if old.get(name) is not self._held.get(name)]
        for value in (tree.get(name) for name in names for tree in (old, self._held)):
            has_state = isinstance(value, nn.Module) and any(map(len, map(list, (value.parameters(), value.buffers()))))
            if has_state or isinstance(value, nn.Parameter) or not self.reads.names:
                self._held, self._held_ids = old, []
                raise ConvoyError(
                    f"{names[0]} was replaced or taken out after convoy.parallelize, which knows nothing of what takes "
                    "its place: build the network anew, replace it, then call convoy.parallelize"
                )
        self._replaced |= {name: self._texts.of(self._held.get(name)) for name in names}
        self.noted()

    def _look_at_types(self) -> None:
        self._kinds = [(p.dtype, p.device) for p in self._parameters]
        self.types = zlib.crc32(repr([(str(dtype), device.type) for dtype, device in self._kinds]).encode())


def _has_hook(parameter: nn.Parameter) -> bool:
    """Whether somebody but Convoy is to see its gradient."""
    added = parameter._post_accumulate_grad_hooks or {}
    return bool(parameter._backward_hooks) or not all(
        getattr(hook, "__module__", "").startswith("convoy.") for hook in added.values()
    )
