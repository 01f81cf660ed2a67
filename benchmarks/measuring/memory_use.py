"""What a rank holds: parameters, what the backward pass needs kept, and the most that its process ever had."""

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measuring.cases import Case, Plan
from measuring.sides import Arrangement, Side, set_up
from measuring.training import batch, build


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank."""

    parameters: int  # counted
    parameters_predicted: int  # by the plan
    activations: int  # storages that autograd keeps between the forward and the backward pass, each once
    activations_predicted: int  # by the plan
    process: int  # the most that the process had in an update, above what it had before the network was there


def measure(case: Case, plan: Plan, rank_count: int) -> dict[str, int]:
    """A rank's part of three updates of `case` under `plan`."""
    from convoy.engine.network import network_of
    from convoy.ops.memory import predict_memory

    before = _resident("VmRSS")
    arrangement = Arrangement()
    model = build(case, arrangement)
    rank = int(os.environ.get("RANK", 0))
    trained = set_up(Side("", "convoy", arrangement, plan), case, model, rank, rank_count)
    images, labels = batch(case, arrangement)
    images, labels = images[trained.samples].clone(), labels[trained.samples].clone()
    kept = _kept(model, images, labels)
    _forget_peak()
    for _ in range(2):
        trained.optimizer.zero_grad()
        F.cross_entropy(trained.network(images), labels).backward()
        trained.optimizer.step()
    network = network_of(model)
    placement = network.placement((images,), network.samples_of_pass((images,)), True)
    predicted = predict_memory(placement)[rank]
    return asdict(
        MemoryUse(
            parameters=sum(p.numel() * p.element_size() for p in model.parameters()),
            parameters_predicted=predicted.parameters,
            activations=kept,
            activations_predicted=predicted.activations,
            process=_resident("VmHWM") - before,
        )
    )


def _kept(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Bytes of the storages that a forward pass keeps for the backward pass; those of parameters do not count."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = model(images)
    F.cross_entropy(output, labels).backward()
    return sum(found.values())


def _resident(key: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{key}:\s+(\d+) kB", status)
    assert found is not None, f"no {key} in /proc/self/status"
    return int(found[1]) * 1024


def _forget_peak() -> None:
    """Let VmHWM begin again at what the process has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
