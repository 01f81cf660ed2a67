"""What the catalog would say of the device at hand, measured: for `convoy profile --export`."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

_ROUNDS = 7


def measure_device(device: torch.device) -> dict[str, Any]:
    """The columns of the catalog: arithmetic by matrix products, memory by a copy, a launch by an empty operation. A
    CPU is measured with the threads that torch has. A peak so found is what a program reaches, somewhat less than a
    data sheet says."""
    is_gpu = device.type == "cuda"
    side = 8192 if is_gpu else 1024
    x, large = torch.randn(side, side, device=device), torch.empty(2**28 if is_gpu else 2**24, device=device)
    small = torch.zeros(1, device=device)
    flops = 2.0 * side**3
    columns: dict[str, Any] = {"generation": _generation(device), "processors": _processors(device)}
    columns["fp32"] = _rounded(flops / _seconds(lambda: x @ x, device) / 1e12)
    if is_gpu:
        if torch.cuda.get_device_capability(device)[0] >= 8:
            columns["tf32"] = _rounded(flops / _seconds(lambda: _in_tf32(x), device) / 1e12)
        half = x.half()
        columns["fp16"] = _rounded(flops / _seconds(lambda: half @ half, device) / 1e12)
        columns["memory_gb"] = _rounded(torch.cuda.get_device_properties(device).total_memory / 1e9)
    else:
        columns["memory_gb"] = _rounded(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9)
    columns["gbytes_per_s"] = _rounded(2 * large.numel() * 4 / _seconds(large.clone, device) / 1e9)
    columns["launch_us"] = _rounded(_seconds(lambda: [small.add_(1) for _ in range(100)], device) / 100 * 1e6)
    columns["host"] = "pcie4" if is_gpu else "shared-memory"
    gpus = range(torch.cuda.device_count()) if is_gpu else range(0)
    index = device.index or 0
    columns["peer"] = all(torch.cuda.can_device_access_peer(index, other) for other in gpus if other != index)
    return columns


def _in_tf32(x: torch.Tensor) -> torch.Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return x @ x
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of some times: what disturbs only adds."""
    times = []
    for _ in range(_ROUNDS):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads()


_GENERATIONS = {3: "kepler", 5: "maxwell", 6: "pascal", 7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell"}


def _generation(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return {(7, 5): "turing", (8, 9): "ada"}.get((major, minor), _GENERATIONS.get(major, "blackwell"))
