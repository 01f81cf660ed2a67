"""Builds Convoy's kernels for GPUs that are not here, with what the operations launch them with.

    python -m triton_builds

in a process in which Triton does not interpret. Batch norm and random bits run on tensors of the CPU, and what would
launch a kernel builds it.
"""

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
from triton.runtime import driver  # type: ignore[import-not-found]
from triton.runtime.jit import JITFunction  # type: ignore[import-not-found]

from convoy.ops import batch_norm as batch_norm_module
from convoy.ops import batch_norm_kernels, random_bits, random_kernels
from convoy.ops.batch_norm import normalize, normalize_each
from convoy.ops.batch_norm_torch import Norm
from convoy.ops.kernel import Holders
from convoy.ops.statistics import Running

LAST, FIRST = torch.channels_last, torch.contiguous_format
VARIANTS = [(80, torch.bfloat16, LAST), (90, torch.bfloat16, FIRST), (90, torch.float32, LAST)]
VARIANTS += [(90, torch.float64, LAST), (100, torch.bfloat16, LAST)]
NO_ACTIVATIONS = ("_random_bits",)
"""Kernels that read no activations."""


class Gpu:
    """Stands for Triton's driver of one."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def build(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """In place of a launch."""
    compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
    built.setdefault((kernel.__module__, kernel.__name__), set()).add(compiled.asm["ptx"])
    return compiled


launch, JITFunction.run = JITFunction.run, build
built: dict[tuple[str, str], set[str]] = {}
"""PTX by module and name of the kernel."""


def kernels_of(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Kernels that are to be launched: those that no other one calls."""
    kernels = {name: kernel for name, kernel in vars(module).items() if isinstance(kernel, JITFunction)}
    for name in kernels:
        if not any(re.search(rf"(?<!def )\b{name}\(", kernel.src) for kernel in kernels.values()):
            yield module.__name__, name


def batch_norm(dtype: torch.dtype, order: torch.memory_format, affine: bool, relu: bool, counts: bool) -> None:
    """By microbatch, with and without running statistics and something to add, and over two ranks, and over many."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.ones(16, 64, 32, 32).to(dtype, memory_format=order).requires_grad_()
    weight, bias = (torch.ones(64, dtype=wide, requires_grad=True) if affine else None for _ in range(2))
    running = Running(*torch.ones(2, 64, dtype=wide), None if counts else 0.1, torch.tensor(1))
    holders = Holders(dist.group.WORLD, (x.numel() // 64,) * 2)  # type: ignore[arg-type]
    norm = Norm(weight, bias, None, 1e-5, relu)
    for y in (
        normalize_each(x, norm, (8, 8))[0],
        normalize(x, norm, running),
        normalize(x, norm._replace(residual=x.detach()), None),
        normalize(x, norm, running, holders),
    ):
        y.backward(torch.ones_like(y))


def check(name: str, dtype: torch.dtype, ptx: str) -> None:
    """What makes a kernel fast and right."""
    if name not in NO_ACTIVATIONS:
        assert "ld.global.v" in ptx, f"{name}, {dtype}: one number at a time"
    if name in ("_moments", "_gradient_sums"):
        before, counted, after = ptx.partition("atom.global.gpu.acq_rel.add")
        assert counted, f"{name}: what the last program adds up need not be there"
        assert "bar.sync" in before[before.rindex("st.global") :], f"{name}: counted before all is written"
        assert "bar.sync" in after[: after.index("ld.global")], f"{name}: read before all others are counted"
        assert "ld.global.cg" in after and "ld.global.nc" not in after, f"{name}: read from an old copy"


def main() -> None:
    batch_norm_module.batch_norm_kernels = lambda x: batch_norm_kernels  # type: ignore[assignment]
    batch_norm_module.at_once = lambda x: True
    random_bits._fused, random_bits._kernels = lambda x: True, lambda x: random_kernels  # type: ignore[assignment]
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    for capability, dtype, order in VARIANTS:
        driver.set_active(Gpu(capability))
        built.clear()
        batch_norm(dtype, order, affine=True, relu=True, counts=False)
        for part in (None, torch.arange(100, dtype=torch.int32)):
            random_bits.random_bits(torch.zeros(4, 2, dtype=torch.int32), 3, 100, part)
        if order is FIRST:
            batch_norm(dtype, order, affine=False, relu=False, counts=True)
        assert set(built) == {*kernels_of(batch_norm_kernels), *kernels_of(random_kernels)}
        for (_, name), texts in built.items():
            for ptx in texts:
                assert f".target sm_{capability}" in ptx
                check(name, dtype, ptx)
        print(f"sm_{capability}, {dtype}, {order}: {sum(map(len, built.values()))} kernels")


if __name__ == "__main__":
    main()
