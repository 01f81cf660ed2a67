"""Ranks tell each other what they are about to do, so that one that does something else gets a sentence, not a hang:
three numbers, in the message by which they know how many samples each has.

A pass is told by its signature: the kinds of its inputs, what of them is no tensor, modes and numbers of samples.
"""

import inspect
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.collectives import gather_ints
from convoy.comm.groups import Groups
from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes
from convoy.plans.schedule import SCHEDULES

Kind = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Form:
    """The arguments of a call, by position and by keyword, with `Tensor` in place of each tensor."""

    positional: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether all arguments are tensors, given by position."""
        return not self.named and all(value is Tensor for value in self.positional)

    def fill(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        remaining_tensors = iter(tensors)
        args = [next(remaining_tensors) if value is Tensor else value for value in self.positional]
        return args, {name: next(remaining_tensors) if value is Tensor else value for name, value in self.named}

    def caller(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the tensors alone."""

        def call(*tensors: Any) -> Any:
            args, kwargs = self.fill(tensors)
            return forward(*args, **kwargs)

        return call


def arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], own: Callable[..., Any] | None = None
) -> tuple[tuple[Tensor, ...], Form]:
    """The tensors of a call `model(*args, **kwargs)` in order, and its form; the same for either way to name an
    argument. `own` is the forward pass to call where the model has one of its own. ConvoyError where there is no
    tensor, an argument holds tensors, or `forward` does not take these arguments."""
    if not kwargs and all(isinstance(value, Tensor) for value in args) and args:
        return tuple(args), Form((Tensor,) * len(args))
    if kwargs:
        try:
            bound = inspect.signature(own or partial(type(model).forward, model)).bind(*args, **kwargs)
        except TypeError as error:
            raise ConvoyError(f"{type(model).__name__}.forward: {error}") from error
        args, kwargs = bound.args, bound.kwargs
    values = [*args, *kwargs.values()]
    tensors = tuple(value for value in values if isinstance(value, Tensor))
    if not tensors:
        raise ConvoyError("the network is called without a tensor: pass samples along dim 0 of at least one")
    for name, value in [*((f"{place}", value) for place, value in enumerate(args)), *kwargs.items()]:
        try:
            hash(value)
        except TypeError as error:
            raise ConvoyError(
                f"argument {name} of the network is a {type(value).__name__}: pass tensors by themselves, and beside "
                "them only what does not change, as numbers, text, tuples of these or None"
            ) from error
    positional = tuple(Tensor if isinstance(value, Tensor) else value for value in args)
    named = tuple((name, Tensor if isinstance(value, Tensor) else value) for name, value in sorted(kwargs.items()))
    ordered = [*args, *(kwargs[name] for name, _ in named)]
    return tuple(value for value in ordered if isinstance(value, Tensor)), Form(positional, named)


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
    inputs: Sequence[Tensor], state: int, training: bool, groups: Groups, axes: Axes, call: str
) -> tuple[int, ...]:
    """How many samples every rank of the sample `axes` has in this pass. All ranks call it. `state` is a checksum of
    the types and devices of the parameters, of the modules in another mode, and of changes of what `forward` reads;
    `call` is `PASS` or one of `SCHEDULED`. ConvoyError where ranks pass images of different sizes or types, run in
    different modes or calls, or share samples and have different numbers of them."""
    mesh = groups.mesh
    world = groups.of(tuple(mesh.axes))
    shapes = [f"{list(size)} of {dtype}" for size, dtype in kinds(inputs)]
    what = f"{', '.join(shapes)}{' in training' if training else ' in evaluation'}"
    own_row = [_CALLS.index(call), len(inputs[0]), zlib.crc32(f"{what}, {state}".encode())]
    rows = gather_ints(own_row, world)
    _check(call, groups.rank, [row[0] for row in rows])
    samples_at: dict[int, int] = {}
    for rank, (_, number, kind) in enumerate(rows):
        place = mesh.index(mesh.coordinates(rank), axes)
        if kind != own_row[2]:
            raise ConvoyError(
                f"rank {groups.rank} passes samples of {what}, but rank {rank} passes others: all ranks must pass "
                "images of the same size and type, with every module in the same mode and with the same attributes and "
                "hooks, to weights of the same types"
            )
        if samples_at.setdefault(place, number) != number:
            raise ConvoyError(
                f"rank {rank} passes {number} samples, and a rank that works on the same ones {samples_at[place]}: "
                "pass the samples that convoy.local_samples says"
            )
    return tuple(samples_at[place] for place in range(mesh.size(axes)))


def agree(call: str, groups: Groups) -> None:
    """Wait until all ranks have made the same call; ConvoyError where one does something else or has ended."""
    group = groups.of(tuple(groups.mesh.axes))
    if group is None:
        return
    try:
        with _impatient(call, groups.rank):
            rows = gather_ints([_CALLS.index(call), 0, 0], group)
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

    def say() -> None:
        print(
            f"rank {rank} has waited {PATIENCE_S:.0f} s in {call} for the other ranks: all ranks call it together",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
