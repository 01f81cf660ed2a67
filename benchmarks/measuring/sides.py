"""The sides that are measured beside each other: what each does with a network, as a user would write it.

A side becomes a `Trained`: the network to call, its optimizer, how to run a backward pass, and how to say that a
pass is not the update's last one, so that gradients are exchanged once an update.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from convoy.bench.configuration import missing
from convoy.bench.measure import wrap
from convoy.bench.records import PEERS
from convoy.engine.allocation import keep_freed_memory
from measuring.cases import Case, Plan

__all__ = ["PEERS", "Arrangement", "Side", "Trained", "set_up"]


@dataclass(frozen=True)
class Arrangement:
    """How a device goes through its samples, which is free: the update stays the same but for batch norm."""

    channels_last: bool = True  # memory format
    samples: int | None = None  # of one pass, the gradients of passes being accumulated; None for one pass over all

    def __str__(self) -> str:
        shape = "channels_last" if self.channels_last else "contiguous"
        return f"{shape}, {f'passes of {self.samples}' if self.samples else 'one pass'}"

    def for_batch(self, samples: int) -> "Arrangement":
        """The same on a batch of `samples`."""
        fits = self.samples is None or self.samples < samples
        return self if fits else replace(self, samples=None)

    def passes(self, samples: int) -> list[slice]:
        """Where in a batch of `samples` each pass begins and ends."""
        size = self.samples or samples
        return [slice(start, min(start + size, samples)) for start in range(0, samples, size)]


@dataclass(frozen=True)
class Side:
    """One way to train a case."""

    label: str  # in the table
    kind: str  # `serial`, a key of `PEERS`, or `convoy`
    arrangement: Arrangement = Arrangement()
    plan: Plan | None = None  # of Convoy
    batch_norm: str = "sync"  # of Convoy: `sync` is exact, `local` is what the peers do
    compiled: bool = False  # by torch.compile
    # freed memory stays with the process, as Convoy has it wherever it runs (`engine/allocation.py`)
    keeps: bool = False

    @property
    def how(self) -> str:
        """What was chosen in trials, for the table."""
        return str(self.arrangement)

    @property
    def missing(self) -> str | None:
        """The package that this side needs and that is not installed."""
        return missing(self.kind)


@dataclass(frozen=True)
class Trained:
    """A network ready to be trained."""

    network: Callable[..., Any]
    optimizer: Optimizer
    samples: slice  # the slice of the global batch that this rank computes
    backward: Callable[[Tensor], None] = Tensor.backward  # of a loss
    # the context of all passes but the last
    unfinished: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def set_up(side: Side, case: Case, model: nn.Module, rank: int, num: int) -> Trained:
    """The network of `case` as this side trains it."""
    prepare = {"serial": _serial, "convoy": _convoy}.get(side.kind, _peer)
    assert case.batch % num == 0, f"a batch of {case.batch} on {num} devices"
    own = case.batch // num
    trained = prepare(side, case, model, slice(rank * own, (rank + 1) * own))
    if side.compiled and side.kind != "convoy":  # which compiles what lies between its exchanges
        return replace(trained, network=torch.compile(trained.network))
    return trained


def _optimizer(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.01, momentum=0.9)


def _serial(side: Side, case: Case, model: nn.Module, samples: slice) -> Trained:
    if side.keeps:
        keep_freed_memory(torch.device("cpu"))
    return Trained(model, _optimizer(model), samples)


def _peer(side: Side, case: Case, model: nn.Module, samples: slice) -> Trained:
    num = case.batch // (samples.stop - samples.start)
    wrapped = wrap(side.kind, model, _optimizer(model), num, torch.device("cpu"))
    return Trained(wrapped.network, wrapped.optimizer, samples, wrapped.backward, wrapped.unfinished)


def _convoy(side: Side, case: Case, model: nn.Module, samples: slice) -> Trained:
    import convoy

    channels = next(p for p in model.parameters() if p.dim() == 4).shape[1]
    example = torch.empty(samples.stop - samples.start, channels, case.image_size, case.image_size)
    assert side.plan is not None
    network = convoy.parallelize(
        model,
        side.plan,
        example=example,
        batch_norm=side.batch_norm,  # type: ignore[arg-type]
        compile=side.compiled,
    )
    own = convoy.local_samples(network, case.batch)
    return Trained(network, _optimizer(network), own, unfinished=lambda: convoy.accumulate(network))
