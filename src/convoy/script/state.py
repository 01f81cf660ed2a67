"""The state of a network and of its optimizer by the names of the plain network: whole, whatever parts the ranks hold.

What one plan gives, every other takes, on any number of devices, and so does the plain network.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.comm.ranks import received
from convoy.engine.agreement import agree
from convoy.engine.gradients.divided import ELEMENTWISE, PART
from convoy.engine.network import Network, network_of
from convoy.errors import ConvoyError
from convoy.script.ranks import check_same_on_all_ranks, fail_on_all_ranks

_NOT_SAVED = ("params", PART)
# What an optimizer keeps for every parameter: {name: {key: tensor or number}}.
Entries = Mapping[str, Mapping[str, Any]]


def state_dict(net: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a network, whole and under the names of the plain one. All ranks call it.

    They are the same on every plan and every rank, and load into the plain network as they are.

    >>> plain.load_state_dict(convoy.state_dict(net))
    <All keys matched successfully>

    Args:
        net: what `convoy.parallelize` returned.
    """
    network = network_of(net)
    agree("convoy.state_dict", network.groups)
    parts = Parts(network.model)
    return {name: parts.whole(name, tensor) for name, tensor in parts.tensors().items()}


def load_state_dict(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `state_dict`, or the plain network's own method of that name, has given. All ranks call it.

    >>> convoy.load_state_dict(net, plain.state_dict())

    Args:
        net: what `convoy.parallelize` returned.
        state: whole tensors, the same on every rank.

    Raises:
        ConvoyError: names or shapes differ; nothing is loaded then.
    """
    network = network_of(net)
    agree("convoy.load_state_dict", network.groups)
    parts = Parts(network.model)
    with fail_on_all_ranks(network):
        parts.check(state)
    parts.load(state)


def optimizer_state_dict(net: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer by the names of the plain network, the same on every plan and every rank.

    All ranks call it. For checkpoints of your own; `convoy.save` does all of this:

    >>> state = {"net": convoy.state_dict(net), "optimizer": convoy.optimizer_state_dict(net, optimizer)}
    >>> if convoy.rank() == 0:
    ...     torch.save(state, "mine.pt")

    Args:
        net: what `convoy.parallelize` returned.
        optimizer: of its parameters, or of some of them.

    Returns:
        As `torch.optim.Optimizer.state_dict`, with names in the place of numbers for the parameters. A value that has
        one number for each of the parameter's is whole; others are as the optimizer keeps them.

    Raises:
        ConvoyError: a parameter is not the network's, or the optimizer keeps something of a divided parameter that
            cannot be put together from the ranks' parts.
    """
    network = network_of(net)
    agree("convoy.optimizer_state_dict", network.groups)
    with fail_on_all_ranks(network):
        state = NamedOptimizer(network.model, optimizer).state()
    check_same_on_all_ranks(network, {f"optimizer/{name}": " ".join(entry) for name, entry in state["state"].items()})
    for entry in state["state"].values():
        entry |= {key: value.make() for key, value in entry.items() if isinstance(value, Whole)}
    return state


def load_optimizer_state_dict(net: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `optimizer_state_dict` has given, under whatever plan. All ranks call it.

    Options of the groups, learning rates among them, become those of the state, as in torch.

    >>> state = convoy.optimizer_state_dict(net, optimizer)
    >>> convoy.load_optimizer_state_dict(net, optimizer, state)

    Args:
        net: what `convoy.parallelize` returned.
        optimizer: with the same groups of the same parameters as then.
        state: the same on every rank.

    Raises:
        ConvoyError: groups, names, shapes or the kind of optimizer differ; nothing is loaded then.
    """
    network = network_of(net)
    agree("convoy.load_optimizer_state_dict", network.groups)
    with fail_on_all_ranks(network):
        adapter = NamedOptimizer(network.model, optimizer)
        adapter.check(state)
    adapter.load(state["state"], state["param_groups"])


@dataclass(frozen=True)
class Whole:
    """A tensor of which ranks hold parts."""

    make: Callable[[], Tensor]  # gives the whole; all ranks call it
    shape: tuple[int, ...]  # of the whole


class Parts:
    """The tensors of a module, of which this rank may hold parts: a parallelized network, a copy of one, or a module
    that has such within it, like `torch.optim.swa_utils.AveragedModel`; a plain module is whole on every rank."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        parts = ((name, getattr(part, "_convoy", None)) for name, part in module.named_modules())
        # the parallelized networks, by their places in the module
        self.networks: dict[str, Network] = {name: part for name, part in parts if isinstance(part, Network)}

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers, in the order and under the names of `state_dict`. Raises
        ConvoyError where a layer has extra state, which is no tensor."""
        methods = [self._module.named_parameters, self._module.named_buffers]
        names = {name for method in methods for name, _ in method(remove_duplicate=False)}
        state = self._module.state_dict()
        extra = next((name for name in state if name.rpartition(".")[2] == "_extra_state"), None)
        if extra is not None:
            raise ConvoyError(f"{extra} is no tensor: keep what get_extra_state gives beside the network's state")
        return {name: tensor for name, tensor in state.items() if name in names}

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a tensor that is divided as the one of this name. All ranks call it."""
        network, own_name = self._of(name)
        return tensor.detach().clone() if network is None else network.whole(own_name, tensor)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a whole; it may share the whole's memory."""
        network, own_name = self._of(name)
        return tensor if network is None else network.part(own_name, tensor)

    def shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        network, own_name = self._of(name)
        return tuple(tensor.shape) if network is None else network.entry(own_name)[0]

    def divided(self, name: str) -> bool:
        network, own_name = self._of(name)
        if network is None:
            return False
        return any(network.groups.mesh.sizes[axis] > 1 for axis in network.entry(own_name)[1].split_axes)

    def check(self, state: Mapping[str, Tensor]) -> None:
        """See that whole tensors fit; a ConvoyError says where names or shapes differ."""
        tensors = self.tensors()
        strays = sorted(set(tensors) ^ set(state))
        if strays:
            where = "the network" if strays[0] in tensors else "the state"
            raise ConvoyError(f"{strays[0]} is only in {where}: load a state of the same network")
        for name, tensor in state.items():
            shape = self.shape(name, tensors[name])
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
                actual = list(tensor.shape) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
                raise ConvoyError(f"{name} is {actual} in the state, but {list(shape)} in the network")

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        tensors = self.tensors()
        for name, tensor in state.items():
            tensors[name].copy_(self.part(name, received(tensor)))

    def _of(self, name: str) -> tuple[Network | None, str]:
        prefixes = [prefix for prefix in self.networks if not prefix or name.startswith(f"{prefix}.")]
        if not prefixes:
            return None, name
        prefix = max(prefixes, key=len)
        return self.networks[prefix], name[len(prefix) + 1 :] if prefix else name


class NamedOptimizer:
    """An optimizer whose parameters, some or all of a module's, go by the names that they have there. `what` names the
    module in the ConvoyError for a parameter that is not the module's."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, what: str = "the network") -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.optimizer = optimizer
        self.parameters: dict[str, Tensor] = {}
        self.names: list[list[str]] = []
        for number, group in enumerate(optimizer.param_groups):
            strange = next((parameter for parameter in group["params"] if parameter not in names), None)
            if strange is not None:
                raise ConvoyError(
                    f"group {number} of {type(optimizer).__name__} holds a parameter of shape {list(strange.shape)} "
                    f"that is none of {what}: give the optimizer that was made with parameters of {what}, after "
                    "convoy.parallelize"
                )
            self.names.append([names[parameter] for parameter in group["params"]])
            self.parameters |= zip(self.names[-1], group["params"], strict=True)
        self._parts = Parts(module)

    def state(self) -> dict[str, Any]:
        """The result of `optimizer_state_dict`, with divided tensors still to be made whole. Raises ConvoyError where a
        value of a divided parameter has another shape than the parameter."""
        entries = self.optimizer.state_dict()["state"]
        return {
            "state": {
                name: {key: self._whole(name, key, value) for key, value in entries[number].items()}
                for number, name in enumerate(itertools.chain.from_iterable(self.names))
                if entries.get(number)
            },
            "param_groups": [
                {key: _copied(value) for key, value in group.items() if key not in _NOT_SAVED} | {"params": list(names)}
                for group, names in zip(self.optimizer.param_groups, self.names, strict=True)
            ],
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """See that a whole state fits; a ConvoyError says what does not."""
        saved, entries = _sections(state)
        if len(saved) != len(self.names):
            raise ConvoyError(
                f"the state has {len(saved)} parameter groups and the optimizer {len(self.names)}: make it with the "
                "groups that it had when it was saved"
            )
        for number, (group, names) in enumerate(zip(saved, self.names, strict=True)):
            stray = sorted(set(group["params"]) ^ set(names))
            if stray:
                where = "the optimizer's" if stray[0] in names else "the state's"
                raise ConvoyError(
                    f"{stray[0]} is only in {where} group {number}: make the optimizer with the parameters that it had "
                    "when it was saved"
                )
            self._check_kind(set(group) - set(_NOT_SAVED), number)
        for name, entry in entries.items():
            if name not in self.parameters:
                raise ConvoyError(f"the state is of {name}, which is in none of its groups: it is not whole")
            for key, value in entry.items():
                self._check_value(name, key, value)

    def load(self, entries: Entries, groups: Iterable[Mapping[str, Any]]) -> None:
        """Take this rank's parts of whole values, and the groups' options; a value that is missing stays."""
        numbers = itertools.count()
        state: dict[int, dict[str, Any]] = {}
        merged: list[dict[str, Any]] = []
        for names, group, saved in zip(self.names, self.optimizer.param_groups, groups, strict=True):
            indices = [next(numbers) for _ in names]
            options = {key: _copied(value) for key, value in saved.items() if key not in _NOT_SAVED}
            merged.append({**group, **options, "params": indices})
            for index, name in zip(indices, names, strict=True):
                if entries.get(name):
                    state[index] = {key: self._part(name, value) for key, value in entries[name].items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": merged})

    def _whole(self, name: str, key: str, value: Any) -> Any:
        parameter = self.parameters[name]
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
            shape = self._parts.shape(name, parameter)  # it is divided as the parameter is
            return Whole(partial(self._parts.whole, name, value), shape)
        if self._parts.divided(name) and not _is_number(value):
            raise ConvoyError(
                f"{type(self.optimizer).__name__} keeps {key} of another shape than {name}, which the plan divides "
                "over ranks, so that it cannot be put together: take an optimizer that treats every number by itself, "
                "or a plan that divides samples alone"
            )
        return _copied(value)

    def _part(self, name: str, value: Any) -> Any:
        """This rank's part of a value like a parameter, in its memory format; any other value as it is."""
        parameter, value = self.parameters[name], received(value)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != self._parts.shape(name, parameter):
            return _copied(value)
        return torch.empty_like(parameter, dtype=value.dtype).copy_(self._parts.part(name, value))

    def _check_kind(self, saved: set[str], number: int) -> None:
        """Options come and go with versions of torch; where both sides have their own, the optimizer is another."""
        options = set(self.optimizer.defaults)
        lost, new = sorted(options - saved), sorted(saved - set(self.optimizer.param_groups[number]) - {"initial_lr"})
        if lost and new:
            raise ConvoyError(
                f"the state's group {number} has {new[0]} and no {lost[0]}, so it is not of "
                f"{type(self.optimizer).__name__}: load it into the kind of optimizer that it was saved from"
            )

    def _check_value(self, name: str, key: str, value: Any) -> None:
        shape = self._parts.shape(name, self.parameters[name])
        if _is_number(value) or (isinstance(value, Tensor) and tuple(value.shape) == shape):
            return
        elementwise = type(self.optimizer) in ELEMENTWISE
        if elementwise or self._parts.divided(name):
            actual = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            mend = (
                "load a state of the same network" if elementwise else "load it under a plan that divides samples alone"
            )
            raise ConvoyError(f"{key} of {name} is {actual} in the state, but {name} is {list(shape)}: load {mend}")


def _is_number(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, Tensor) and value.numel() == 1)
    )


def _copied(value: Any) -> Any:
    return received(value).detach().clone() if isinstance(value, Tensor) else value


def _sections(state: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], Entries]:
    try:
        groups, entries = list(state["param_groups"]), state["state"]
        names = [name for group in groups for name in group["params"]]
    except (KeyError, TypeError) as error:
        raise ConvoyError("this is no state of an optimizer: give what convoy.optimizer_state_dict returned") from error
    if not all(isinstance(name, str) for name in [*names, *entries]):
        raise ConvoyError(
            "this state numbers its parameters, as optimizer.state_dict() does, and may be of one rank's parts: give "
            "what convoy.optimizer_state_dict returned"
        )
    return groups, entries
