"""What a network asks of a device; how long it takes on one that is not at hand: a roofline for every call, with fitted
efficiencies; and what the catalog would say of the one at hand, measured.

A call takes the time of its arithmetic and of its bytes, the longer of them and a part of the shorter, and its launch
(Williams, Waterman and Patterson, "Roofline", 2009). The arithmetic reaches a part of the peak that depends on the
device's generation, on the precision, and on how much of it there is in each direction: a sum over few channels, few
filters or few pixels fill the multiplying units badly. `coefficients.json` holds what `benchmarks/published.py` fitted
to published measurements: logarithms of factors on these counts, held near 0, so that a device without data is
predicted by its data sheet. A regression on the tables alone could not say what holds a machine back.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from convoy.hardware.catalog import Device

Array = npt.NDArray[np.float64]
Factor = Callable[[str], float]  # a fitted factor by its name, 1 where nothing was fitted

# What calls are told apart by; views cost nothing and are none of them
KINDS = ("conv", "linear", "norm", "pool", "pointwise")

KIND_OF = {"conv": "conv", "linear": "linear", "batch_norm": "norm", "group_norm": "norm", "layer_norm": "norm"}
KIND_OF |= {"lrn": "norm", "rms_norm": "norm", "pool": "pool", "pooling": "pool", "adaptive_pool": "pool"}


@dataclass(frozen=True)
class Item:
    """A call on one device."""

    kind: str  # one of `KINDS`
    macs: float  # multiply-adds of the forward pass
    read: float  # elements of the inputs that are activations, and of the outputs
    written: float
    weights: float  # elements of the parameters
    window: float = 1.0  # elements of a filter's window, 1 for 1x1 and what is not a convolution
    depth: float = 1.0  # input channels of a group, over which each output is a sum
    width: float = 1.0  # output channels of a group
    groups: float = 1.0
    strided: bool = False  # windows are more than one pixel apart
    first: bool = False  # its input has no gradient
    back: bool = True  # it has a backward pass: not all that it is computed from is frozen


# Columns that grow with the images: those of `Work` are of one image
_OF_IMAGES = ("macs", "read", "written")


@dataclass(frozen=True)
class Work:
    """All calls of a network for one image, equal ones together."""

    rows: Any  # as numpy's records: `count` calls that a row stands for, and of each the fields of `Item`
    parameters: float  # elements that are trained
    tensors: int  # number of parameters

    @staticmethod
    def of(items: Iterable[Item], parameters: float, tensors: int, images: float) -> "Work":
        """The work of calls over so many images. The kind is a place in `KINDS`."""
        counted = Counter(items)
        columns: dict[str, Any] = {"count": np.array(list(counted.values()), np.float64)}
        columns["kind"] = np.array([KINDS.index(item.kind) for item in counted], np.int64)
        for field in fields(Item)[1:]:
            numbers = np.array([float(getattr(item, field.name)) for item in counted])
            columns[field.name] = numbers / images if field.name in _OF_IMAGES else numbers
        rows = np.rec.fromarrays([*columns.values()], dtype=[(name, column.dtype) for name, column in columns.items()])
        return Work(rows, parameters, tensors)


# By name; all are logarithms of factors, so that 0 changes nothing. What is not there is 0.
Coefficients = Mapping[str, float]


@dataclass(frozen=True)
class Software:
    """What runs the network."""

    framework: str = "pytorch"  # one that was not fitted is as the mean of all
    cudnn: int = 9  # major version
    compiled: bool = False  # a compiler (XLA, torch.compile) fuses what is between convolutions
    channels_last: bool = False  # activations lie with the channels innermost, as tensor cores want them
    # The year of what was measured at small batches too, so that the host's and the device's part of a launch are told
    # apart; empty for all before, whose tables show the sum alone
    generation: str = ""
    recorded: bool = False  # updates are replayed as CUDA graphs, which cost the host nothing
    kernels: bool = False  # Convoy's own kernels normalize, with the ReLU and the addition that follow


OURS = Software(generation="2026")  # Convoy runs on PyTorch of today

_CONV, _LINEAR, _NORM, _POOL, _POINT = range(len(KINDS))
# How often each kind goes over what it reads and writes, forward and backward
_PASSES = np.array([[1.0, 1.0, 2.0, 1.0, 1.0], [2.0, 2.0, 2.5, 1.5, 1.5]])


@dataclass(frozen=True)
class Arithmetic:
    """The units that multiply: their peak in FLOP/s, what they are called, and the bytes of an element."""

    peak: float
    units: str
    itemsize: int


def arithmetic(device: Device, precision: str) -> Arithmetic:
    """What a device computes with in a precision: a faster one that it lacks is done with what it has."""
    if precision == "fp16" and device.fp16:
        return Arithmetic(device.fp16 * 1e12, "tensor" if device.tensor_cores else "half", 2)
    if precision == "tf32" and device.tf32:
        return Arithmetic(device.tf32 * 1e12, "tf32", 4)
    return Arithmetic(device.fp32 * 1e12, "fp32", 2 if precision == "fp16" else 4)


def units_of(device: Device, precision: str) -> str:
    """The name under which the part of the peak that these units reach was fitted."""
    generation, units = _generation_of(device), arithmetic(device, precision).units
    # what is sold for games adds up in fp32 at half the rate
    halved = generation in ("ampere", "ada") and units != "fp32" and device.fp16 < 3 * device.fp32
    return f"{generation} {units}{' halved' if halved else ''}"


def _generation_of(device: Device) -> str:
    """The generation as which a device was fitted: Blackwells that are sold for games, which no table has, as Ada."""
    return "ada" if device.generation == "blackwell" and device.fp16 < 3 * device.fp32 else device.generation


@dataclass(frozen=True)
class Times:
    """Seconds of an update on one device."""

    forward: Array  # of each row of the work, all its calls together
    backward: Array
    arithmetic: float  # of both passes, if there were nothing else; like `memory` and `launch`
    memory: float
    launch: float
    update: float  # of the weights
    fixed: float  # of the framework, once
    host: float = 0.0  # to issue one launch while the device is busy; 0 where it is part of `launch`
    issuing: float = 0.0  # of the host, all launches

    @property
    def device(self) -> float:
        """The device's own time."""
        return float(self.forward.sum() + self.backward.sum()) + self.update + self.fixed

    @property
    def total(self) -> float:
        """Device and host together: the longer, and a part of the shorter."""
        return float((self.device**4 + self.issuing**4) ** 0.25)

    @property
    def waiting(self) -> float:
        """The device's wait for its host."""
        return self.total - self.device


def times(
    work: Work,
    images: float,
    device: Device,
    precision: str,
    software: Software,
    coefficients: Coefficients | None = None,
) -> Times:
    """Seconds of an update of so many images on a device, in `fp32`, `tf32` or `fp16` (which stands for bf16 too).
    The coefficients are by default those of the package."""
    c = coefficients_of("one device") if coefficients is None else coefficients
    units = arithmetic(device, precision)
    group = units_of(device, precision)
    wide = units.units in ("tensor", "tf32")

    def factor(name: str) -> float:
        return float(np.exp(c.get(name, 0.0)))

    scale = factor(f"device {device.name}") * factor(f"framework {software.framework}")
    scale *= np.exp(c.get("cudnn", 0.0) * max(0, 7 - software.cudnn))
    seconds = _arithmetic(work, images, device, units, factor, wide) / factor(f"peak {group}")
    moved = _bytes(work, images, units, software, factor, wide)
    bandwidth = device.gbytes_per_s * 1e9 * 0.75 * factor(f"bandwidth {_generation_of(device)}")
    year = f" {software.generation}" if software.generation else ""
    start = device.launch_us * 1e-6 * factor(f"launch{year}")
    rows = work.rows
    launch = start * rows.count
    ways = []
    for way in (0, 1):
        of_memory = moved[way] * rows.count / bandwidth
        overlapped = (seconds[way] ** 2 + of_memory**2) ** 0.5
        ways.append(scale * (overlapped + (2 * rows.back if way else 1) * launch))
    # weights, gradients and momentum are read, two of them written
    update = scale * (20 * work.parameters / bandwidth + work.tensors * start)
    kind = "compiled" if software.compiled else "eager"
    host = 20e-6 * factor(f"host {kind}{year}") if year and not software.recorded else 0.0
    return Times(
        forward=ways[0],
        backward=ways[1],
        arithmetic=float(scale * seconds.sum()),
        memory=float(scale * (moved * rows.count).sum() / bandwidth),
        launch=float(scale * (launch * (1 + 2 * rows.back)).sum()),
        update=float(update),
        fixed=0.0 if year else float(2e-3 * factor("fixed")),
        host=host,
        issuing=float(host * ((rows.count * (1 + 2 * rows.back)).sum() + work.tensors)),
    )


def _arithmetic(work: Work, images: float, device: Device, units: Arithmetic, factor: Factor, wide: bool) -> Array:
    """Seconds at the peak, forward and backward, of all calls of each row, where shapes are as they are."""
    kind, rows = "wide" if wide else "plain", work.rows
    window, grouped = rows.window, rows.groups > 1
    area = rows.macs * images / np.maximum(1, rows.depth * window * rows.width * rows.groups)
    area = np.where(rows.macs > 0, area, 1.0)
    sums = rows.depth * window
    filling = sums / (sums + 16 * factor(f"sums {kind}"))
    filling = filling * rows.width / (rows.width + 16 * factor(f"width {kind}"))
    tiles = area * np.maximum(rows.width, 32) * rows.groups / 4096 / device.processors
    filling = filling * tiles / (tiles + factor(f"tiles {kind}"))
    for name, where in (
        ("3x3", (window == 9) & (rows.strided == 0) & ~grouped),
        ("large", (window > 9) & ~grouped),
        ("1x7", (window > 1) & (window < 9)),
        ("groups", grouped),
        ("linear", rows.kind == _LINEAR),
    ):
        filling = filling * np.where(where, factor(f"{name} {kind}"), 1)
    forward = 2 * rows.macs * images * rows.count / units.peak / np.maximum(filling, 1e-4)
    backward = forward * rows.back * (1 - 0.5 * rows.first) * 2 * factor(f"backward {kind}")
    return np.stack([forward, backward])


def _bytes(work: Work, images: float, units: Arithmetic, software: Software, factor: Factor, wide: bool) -> Array:
    """Bytes that a call of each row moves, forward and backward."""
    rows = work.rows
    elements = (rows.read + rows.written) * images
    passes = _PASSES[:, rows.kind]
    between = np.isin(rows.kind, (_NORM, _POINT))
    by = "compiled" if software.compiled else "kernels" if software.kernels else ""
    fused = 0.6 * factor(f"{by} {software.generation}".strip()) if by else 1.0
    passes = passes * np.where(between, fused, 1.0)
    if wide and units.itemsize == 2 and not software.channels_last and not software.compiled:
        # cuDNN has the tensor cores' kernels for channels innermost only, and turns tensors around
        old = software.cudnn < 8
        passes = passes + np.where(rows.kind == _CONV, factor("turning" if old else "turning 8"), 0.0)
        passes = passes * np.where(between & old, factor("halves"), 1.0)
    passes = passes * np.where(rows.kind == _NORM, factor("norm"), 1.0)
    moved: Array = passes * elements * units.itemsize + np.array([[1.0], [2.0]]) * 4 * rows.weights
    moved[1] *= rows.back
    return moved


@cache
def coefficients_of(part: str) -> dict[str, float]:
    """The package's coefficients for `one device` or `several devices`, fitted to all published measurements."""
    text = resources.files("convoy.hardware").joinpath("coefficients.json").read_text(encoding="utf-8")
    parts: dict[str, dict[str, float]] = json.loads(text)
    return parts.get(part, {})


def measure_device(device: torch.device) -> dict[str, Any]:
    """The columns of the catalog: arithmetic by matrix products, memory by a copy, a launch by an empty operation. A
    CPU is measured with the threads that torch has. A peak so found is what a program reaches, somewhat less than a
    data sheet says."""
    is_gpu = device.type == "cuda"
    wait: Callable[[], object] = partial(torch.cuda.synchronize, device) if is_gpu else lambda: None

    def per_second(amount: float, work: Callable[[], object]) -> float:
        """By the shortest of seven times: what disturbs only adds."""
        times = []
        for _ in range(7):
            wait()
            start = time.perf_counter()
            work()
            wait()
            times.append(time.perf_counter() - start)
        return float(f"{amount / min(times):.3g}")

    side = 8192 if is_gpu else 1024
    x, large = torch.randn(side, side, device=device), torch.empty(2**28 if is_gpu else 2**24, device=device)
    half, small, tera_flop = x.half(), torch.zeros(1, device=device), 2.0 * side**3 / 1e12
    columns: dict[str, Any] = {"generation": _generation(device), "processors": torch.get_num_threads()}
    columns["fp32"] = per_second(tera_flop, lambda: x @ x)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if is_gpu:
        properties = torch.cuda.get_device_properties(device)
        memory, columns["processors"] = properties.total_memory, int(properties.multi_processor_count)
        if torch.cuda.get_device_capability(device)[0] >= 8:
            columns["tf32"] = per_second(tera_flop, lambda: _in_tf32(x))
        columns["fp16"] = per_second(tera_flop, lambda: half @ half)
    columns["memory_gb"] = float(f"{memory / 1e9:.3g}")
    columns["gbytes_per_s"] = per_second(2 * large.numel() * 4 / 1e9, large.clone)
    columns["launch_us"] = float(f"{1e4 / per_second(1.0, lambda: [small.add_(1) for _ in range(100)]):.3g}")
    columns["host"] = "pcie4" if is_gpu else "shared-memory"
    gpus, index = range(torch.cuda.device_count()) if is_gpu else (), device.index or 0
    columns["peer"] = all(torch.cuda.can_device_access_peer(index, other) for other in gpus if other != index)
    return columns


def _in_tf32(x: torch.Tensor) -> torch.Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return x @ x
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


_GENERATIONS = {3: "kepler", 5: "maxwell", 6: "pascal", 7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell"}


def _generation(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return {(7, 5): "turing", (8, 9): "ada"}.get((major, minor), _GENERATIONS.get(major, "blackwell"))
