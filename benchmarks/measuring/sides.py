"""The sides that are measured beside each other: what each does with a network, as a user would write it.

A side becomes a `Trained`: the network to call, its optimiser, how to run a backward pass, and how to say that a
pass is not the update's last one, so that gradients are exchanged once an update.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from convoy.engine.allocation import keep_freed_memory
from measuring.cases import Case, Plan

NEEDS = {"fabric": "lightning", "accelerate": "accelerate"}
PEERS = {"ddp": "DistributedDataParallel", "fabric": "Lightning Fabric", "accelerate": "accelerate"}


@dataclass(frozen=True)
class Arrangement:
    """How a device goes through its samples, which is free: the update stays the same but for batch norm.

    Attributes:
        channels_last: memory format.
        samples: of one pass, the gradients of passes being accumulated; None for one pass over all.
    """

    channels_last: bool = True
    samples: int | None = None

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
    """One way to train a case.

    Attributes:
        label: in the table.
        kind: `serial`, a key of `PEERS`, or `convoy`.
        plan: of Convoy.
        batch_norm: of Convoy: `sync` is exact, `local` is what the peers do.
        compiled: by torch.compile.
        keeps: freed memory stays with the process, as Convoy has it wherever it runs (`engine/allocation.py`).
    """

    label: str
    kind: str
    arrangement: Arrangement = Arrangement()
    plan: Plan | None = None
    batch_norm: str = "sync"
    compiled: bool = False
    keeps: bool = False

    @property
    def missing(self) -> str | None:
        """The package that this side needs and that is not installed."""
        package = NEEDS.get(self.kind)
        return package if package and importlib.util.find_spec(package) is None else None


@dataclass(frozen=True)
class Trained:
    """A network ready to be trained.

    Attributes:
        samples: the slice of the global batch that this rank computes.
        backward: of a loss.
        unfinished: the context of all passes but the last.
    """

    network: Callable[..., Any]
    optimizer: Optimizer
    samples: slice
    backward: Callable[[Tensor], None] = Tensor.backward
    unfinished: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def set_up(side: Side, case: Case, model: nn.Module, rank: int, num: int) -> Trained:
    """The network of `case` as this side trains it."""
    prepare = {
        "serial": _serial,
        "ddp": _ddp,
        "fabric": _fabric,
        "accelerate": _accelerate,
        "convoy": _convoy,
    }[side.kind]
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


def _ddp(side: Side, case: Case, model: nn.Module, samples: slice) -> Trained:
    from torch.distributed import init_process_group
    from torch.nn.parallel import DistributedDataParallel

    init_process_group("gloo")
    network = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trained(network, _optimizer(network), samples, unfinished=network.no_sync)


def _fabric(side: Side, case: Case, model: nn.Module, samples: slice) -> Trained:
    lightning = importlib.import_module("lightning.fabric")
    strategy = importlib.import_module("lightning.fabric.strategies").DDPStrategy(gradient_as_bucket_view=True)
    num = case.batch // (samples.stop - samples.start)
    fabric = lightning.Fabric(accelerator="cpu", devices=num, strategy=strategy)
    fabric.launch()
    network, optimizer = fabric.setup(model, _optimizer(model))
    return Trained(network, optimizer, samples, fabric.backward, lambda: fabric.no_backward_sync(network))


def _accelerate(side: Side, case: Case, model: nn.Module, samples: slice) -> Trained:
    library = importlib.import_module("accelerate")
    wishes = library.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = library.Accelerator(cpu=True, kwargs_handlers=[wishes])
    network, optimizer = accelerator.prepare(model, _optimizer(model))
    return Trained(network, optimizer, samples, accelerator.backward, lambda: accelerator.no_sync(network))


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
