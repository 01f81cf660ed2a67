"""How long plans take for machines that are not at hand, and what they say: seven networks on six machines.

    python benchmarks/machines.py

For each pair the network is captured anew at a batch of 32 images for each device, predicted and searched for, as
`convoy plan NETWORK --on MACHINE --batch BATCH` does; the command takes some seconds more for loading PyTorch.
"""

import time

import torch

from convoy import models
from convoy.errors import TooLargeError
from convoy.hardware.catalog import machine
from convoy.planner.machines import PRECISIONS, Prediction, predict
from convoy.planner.workload import workload_of
from convoy.plans.plan import Plan

NETWORKS = ("alexnet", "vgg16", "googlenet", "squeezenet1_1", "resnet50", "resnet152", "densenet121")
MACHINES = (
    ("8xp100-pcie", "fp32"),
    ("8xk80", "fp32"),
    ("2xtitan-x+1xgtx-1080", "fp32"),
    ("8xv100-sxm2", "fp16"),
    ("8xrtx-3090", "bf16"),
    ("4x(8xa100-sxm4)", "bf16"),
)


def planned(network: str, on: str, precision: str) -> tuple[Prediction, float]:
    """The prediction, and the seconds that it took."""
    found = machine(on)
    start = time.perf_counter()
    with torch.device("meta"):
        model = models.create(network)
    shape = models.describe(network).input_shape
    assert shape is not None
    workload = workload_of(
        model.train(),
        torch.empty(1, *shape),
        32 * len(found.devices),
        name=network,
        batch_norm="microbatch",
        microbatch=16,
        precision=PRECISIONS[precision],
    )
    return predict(workload, found, precision), time.perf_counter() - start


def main() -> None:
    longest = 0.0
    print("| network | machine | images/s | speed-up | fastest plan | seconds |\n| --- | --- | --- | --- | --- | --- |")
    for network in NETWORKS:
        for on, precision in MACHINES:
            try:
                found, seconds = planned(network, on, precision)
            except TooLargeError as error:
                print(f"| {network} | {on}, {precision} | {error} | | | |")
                continue
            longest = max(longest, seconds)
            plain = found.plan == Plan.by_samples(len(found.machine.devices))
            plan = "data parallelism" if plain else f"{found.plan}, {found.gain:.2f} ×"
            rate = f"{found.best:,.0f} ({found.best / found.within:,.0f} to {found.best * found.within:,.0f})"
            row = [network, f"{on}, {precision}", rate, f"{found.speedup:.2f}", plan, f"{seconds:.1f}"]
            print("| " + " | ".join(row) + " |", flush=True)
            plain_fits = not any("data parallelism does not fit" in note for note in found.notes)
            assert found.gain >= 1 or not plain_fits, "slower than data parallelism by its own prediction"
    print(f"\nlongest: {longest:.1f} s")


if __name__ == "__main__":
    main()
