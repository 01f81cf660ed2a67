"""The ranks of a configuration, and the device of this one."""

import torch

from convoy.engine.allocation import keep_freed_memory
from convoy.experiments.scaling.visits.task import Task
from convoy.training import Devices, choose_device


def join(task: Task) -> tuple[Devices, torch.device]:
    """The ranks, and this one's device; memory that is freed stays with the process, also on one device."""
    if task.num_devices > 1:
        devices, own = Devices.join()
        return devices, own if task.device_type == "cuda" else torch.device("cpu")
    device = choose_device(task.device_type)
    keep_freed_memory(device)
    return Devices(), device
