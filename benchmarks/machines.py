"""How long plans take for machines that are not at hand, and what they say: seven networks on six machines.

    python benchmarks/machines.py

For each pair the network is captured anew at a batch of 32 images for each device, predicted and searched for, as
`convoy plan NETWORK --on MACHINE --batch BATCH` does; the command takes some seconds more for loading PyTorch.
"""

import time

import torch
from measuring import harness

from convoy import models
from convoy.errors import TooLargeError
from convoy.hardware.catalog import machine
from convoy.planner.machines import PRECISIONS, Prediction, predict
from convoy.planner.workload import workload_of
from convoy.plans.plan import Plan

NETWORKS = ("alexnet", "vgg16", "googlenet", "squeezenet1_1", "resnet50", "resnet152", "densenet121")
MACHINES = {
    "8xp100-pcie": "fp32",
    "8xk80": "fp32",
    "2xtitan-x+1xgtx-1080": "fp32",
    "8xv100-sxm2": "fp16",
    "8xrtx-3090": "bf16",
    "4x(8xa100-sxm4)": "bf16",
}


def planned(network: str, on: str, precision: str) -> Prediction:
    """The prediction."""
    with torch.device("meta"):
        model = models.create(network)
    shape, devices = models.describe(network).input_shape, machine(on)
    assert shape is not None
    norm = {"batch_norm": "microbatch", "microbatch": 16}
    batch, example, precise = 32 * len(devices.devices), torch.empty(1, *shape), PRECISIONS[precision]
    workload = workload_of(model.train(), example, batch, name=network, precision=precise, **norm)  # type: ignore[arg-type]
    return predict(workload, devices, precision)


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    longest = 0.0
    with harness.report(options.out) as report:
        report.header("network", "machine", "images/s", "speed-up", "fastest plan", "seconds")
        for network in NETWORKS:
            for on, precision in MACHINES.items():
                start = time.perf_counter()
                try:
                    found = planned(network, on, precision)
                except TooLargeError as error:
                    report.row(network, f"{on}, {precision}", error, "", "", "")
                    continue
                seconds = time.perf_counter() - start
                longest = max(longest, seconds)
                plain = found.plan == Plan.by_samples(len(found.machine.devices))
                plan = "data parallelism" if plain else f"{found.plan}, {found.gain:.2f} ×"
                rate = f"{found.best:,.0f} ({found.best / found.within:,.0f} to {found.best * found.within:,.0f})"
                report.row(network, f"{on}, {precision}", rate, f"{found.speedup:.2f}", plan, f"{seconds:.1f}")
                plain_fits = not any("data parallelism does not fit" in note for note in found.notes)
                assert found.gain >= 1 or not plain_fits, "slower than data parallelism by its own prediction"
        report.print(f"\nlongest: {longest:.1f} s")


if __name__ == "__main__":
    main()
