"""Notices, in a training loop of one's own, what would make ranks compute something else than one device, in silence.

- Weights, buffers and learning rates that ranks have alike are compared by checksum, and so are the samples of ranks
  that work on the same ones.
- The gradient that reaches a parameter must be the one that the network's own program gives it: a use of the parameter
  outside of the network (a penalty on the weights) would be added over the ranks.
- An optimizer that looks at whole tensors is refused on divided ones, and gradients of these answer for all parts.

The comparisons are made in the passes after updates 1, 2, 4, 8, … until they are so far apart that they take at most
`SHARE` of the time (docs/benchmarks/checks.md): each is a sum over the bits of the weights, and one small message.
"""

import math
import struct
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from convoy.comm.collectives import all_gather, broadcast, gather_ints
from convoy.engine.gradients.divided import DividedGradient, DividedGradients, check_optimizer, plain
from convoy.engine.gradients.reducer import at_end_of_backward, current_backward, flat, is_dense
from convoy.engine.network import WRAPPED, Network
from convoy.engine.shards import named_tensors, part_name
from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes

_NONE = -1  # the number of no backward pass
SHARE = 0.002  # of the time, that comparisons take at most
_AT_ONCE = 2**63 - 1  # a place in the order of autograd before all that is computed
_PIECE = 2**20  # numbers that are summed at once
_PATTERN = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guard:
    """Watches over one network, whose parameters are placed; all ranks make it. Ranks are compared and uses of
    parameters followed if it `compares`, and `follows` says whether it does in this pass; gradients and optimizers
    always are."""

    def __init__(self, network: Network, compares: bool) -> None:
        self._network = network
        self._compares = compares
        self._passes = 0
        self._next, self._gap = 1, 1
        self._looked_at, self._cost_s = time.perf_counter(), 0.0
        self._warned = False
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._updates = 0
        self.follows = False
        self._between_updates, self._to_follow = True, False
        self._uses: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []
        self._backward, self._is_done = _NONE, False  # the backward pass that was followed last, and whether one was
        self._inner = False  # backward passes run within another one
        layouts, axes = network.layouts, network.groups.mesh.axes
        wide = {axis for axis in axes if network.groups.mesh.sizes[axis] > 1}
        parameters = dict(network.model.named_parameters())
        self._divided = {p: name for name, p in parameters.items() if layouts[name].split_axes & wide}
        self._gradients = DividedGradients(
            [
                (p, tuple(sorted(layouts[name].split_axes)), math.prod(network.shapes[name][0]))
                for p, name in self._divided.items()
            ],
            network.groups,
        )
        if compares and network.shows_uses:
            self._follow()  # from before the first pass: a loss may be of layers that are called by themselves
        _guards.add(self)
        _watch_optimizers()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a network is not trained."""
        return

    def look(self, inputs: Sequence[Tensor]) -> None:
        """Before a pass, for all ranks together; ConvoyError where ranks differ and should be the same."""
        if not (self._network.model.training and torch.is_grad_enabled()):
            return
        self._passes += 1
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise ConvoyError(WRAPPED)
        if self._between_updates or self._is_done:  # of an update's passes those before the first backward pass
            self.unfollow()
        if self._compares and self._passes >= self._next:
            if inputs[0].is_cuda:
                torch.cuda.synchronize(inputs[0].device)  # what is queued still is no cost of the comparison
            began = time.perf_counter()
            gap = self._compare(inputs, began)
            self._gap = max(self._gap, min(2 * self._gap, gap))
            self._next = self._passes + self._gap
            self._to_follow = self._network.shows_uses
            self._looked_at = time.perf_counter()
            self._cost_s = self._looked_at - began
        if self._to_follow and self._between_updates:
            self._follow()
        self._between_updates = False

    def mark_gradients(self) -> None:
        self._gradients.mark()

    # What ranks should have alike.

    @torch.no_grad()
    def _compare(self, inputs: Sequence[Tensor], now: float) -> int:
        """Compare; how many passes may follow until the next time."""
        groups = self._network.groups
        replicas = [*(("", x, self._network.sample_axes) for x in inputs), *self._replicas()]
        pass_s = (now - self._looked_at) / self._gap
        gap = min(2**30, math.ceil(self._cost_s / (SHARE * max(pass_s, 1e-6))))
        sums = torch.stack([_checksum(tensor) for _, tensor, _ in replicas]).tolist()
        rows = gather_ints([*sums, self._updates, *_hyperparameters(self._optimizers), gap], groups.world)
        *columns, updates, rates, rate, gaps = zip(*rows, strict=True)
        for rank in range(len(rows)):
            if updates[rank] != updates[0]:
                raise ConvoyError(
                    f"rank 0 has made {updates[0]} updates since it made its network parallel, and rank {rank} "
                    f"{updates[rank]}: let all ranks call optimizer.step() after the same passes"
                )
            if rates[rank] != rates[0]:
                raise ConvoyError(
                    f"the optimizers of ranks 0 and {rank} have different options (learning rate {_double(rate[0]):g} "
                    f"and {_double(rate[rank]):g}): let all ranks make the same optimizer, and step its scheduler alike"
                )
        for (name, tensor, axes), values in zip(replicas, columns, strict=True):
            self._check(name, tensor, axes, values)
        self._warn_of_same_samples(inputs, columns)
        return int(max(gaps))

    def _replicas(self) -> Iterator[tuple[str, Tensor, Axes]]:
        """What ranks have alike, by name, and the axes that divide it: those with one place on them hold the same."""
        network = self._network
        parameters = dict(network.model.named_parameters())
        for name, tensor in named_tensors(network.model).items():
            is_local = network.context.batch_norm == "local" and name not in parameters
            if not is_local and 0 not in network.shapes[name][0]:
                yield name, tensor.detach(), tuple(sorted(network.layouts[name].split_axes))

    def _check(self, name: str, tensor: Tensor, axes: Axes, values: Sequence[int]) -> None:
        """Refuse replicas with other checksums on some rank than on the first; without a name they are samples."""
        places = self._places(axes)
        first = [places.index(place) for place in places]
        if all(value == values[rank] for value, rank in zip(values, first, strict=True)):
            return
        size, worst = self._size(tensor, axes)
        if size == 0:
            return
        if not name:
            raise ConvoyError(
                f"ranks {first[worst]} and {worst} work on the same samples under this plan, and were given different "
                "ones: shuffle with the same seed and pass images[convoy.local_samples(net, n)], or use "
                "convoy.BatchSampler"
            )
        kind = "weight" if name in dict(self._network.model.named_parameters()) else "buffer"
        raise ConvoyError(
            f"the {kind} {name} should be the same on ranks {first[worst]} and {worst}, and differs by {size:.1e} of "
            "its largest number: something that only one of them does has changed it, as a gradient or weight changed "
            "by hand, an update left out, random numbers of its own, or a state loaded on one rank; let all ranks do "
            "the same, or pass checks=False to convoy.parallelize if that is meant"
        )

    def _places(self, axes: Axes) -> list[int]:
        mesh = self._network.groups.mesh
        return [mesh.index(mesh.coordinates(rank), axes) for rank in range(mesh.num_devices)]

    def _size(self, tensor: Tensor, axes: Axes) -> tuple[float, int]:
        """By how much of its largest number a tensor differs from the first replica, at most, and on which rank; 0 for
        what is rounding: on devices of unlike make the last bits of replicas may differ."""
        groups = self._network.groups
        group = groups.of(tuple(axis for axis in groups.mesh.axes if axis not in axes))
        first = broadcast(tensor.clone(memory_format=torch.contiguous_format), group).double()
        off = torch.zeros((), dtype=torch.float64, device=tensor.device)
        if tensor.numel():  # a rank of another stage has nothing of it
            off = (tensor.double() - first).abs().max() / first.abs().max().clamp(min=1e-300)
        sizes = all_gather(off.nan_to_num(math.inf).reshape(1), groups.world)[:, 0].tolist()
        worst = max(range(len(sizes)), key=sizes.__getitem__)
        allowed = min(100 * torch.finfo(tensor.dtype).eps, 1e-2) if tensor.is_floating_point() else 0.0
        return (sizes[worst] if sizes[worst] > allowed else 0.0), worst

    def _warn_of_same_samples(self, inputs: Sequence[Tensor], sums: Sequence[Sequence[int]]) -> None:
        """`sums` are of each input on every rank."""
        num = self._network.num_sample_ranks
        same = [place for place, _ in enumerate(inputs) if len(set(sums[place])) == 1]
        # whose rows are not all alike, so that it matters which of them a sample has
        constants = [
            place for place in same if inputs[place].is_floating_point() and (x := inputs[place]).ne(x[:1]).any()
        ]
        if num == 1 or self._warned or not (constants or len(same) == len(inputs)):
            return
        self._warned = True
        sentence = (
            f"all {num} sample ranks were given the same samples: each is to have its own part of "
            "the global batch, images[convoy.local_samples(net, n)], or convoy.BatchSampler"
        )
        if len(same) < len(inputs):
            sentence = (
                f"tensor {constants[0] + 1} of the network's inputs is the same on all {num} sample ranks, and taken "
                "for samples, as it has as many rows: let what is constant be a buffer of the network"
            )
        if self._network.groups.rank == 0:  # all of them know
            warnings.warn(sentence, stacklevel=2)

    # Uses of parameters outside of the network.

    def use(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor for a use that the ranks know of, whose gradient `_check_use` will miss nothing of."""
        may_follow = self.follows or self._between_updates  # a penalty may come before the pass that begins it
        if not (may_follow and tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        alias = tensor.view_as(tensor)
        assert alias.grad_fn is not None
        # autograd runs what was computed first last: it would keep all gradients until the backward pass ends
        alias.grad_fn._set_sequence_nr(_AT_ONCE)  # type: ignore[attr-defined]
        alias.register_hook(lambda gradient: self._note(name, gradient))
        return alias

    @contextmanager
    def inner_backward(self) -> Iterator[None]:
        """Entered in a backward pass that runs others: uses are followed until it ends itself, and its own are kept."""
        self._enter_backward()
        self._is_done = True
        outer, uses, self._inner = self._backward, self._uses, True
        try:
            yield
        finally:
            self._backward, self._uses, self._inner = outer, uses, False

    def unfollow(self) -> None:
        for _, handle in self._handles:
            handle.remove()
        self._handles, self._uses, self.follows, self._is_done = [], {}, False, False

    @torch.inference_mode(False)  # which enables gradients, too
    def _follow(self) -> None:
        for name, parameter in self._network.model.named_parameters():
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node  # to be kept, as the parameter does not keep it
                self._handles.append((node, node.register_prehook(self._arrives(name))))
        self.follows = bool(self._handles)
        self._to_follow = False

    def _note(self, name: str, gradient: Tensor) -> None:
        if self.follows:
            self._enter_backward()
            self._uses.setdefault(name, []).append(gradient)

    def _arrives(self, name: str) -> Callable[[Sequence[Tensor]], None]:
        def hook(gradients: Sequence[Tensor]) -> None:
            self._enter_backward()
            self._is_done = True
            self._check_use(name, gradients[0])

        return hook

    def _enter_backward(self) -> None:
        """Forget what an earlier backward pass has left, which broke off, and look at what this one leaves."""
        backward = current_backward()
        if backward != self._backward:
            self._backward, self._uses = backward, {}
            if backward != _NONE and not self._inner:
                at_end_of_backward(self._check_rest)

    def _check_rest(self) -> None:
        """Refuse uses of parameters whose gradients have come from there, and have not been added to any `.grad`."""
        if self._uses:
            name = next(iter(self._uses))
            self.unfollow()
            raise ConvoyError(
                f"torch.autograd.grad of the weight {name} would give this rank's part of its gradient, which nobody "
                "adds up: call backward(), and take convoy.gradients(net), or pass checks=False to convoy.parallelize "
                "if that is meant"
            )

    @torch.no_grad()
    def _check_use(self, name: str, gradient: Tensor) -> None:
        gradients = self._uses.pop(name, [])  # no longer held: it becomes `.grad` without a copy
        if len(gradients) == 1 and gradients[0].data_ptr() == gradient.data_ptr():
            return
        if gradients and not gradient.numel():  # of a weight of another stage
            return
        if gradients:
            total = sum(gradients[1:], gradients[0].clone())
            scale = sum(x.abs().max() for x in gradients)
            off = (gradient - total).abs().max()
            if not bool(off > 2 * len(gradients) * torch.finfo(gradient.dtype).eps * scale):
                return
        self.unfollow()
        raise ConvoyError(
            f"the loss uses the weight {name} outside of the network, which would be added over the ranks: compute a "
            "penalty on weights by convoy.penalty(net, function), or in the network's forward pass, or use the "
            "optimizer's weight decay; and call the network itself, not layers of it"
        )

    # Optimizers.

    def before_step(self, optimizer: Optimizer) -> None:
        if self._has_parameters_of(optimizer):
            reducer = self._network.reducer
            if reducer is not None and reducer.has_own():
                raise ConvoyError(
                    "optimizer.step() comes after passes in convoy.accumulate, whose gradients no rank has of the "
                    "others: run the last pass before each update outside of it, also where an epoch ends"
                )
            self.unfollow()
            self._between_updates = True
            self._updates += 1
            self._gradients.clear()

    def after_step(self, optimizer: Optimizer) -> None:
        if self._optimizers.get(optimizer, 0) <= 0:
            return
        for parameter in self._divided:  # a closure's backward pass has marked gradients that it then kept
            state = optimizer.state.get(parameter, {})
            state.update({key: plain(value) for key, value in state.items() if isinstance(value, DividedGradient)})
        self._gradients.mark()

    def _has_parameters_of(self, optimizer: Optimizer) -> bool:
        """Whether it has; it is looked at when it is new, has more groups, or has been given another state."""
        entry = self._optimizers.get(optimizer)
        if entry is None or abs(entry) != len(optimizer.param_groups):
            identities = {id(parameter) for parameter in self._network.model.parameters()}
            has_some = any(id(p) in identities for group in optimizer.param_groups for p in group["params"])
            if has_some and self._divided:
                network = self._network
                shapes = {name: shape for name, (shape, _) in network.shapes.items()}
                part = part_name(network.layouts, network.shapes, network.groups, network.plan)
                check_optimizer(optimizer, self._divided, shapes, part)
                if entry is None or entry < 0:
                    optimizer.register_load_state_dict_post_hook(self._forget)
            entry = self._optimizers[optimizer] = len(optimizer.param_groups) * (1 if has_some else -1)
        return entry > 0

    def _forget(self, optimizer: Optimizer) -> None:
        self._optimizers[optimizer] = 0  # to be looked at before its next step


_guards: "weakref.WeakSet[Guard]" = weakref.WeakSet()
_watching = False


def _watch_optimizers() -> None:
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(lambda optimizer, *_: _all(Guard.before_step, optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: _all(Guard.after_step, optimizer))


def _all(function: Callable[[Guard, Optimizer], None], optimizer: Optimizer) -> None:
    for guard in list(_guards):
        function(guard, optimizer)


def _checksum(tensor: Tensor) -> Tensor:
    """A sum over the bits, which no order of additions changes: int64, a scalar."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    elements = flat(tensor) if is_dense(tensor) else tensor.flatten()
    bits = elements.view(_PATTERN[tensor.element_size()]) if tensor.is_floating_point() else elements
    if bits.device.type != "cpu" or len(bits) <= _PIECE:
        return bits.sum(dtype=torch.int64)
    # torch sums an int64 copy: of a piece it stays in the caches, and of a large weight it would be twice its size
    return torch.stack([piece.sum(dtype=torch.int64) for piece in bits.split(_PIECE)]).sum()


def _hyperparameters(optimizers: Mapping[Optimizer, int]) -> tuple[int, int]:
    """A checksum of the options of all optimizers, and the bits of the first learning rate."""
    groups = [group for optimizer, number in optimizers.items() if number > 0 for group in optimizer.param_groups]
    options = [
        sorted((key, float(value)) for key, value in group.items() if isinstance(value, int | float))
        for group in groups
    ]
    rates = [float(group["lr"]) for group in groups if "lr" in group]
    return zlib.crc32(repr([options, rates]).encode()), struct.unpack("q", struct.pack("d", (rates or [0.0])[0]))[0]


def _double(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])
