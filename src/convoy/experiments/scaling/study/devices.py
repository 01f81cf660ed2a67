"""How much of this machine a device is, and whether it has so many."""

from collections.abc import Sequence

import torch

from convoy.errors import ConvoyError
from convoy.launch.cores import own_cores


def cores_per_device(devices: Sequence[int], asked: int | None) -> int:
    """CPU cores of each device, the same in every configuration: all divided by the largest number of devices.

    Raises:
        ConvoyError: there are too few.
    """
    num, largest = len(own_cores()), max(devices)
    if largest > num:
        raise ConvoyError(
            f"--devices {largest} needs {largest} cores, but here are {num}: devices that take turns on a core say "
            "nothing of real ones; use at most as many, or --emulate a cluster"
        )
    if asked is not None and asked * largest > num:
        raise ConvoyError(
            f"--cores-per-device {asked} on {largest} devices needs {asked * largest} cores, but here are {num}: use "
            f"at most {num // largest}, or fewer devices"
        )
    return asked or num // largest


def check_gpus(devices: Sequence[int]) -> None:
    """Refuse more devices than there are GPUs.

    Raises:
        ConvoyError: there are too few.
    """
    num = torch.cuda.device_count()
    if max(devices) > num:
        raise ConvoyError(
            f"--devices {max(devices)} needs {max(devices)} GPUs, but here {'is' if num == 1 else 'are'} {num}: use "
            f"at most {num}, or --device cpu"
        )
