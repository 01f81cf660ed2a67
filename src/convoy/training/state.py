"""A run's state as a checkpoint, and back: everything by name, so that it fits any number of devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.training.checkpoint import Checkpoint, DamagedCheckpointError
from convoy.training.ema import AveragedModel


@dataclass
class RunState:
    """What changes while a run goes on.

    Attributes:
        averaged: the model with averaged weights (EMA), if there is one.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    averaged: AveragedModel | None = None

    def delivered(self) -> nn.Module:
        """The network that the run is for: with averaged weights, where there are any."""
        return self.model if self.averaged is None else self.averaged.module

    def pack(self, step: int, identity: str, loop: Mapping[str, Any]) -> Checkpoint:
        """The state after `step` updates of a run, with the loop's own values beside it."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.averaged is not None:
            tensors |= {f"ema.{name}": tensor for name, tensor in self.averaged.state_dict().items()}
        scalars: dict[str, dict[str, Any]] = {}
        for name, entry in self._optimizer_entries().items():
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{key}.{name}"] = value
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
        self._check("model.", self.model, checkpoint)
        if self.averaged is not None:
            self._check("ema.", self.averaged, checkpoint)
        state: dict[int, dict[str, Any]] = {}
        for index, (name, parameter) in enumerate(self._named_parameters()):
            entry: dict[str, Any] = {
                key.split(".")[1]: _laid_out_like(parameter, value)
                for key, value in tensors.items()
                if _is_state_of(key, name)
            }
            entry |= values["optimizer"]["scalars"].get(name, {})
            if entry:
                state[index] = entry
        groups = self.optimizer.state_dict()["param_groups"]
        for group, saved in zip(groups, values["optimizer"]["groups"], strict=True):
            group.update(saved)
        self.model.load_state_dict(_below("model.", tensors))
        if self.averaged is not None:
            self.averaged.load_state_dict(_below("ema.", tensors))
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

    @staticmethod
    def _check(prefix: str, model: nn.Module, checkpoint: Checkpoint) -> None:
        want = {name: tensor.shape for name, tensor in model.state_dict().items()}
        have = {name: tensor.shape for name, tensor in _below(prefix, checkpoint.tensors).items()}
        if want != have:
            odd = min(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
            raise DamagedCheckpointError(
                f"checkpoint step-{checkpoint.step:08d} is of another model: {prefix}{odd} does not fit"
            )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _is_state_of(key: str, name: str) -> bool:
    kind, _, rest = key.partition(".")
    return kind == "optimizer" and rest.partition(".")[2] == name


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """The value with the parameter's memory format, where it has its shape."""
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value) if value.shape == parameter.shape else value
