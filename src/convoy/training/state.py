"""A run's state as a checkpoint, and back: everything by name, so that it fits any number of devices."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.checkpoint.files import Checkpoint, DamagedCheckpointError, Kinds, in_file
from convoy.comm.ranks import received
from convoy.recipe.recipe import LookaheadConfig
from convoy.script.state import NamedOptimizer, Parts, Whole
from convoy.training.gradients import Exchange
from convoy.training.optimizer import END, LR_FACTOR


class AveragedWeights:
    """Other weights than those that are trained, by the names of the model's tensors: a run evaluates and delivers
    them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.num_updates = 0
        self.averages = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def update(self, model: nn.Module) -> None:
        """Take the weights of now into account, after each weight update."""
        raise NotImplementedError

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """While entered, the model has the averages for its tensors."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def load(self, averages: Mapping[str, Tensor], num_updates: int) -> None:
        """Go on from averages of before."""
        for name, average in self.averages.items():
            average.copy_(averages[name])
        self.num_updates = num_updates

    def _swap(self, model: nn.Module) -> None:
        for name, tensor in _floating(model).items():
            if name in self.averages:
                tensor.data, self.averages[name] = self.averages[name], tensor.data


class MovingAverage(AveragedWeights):
    """The exponential moving average of a model's parameters; buffers, the running statistics of batch norm among them,
    are those of the trained model.

    average ← d · average + (1 - d) · weights, with d = min(decay, (1 + t) / (10 + t)) after t updates, so that the
    first weights are soon forgotten (the rule of TensorFlow's ExponentialMovingAverage with `num_updates`).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        assert 0 < decay < 1, decay
        super().__init__(dict(model.named_parameters()))
        self.decay = decay

    def update(self, model: nn.Module) -> None:
        averages = list(self.averages.values())
        weights: list[Tensor] = [parameter.detach() for parameter in model.parameters()]
        if self.num_updates == 0:
            torch._foreach_copy_(averages, weights)
        else:
            torch._foreach_lerp_(averages, weights, 1 - effective_decay(self.decay, self.num_updates))
        self.num_updates += 1


class SlowWeights(AveragedWeights):
    """Those of Lookahead (Zhang et al., 2019, algorithm 1), running statistics among them: every few updates they take
    a step towards the trained ones, which then go on from there.

    slow ← slow + α · (fast - slow), fast ← slow, with α = 1 - (1 - step) · (t/T)^power after t of T updates.
    """

    def __init__(self, model: nn.Module, config: LookaheadConfig, total_updates: int) -> None:
        super().__init__(_floating(model))
        self._config, self._total_updates = config, total_updates

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.num_updates += 1
        if self.num_updates % self._config.every:
            return
        share = min(1.0, self.num_updates / self._total_updates)
        remaining = (1 - self._config.step) * share**self._config.power
        slow, fast = list(self.averages.values()), list(_floating(model).values())
        torch._foreach_lerp_(slow, fast, 1 - remaining)
        torch._foreach_copy_(fast, slow)


def _floating(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and those of the persistent buffers that are no counters."""
    saved, named = Parts(model).tensors(), chain(model.named_parameters(), model.named_buffers())
    return {name: tensor for name, tensor in named if name in saved and tensor.is_floating_point()}


def effective_decay(decay: float, num_updates: int) -> float:
    """The decay of an average that has seen `num_updates` weight updates."""
    return min(decay, (1 + num_updates) / (10 + num_updates))


@dataclass
class RunState:
    """What changes while a run goes on.

    A checkpoint holds whole tensors under serial names, whatever parts of them this rank has: `model.NAME`, `ema.NAME`
    and `optimizer.KEY.NAME`. Where a method lets the optimizer's state drift apart (local SGD), that of the second and
    later sample ranks is `optimizer-1.…`, the weights are their mean, and what each rank has beside is `rank-0.…`.
    """

    exchange: Exchange
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    averaged: AveragedWeights | None = None  # of the weights (EMA), if there are any

    @property
    def model(self) -> nn.Module:
        """The network's, with this rank's part of the weights."""
        return self.exchange.network.model

    @contextmanager
    def delivered(self) -> Iterator[nn.Module]:
        """The network that the run is for: with averaged weights, where there are any, and the same on all ranks."""
        averaged = self.averaged.in_place(self.model) if self.averaged is not None else contextlib.nullcontext()
        with self.exchange.agreed(), averaged:
            yield self.model

    def whole_weights(self) -> tuple[Kinds, Iterator[Tensor]]:
        """Parameters and buffers of the delivered network: types and shapes by name, and the tensors, whole and on the
        CPU, as they follow each other in a file. All ranks call it, and go through the tensors.
        """
        parts = Parts(self.model)
        kinds = {name: (tensor.dtype, parts.shape(name, tensor)) for name, tensor in parts.tensors().items()}

        def wholes() -> Iterator[Tensor]:
            with self.delivered() as model:
                tensors = Parts(model).tensors()
                for name in in_file(kinds):
                    yield self.exchange.network.whole(name, tensors[name]).cpu()

        return kinds, wholes()

    def _sections(self) -> dict[str, Mapping[str, Tensor]]:
        """This rank's parts of all but the optimizer's state."""
        sections: dict[str, Mapping[str, Tensor]] = {"model": Parts(self.model).tensors()}
        return sections if self.averaged is None else sections | {"ema": self.averaged.averages}

    def contents(self, loop: Mapping[str, Any]) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
        """The state, with the loop's own values beside it: the tensors, whole, by name and one after the other, some of
        them the live ones; and all else. All ranks call it, and go through the tensors.
        """
        state = NamedOptimizer(self.model, self.optimizer).state()
        scalars = {
            name: numbers
            for name, entry in state["state"].items()
            if (numbers := {k: v for k, v in entry.items() if not isinstance(v, Tensor | Whole) and v is not None})
        }
        groups = [
            {
                key: value
                for key, value in group.items()
                if isinstance(value, int | float) and key not in ("fused", LR_FACTOR, END)
            }
            for group in state["param_groups"]
        ]

        approximate, of_ranks = self.exchange.saved()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            with self.exchange.agreed():
                for kind, section in self._sections().items():
                    for name, tensor in section.items():
                        yield f"{kind}.{name}", self.exchange.network.whole(name, tensor)
            yield from of_ranks
            for name, entry in state["state"].items():
                for key, value in entry.items():
                    if isinstance(value, Tensor):
                        yield f"{_optimizer(0)}.{key}.{name}", value
                    elif isinstance(value, Whole):
                        for i, version in enumerate(self.exchange.versions(value.make())):
                            yield f"{_optimizer(i)}.{key}.{name}", version

        return tensors(), {
            "loop": dict(loop),
            "optimizer": {"scalars": scalars, "groups": groups},
            "scaler": self.scaler.state_dict(),
            "ema": None if self.averaged is None else self.averaged.num_updates,
            **({"approximate": approximate} if approximate else {}),
        }

    def unpack(self, checkpoint: Checkpoint, tell: Callable[[str], None] = lambda sentence: None) -> dict[str, Any]:
        """Take over a checkpoint's state, and give the loop's own values, as `contents` took them; `tell` takes a
        sentence on what cannot be taken over. A
        DamagedCheckpointError, with nothing changed, where the checkpoint is of another model.
        """
        values, saved, parts = checkpoint.values, _sections(checkpoint), Parts(self.model)
        for kind, tensors in self._sections().items():
            shapes = {name: parts.shape(name, tensor) for name, tensor in tensors.items()}
            saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved[kind].items()}
            if misfits := [n for n in shapes.keys() | saved_shapes.keys() if shapes.get(n) != saved_shapes.get(n)]:
                raise DamagedCheckpointError(
                    f"checkpoint step-{checkpoint.step:08d} is of another model: {kind}.{min(misfits)} does not fit"
                )
        named = NamedOptimizer(self.model, self.optimizer)
        scalars = values["optimizer"]["scalars"]
        entries: dict[str, dict[str, Any]] = {name: dict(scalars.get(name, {})) for name in named.parameters}
        kinds = sorted(kind for kind in saved if kind.startswith("optimizer"))
        for kind in kinds:
            for place, tensor in saved[kind].items():
                key, _, name = place.partition(".")
                # Where ranks take different ones, all of them ask for all.
                value = received(tensor) if len(kinds) > 1 else tensor
                if kind in (_optimizer(0), _optimizer(self.exchange.version)) and name in entries:  # else frozen since
                    entries[name][key] = value
        named.load(entries, values["optimizer"]["groups"])
        parts.load(saved["model"])
        if self.averaged is not None:
            averages = {name: parts.part(name, received(average)) for name, average in saved["ema"].items()}
            self.averaged.load(averages, values["ema"])
        of_ranks = {kind: tensors for kind, tensors in saved.items() if kind.startswith("rank-")}
        note = self.exchange.load(values.get("approximate", {}), of_ranks)
        if note is not None:
            tell(note)
        if values["scaler"]:
            self.scaler.load_state_dict(values["scaler"])
        return dict(values["loop"])


def delivered_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Parameters and buffers of the network that a run would have delivered then, as `RunState.delivered` has them."""
    sections = _sections(checkpoint)
    return sections["model"] | sections["ema"]


def _sections(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """The tensors by the first part of their names, which says what they are of."""
    sections: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for place, tensor in checkpoint.tensors.items():
        kind, _, name = place.partition(".")
        sections[kind][name] = tensor
    return sections


def _optimizer(version: int) -> str:
    return f"optimizer-{version}" if version else "optimizer"
