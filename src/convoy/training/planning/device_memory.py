"""How much memory a plan may take on a device."""

import os

import torch

from convoy.cost.control_groups import memory_limits
from convoy.plans.explain import size

SHARE = 0.9
"""Of what there is: kernels, the framework and the data take some."""


def device_memory(device: torch.device, on_host: int) -> tuple[float, str]:
    """Bytes for parameters, gradients, optimiser and activations on a device, and a word on where they come from.

    Args:
        device: a GPU, which has what is free and what this process holds of it; or a CPU, whose memory, or what
            control groups leave of it, is shared by all ranks of the host.
        on_host: ranks of this host.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        there = float(free + torch.cuda.memory_reserved(device))
        return SHARE * there, f"nine tenths of the {size(int(there))} that are free on the GPU"
    there = min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])
    shared = f" over {on_host} devices" if on_host > 1 else ""
    return SHARE * there / on_host, f"nine tenths of the host's {size(int(there))}{shared}"
