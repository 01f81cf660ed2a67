"""What measured times hold for (the device, its libraries, how it is used), and the memory a plan may take there."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from convoy import processor
from convoy.resources import cores_allowed, free_memory
from convoy.units import size
from convoy.version import __version__

# Of what is free, for the tensors that are counted. Kernels and the framework take the rest of a GPU. On a host, four
# ranks of ResNet-50 with a predicted 1.05 GB each reached 8.1 GB: kernels, holes between blocks, messages between
# processes, and the processes that load pictures take 0.4 of what is free.
GPU_SHARE, HOST_SHARE = 0.9, 0.55


def device_memory(device: torch.device, on_host: int) -> tuple[float, str]:
    """Bytes for parameters, gradients, optimizer and activations on a device, and a word on where they come from. A GPU
    has what is free and what this process holds of it. What is free of a host's memory, or of what control groups leave
    of it, its `on_host` ranks share."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        there = float(free + torch.cuda.memory_reserved(device))
        return GPU_SHARE * there, f"nine tenths of the {size(int(there))} that are free on the GPU"
    there = free_memory()
    shared = f" over {on_host} devices" if on_host > 1 else ""
    return HOST_SHARE * there / on_host, f"{HOST_SHARE} of the {size(int(there))} that are free here{shared}"


_LOWER = ("tf32", "bf16")  # precisions in which float32 may be multiplied


@dataclass(frozen=True)
class Device:
    """Everything that would make the same piece take another time."""

    name: str  # the processor's or GPU's name
    torch: str  # version
    convoy: str
    threads: int  # that compute on it; 0 where that says nothing, as on a GPU
    precision: str = "float32"  # in which convolutions and matrix products compute
    channels_last: bool = False
    compiled: bool = False
    neighbours: int = 1  # ranks that compute on the same host at once and share its memory, itself counted
    numerics: str = ""  # torch's switches that change kernels, as `benchmark, tf32 products`
    share: float = 1.0  # of the time of its threads' cores, what control groups leave it

    @property
    def key(self) -> str:
        """A name that equal devices share, fit for a file."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40]
        digest = hashlib.blake2b(repr(sorted(asdict(self).items())).encode(), digest_size=6).hexdigest()
        return f"{plain or 'device'}-{self.threads}t-{self.precision}-{digest}"

    def describe(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}, " if self.threads else ""
        order = ", channels last" if self.channels_last else ""
        with_others = f", {self.neighbours} ranks on the host" if self.neighbours > 1 else ""
        compiled = ", compiled" if self.compiled else ""
        share = f"{self.share:.0%} of the time, " if self.share < 1 else ""
        numerics = f", {self.numerics}" if self.numerics else ""
        return (
            f"{self.name}, {threads}{share}{self.precision}{numerics}{order}{compiled}{with_others}, torch {self.torch}"
        )


def this_device(
    device: torch.device,
    *,
    precision: str = "float32",
    channels_last: bool = False,
    compiled: bool = False,
    neighbours: int = 1,
) -> Device:
    """The device that this process computes on, with the threads that torch uses now."""
    is_cpu = device.type == "cpu"
    name = processor.name() if is_cpu else torch.cuda.get_device_name(device)
    threads = torch.get_num_threads() if is_cpu else 0
    return Device(
        name,
        torch.__version__,
        __version__,
        threads,
        precision,
        channels_last,
        compiled,
        neighbours,
        ", ".join(_numerics(is_cpu)),
        round(min(1.0, cores_allowed() / threads), 3) if is_cpu else 1.0,
    )


def _numerics(is_cpu: bool) -> Iterator[str]:
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic"
    if not is_cpu and torch.backends.cudnn.benchmark:
        yield "benchmark"
    convolutions: Any = torch.backends.mkldnn if is_cpu else torch.backends.cudnn
    products: Any = torch.backends.mkldnn if is_cpu else torch.backends.cuda
    for what, setting in (("convolutions", convolutions.conv), ("products", products.matmul)):
        if setting.fp32_precision in _LOWER:
            yield f"{setting.fp32_precision} {what}"
