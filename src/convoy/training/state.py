"""A run's state as a checkpoint, and back: everything by name, so that it fits any number of devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.training.checkpoint import Checkpoint, DamagedCheckpointError
from convoy.training.ema import AveragedModel
from convoy.training.parallel import Network

_EMA_MODULE = "module."


@dataclass
class RunState:
    """What changes while a run goes on.

    A checkpoint holds whole tensors under serial names, whatever parts of them this rank has.

    Attributes:
        averaged: the model with averaged weights (EMA), if there is one.
    """

    network: Network
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    averaged: AveragedModel | None = None

    @property
    def model(self) -> nn.Module:
        """The network's, with this rank's part of the weights."""
        return self.network.model

    def delivered(self) -> nn.Module:
        """The network that the run is for: with averaged weights, where there are any."""
        return self.model if self.averaged is None else self.averaged.module

    def whole_weights(self) -> dict[str, Tensor]:
        """Whole parameters and buffers of the delivered network. All ranks call it."""
        return self._whole(self.delivered())

    def pack(self, step: int, identity: str, loop: Mapping[str, Any]) -> Checkpoint:
        """The state after `step` updates of a run, with the loop's own values beside it. All ranks call it."""
        tensors = {f"model.{name}": tensor for name, tensor in self._whole(self.model).items()}
        if self.averaged is not None:
            averages = self._whole(self.averaged, _EMA_MODULE)
            tensors |= {f"ema.{name}": tensor for name, tensor in averages.items()}
        scalars: dict[str, dict[str, Any]] = {}
        parameters = dict(self.model.named_parameters())
        for name, entry in self._optimizer_entries().items():
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    like_weight = value.shape == parameters[name].shape and value.dim() > 0
                    whole = self.network.whole(name, value) if like_weight else value
                    tensors[f"optimizer.{key}.{name}"] = whole
                elif value is not None:
                    scalars.setdefault(name, {})[key] = value
        groups = [
            {key: value for key, value in group.items() if isinstance(value, int | float)}
            for group in self.optimizer.param_groups
        ]
        values = {
            "loop": dict(loop),
            "optimizer": {"scalars": scalars, "groups": groups},
            "scaler": self.scaler.state_dict(),
        }
        return Checkpoint(step, identity, tensors, values)

    def unpack(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Take over a checkpoint's state; nothing is changed if it does not fit.

        Returns:
            The loop's own values, as they were given to `pack`.

        Raises:
            DamagedCheckpointError: the checkpoint is of another model.
        """
        tensors, values = checkpoint.tensors, checkpoint.values
        state_dict = self._parts("model.", self.model, checkpoint)
        averages = None if self.averaged is None else self._parts("ema.", self.averaged, checkpoint, _EMA_MODULE)
        state: dict[int, dict[str, Any]] = {}
        for index, (name, parameter) in enumerate(self._named_parameters()):
            entry: dict[str, Any] = {
                key.split(".")[1]: self._part_like(name, parameter, value)
                for key, value in tensors.items()
                if _is_state_of(key, name)
            }
            entry |= values["optimizer"]["scalars"].get(name, {})
            if entry:
                state[index] = entry
        groups = self.optimizer.state_dict()["param_groups"]
        for group, saved in zip(groups, values["optimizer"]["groups"], strict=True):
            group.update(saved)
        self.model.load_state_dict(state_dict)
        if self.averaged is not None and averages is not None:
            self.averaged.load_state_dict(averages)
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if values["scaler"]:
            self.scaler.load_state_dict(values["scaler"])
        return dict(values["loop"])

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters in the optimiser's order, with the model's names."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [(names[p], p) for group in self.optimizer.param_groups for p in group["params"]]

    def _optimizer_entries(self) -> dict[str, dict[str, Any]]:
        return {name: self.optimizer.state.get(parameter, {}) for name, parameter in self._named_parameters()}

    def _whole(self, model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
        """A module's state as whole tensors; below `prefix` it has the network's names."""
        return {
            name: self.network.whole(name[len(prefix) :], tensor) if name.startswith(prefix) else tensor
            for name, tensor in model.state_dict().items()
        }

    def _parts(self, below: str, model: nn.Module, checkpoint: Checkpoint, prefix: str = "") -> dict[str, Tensor]:
        """This rank's parts of the checkpoint's tensors for a module."""
        want = {name: tensor.shape for name, tensor in model.state_dict().items()}
        have = {
            name: self.network.part(name[len(prefix) :], tensor) if name.startswith(prefix) and name in want else tensor
            for name, tensor in _below(below, checkpoint.tensors).items()
        }
        shapes = {name: tensor.shape for name, tensor in have.items()}
        if want != shapes:
            odd = min(name for name in want.keys() | have.keys() if want.get(name) != shapes.get(name))
            raise DamagedCheckpointError(
                f"checkpoint step-{checkpoint.step:08d} is of another model: {below}{odd} does not fit"
            )
        return have

    def _part_like(self, name: str, parameter: Tensor, value: Tensor) -> Tensor:
        """This rank's part of a parameter's state, with the parameter's memory format; what has no part as it is."""
        if value.dim() == 0:
            return value
        part = self.network.part(name, value)
        if part.shape != parameter.shape:
            return value
        return torch.empty_like(parameter, dtype=value.dtype).copy_(part)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _is_state_of(key: str, name: str) -> bool:
    kind, _, rest = key.partition(".")
    return kind == "optimizer" and rest.partition(".")[2] == name
