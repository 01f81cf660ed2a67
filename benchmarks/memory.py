"""Memory of each rank under a plan: predicted and measured, and a network that only fits on two devices.

    python benchmarks/memory.py                 parameters and activations of each rank
    python benchmarks/memory.py --limit         AlexNet under a limit that one device breaks and two keep, as root

With --limit AlexNet is trained on one device and on two, each process in a control group that has no limit, and then
again with a limit for each process half way between the two peaks.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import harness, ranks
from measuring.cases import CASES, Case, Plan, hybrid
from measuring.memory_limits import memory_groups
from measuring.memory_use import MIB, forget_peak, resident
from measuring.sides import Arrangement, Side, set_up
from measuring.training import batch, build, train
from torch import Tensor, nn

from convoy.engine.network import network_of
from convoy.ops.memory import predict_memory

ALEXNET = Case("alexnet", "alexnet", 224, 16, updates=3, num_classes=1000)
PAIR: Plan = hybrid(classifier__1="filter", classifier__4="channel")
TABLE: list[tuple[Case, list[Plan]]] = [
    (ALEXNET, ["serial", "sample=2", "filter=2", "owt=2", PAIR]),
    (CASES["resnet18"].changed(16, 1), ["serial", "sample=2", "filter=2", "height=2"]),
    (CASES["googlenet"].changed(16, 1), ["serial", "sample=2", "filter=2"]),
]
LIMITED: Plan = hybrid(classifier__1="filter", classifier__4="channel", classifier__6="filter")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--limit", action="store_true", help="train under a limit")
    parser.add_argument("--out", type=Path, help="file for JSON")
    options = parser.parse_args()
    ranks.prepare()
    document: dict[str, Any] = {"machine": harness.heading()}
    with harness.ended():
        document |= limited() if options.limit else {"ranks": table()}
    harness.save(options.out, document)


def table() -> list[dict[str, Any]]:
    """Print and return what each rank holds under each plan."""
    rows = []
    columns = ("rank", "parameters", "predicted", "activations", "predicted", "process")
    print(harness.header("network, global batch", "plan", *columns))
    for case, plans in TABLE:
        for plan in plans:
            num = 1 if plan == "serial" else 2
            for rank, use in enumerate(ranks.run_ranks(measure, num, case, plan, num)):
                rows.append({"network": case.model, "batch": case.batch, "plan": plan, "rank": rank, **use})
                mib = [f"{value / MIB:.1f}" for value in use.values()]
                harness.show(f"{case.model}, {case.batch}", _text(plan), rank, *mib)
    print("\nMiB. Activations: what autograd keeps for the backward pass. Process: its most in two updates, above its")
    print("memory before the network was built; gradients, momentum, buffers and scratch memory are in it.")
    return rows


def measure(case: Case, plan: Plan, rank_count: int) -> dict[str, int]:
    """Bytes in a rank's part of three updates of `case` under `plan`, in the order of the table's columns."""
    before, arrangement = resident("VmRSS"), Arrangement()
    model, rank = build(case, arrangement), int(os.environ.get("RANK", 0))
    trained = set_up(Side("", "convoy", arrangement, plan), case, model, rank, rank_count)
    images, labels = (tensor[trained.samples].clone() for tensor in batch(case, arrangement))
    activations = _kept(model, images, labels)
    forget_peak()
    for _ in range(2):
        trained.optimizer.zero_grad()
        F.cross_entropy(trained.network(images), labels).backward()
        trained.optimizer.step()
    network = network_of(model)
    predicted = predict_memory(network.placement((images,), network.samples_of_pass((images,)), True))[rank]
    return {
        "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
        "parameters_predicted": predicted.parameters,
        "activations": activations,
        "activations_predicted": predicted.activations,
        "process": resident("VmHWM") - before,
    }


def _kept(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Bytes of the storages that a forward pass keeps for the backward pass; those of parameters do not count."""
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = model(images)
    F.cross_entropy(output, labels).backward()
    return sum(sizes.values())


def limited() -> dict[str, Any]:
    """Print and return how AlexNet fares with and without a limit for each process."""
    one, two = _peaks("serial", 1, None), _peaks(LIMITED, 2, None)
    print(f"without a limit: one device {_mib(one)}, two devices {_mib(two)} under {_text(LIMITED)}")
    limit = (max(one) + max(two)) // 2 // MIB * MIB
    print(f"limit for each process: {limit // MIB} MiB")
    outcome: dict[str, str] = {}
    for name, plan, num in (("one device", "serial", 1), ("two devices", LIMITED, 2)):
        try:
            outcome[name] = f"trained, {_mib(_peaks(plan, num, limit))}"
        except ranks.RankFailed as error:
            outcome[name] = f"killed: {str(error).strip().splitlines()[-1]}"
        print(f"{name}: {outcome[name]}", flush=True)
    return {"peaks": {"one": one, "two": two}, "limit": limit, "outcome": outcome}


def _peaks(plan: Plan, num: int, limit: int | None) -> list[int]:
    """The most that each process had while it trained."""
    with memory_groups(num, limit) as groups:
        limits = ranks.Limits(seconds=300, cgroups=tuple(group.path for group in groups))
        ranks.run_ranks(train, num, Side("", "convoy", plan=plan), ALEXNET, 1, limits=limits)
        return [group.peak for group in groups]


def _mib(values: list[int]) -> str:
    return " and ".join(f"{value / MIB:.0f} MiB" for value in values)


def _text(plan: Plan) -> str:
    if isinstance(plan, str):
        return plan
    layers = ", ".join(f"{name} {next(iter(strategies.values()))}" for name, strategies in plan["layers"].items())
    return f"device=2: {layers}"


if __name__ == "__main__":
    main()
