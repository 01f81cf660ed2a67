"""Memory of each rank under a plan: predicted and measured, and a network that only fits on two devices.

    python benchmarks/memory.py                 parameters and activations of each rank
    python benchmarks/memory.py --limit         AlexNet under a limit that one device breaks and two keep, as root

With --limit AlexNet is trained on one device and on two, each process in a control group that has no limit, and then
again with a limit for each process half way between the two peaks.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measuring import machine, ranks
from measuring.cases import CASES, Case, Plan, hybrid
from measuring.memory_limits import memory_groups
from measuring.memory_use import measure
from measuring.sides import Side
from measuring.training import train

from convoy.errors import ConvoyError

ALEXNET = Case("alexnet", "alexnet", 224, 16, updates=3, num_classes=1000)
TABLE: list[tuple[Case, list[Plan]]] = [
    (ALEXNET, ["serial", "sample=2", "filter=2", "owt=2", hybrid(classifier__1="filter", classifier__4="channel")]),
    (CASES["resnet18"].changed(16, 1), ["serial", "sample=2", "filter=2", "height=2"]),
    (CASES["googlenet"].changed(16, 1), ["serial", "sample=2", "filter=2"]),
]
LIMITED: Plan = hybrid(classifier__1="filter", classifier__4="channel", classifier__6="filter")
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", action="store_true", help="train under a limit")
    parser.add_argument("--out", type=Path, help="file for JSON")
    arguments = parser.parse_args()
    ranks.prepare()
    document: dict[str, Any] = {"machine": machine.describe()}
    print(machine.sentence(document["machine"]))
    try:
        document |= limited() if arguments.limit else {"ranks": table()}
    except ConvoyError as error:
        sys.exit(str(error))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def table() -> list[dict[str, Any]]:
    """Print and return what each rank holds under each plan."""
    rows = []
    print("\n| network, global batch | plan | rank | parameters | predicted | activations | predicted | process |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case, plans in TABLE:
        for plan in plans:
            num = 1 if plan == "serial" else 2
            for rank, use in enumerate(ranks.run_ranks(measure, num, case, plan, num)):
                rows.append({"network": case.model, "batch": case.batch, "plan": plan, "rank": rank, **use})
                numbers = " | ".join(f"{value / MIB:.1f}" for value in use.values())
                print(f"| {case.model}, {case.batch} | {_text(plan)} | {rank} | {numbers} |", flush=True)
    print("\nMiB. Activations: what autograd keeps for the backward pass. Process: its most in two updates, above its")
    print("memory before the network was built; gradients, momentum, buffers and scratch memory are in it.")
    return rows


def limited() -> dict[str, Any]:
    """Print and return how AlexNet fares with and without a limit for each process."""
    one, two = _peaks("serial", 1, None), _peaks(LIMITED, 2, None)
    print(f"without a limit: one device {_mib(one)}, two devices {_mib(two)} under {_text(LIMITED)}")
    limit = (max(one) + max(two)) // 2 // MIB * MIB
    print(f"limit for each process: {limit // MIB} MiB")
    found: dict[str, Any] = {"peaks": {"one": one, "two": two}, "limit": limit, "outcome": {}}
    for name, plan, num in (("one device", "serial", 1), ("two devices", LIMITED, 2)):
        try:
            peaks = _peaks(plan, num, limit)
            found["outcome"][name] = said = f"trained, {_mib(peaks)}"
        except ranks.RankFailed as error:
            found["outcome"][name] = said = f"killed: {str(error).strip().splitlines()[-1]}"
        print(f"{name}: {said}", flush=True)
    return found


def _peaks(plan: Plan, num: int, limit: int | None) -> list[int]:
    """The most that each process had while it trained."""
    side = Side("", "convoy", plan=plan)
    with memory_groups(num, limit) as groups:
        limits = ranks.Limits(seconds=300, cgroups=tuple(group.path for group in groups))
        ranks.run_ranks(train, num, side, ALEXNET, 1, limits=limits)
        return [group.peak for group in groups]


def _mib(values: list[int]) -> str:
    return " and ".join(f"{value / MIB:.0f} MiB" for value in values)


def _text(plan: Plan) -> str:
    if isinstance(plan, str):
        return plan
    layers = ", ".join(f"{name} {next(iter(given.values()))}" for name, given in plan["layers"].items())
    return f"device=2: {layers}"


if __name__ == "__main__":
    main()
