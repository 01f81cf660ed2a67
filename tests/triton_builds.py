"""Builds the kernels of batch norm by microbatch for a GPU, on a machine without one."""

import itertools
from typing import Any

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
from triton.compiler import ASTSource  # type: ignore[import-not-found]

from convoy.ops import microbatch_kernels as kernels

H100 = GPUTarget("cuda", 90, 32)
LAYOUTS = {
    "channels_last": {"inner": True, "height": 32, "width": 64},
    "contiguous": {"inner": False, "height": 2048, "width": 1},
}
TYPES = {
    "bf16": ("*bf16", "*fp32", tl.float32),
    "fp32": ("*fp32", "*fp32", tl.float32),
    "fp64": ("*fp64", "*fp64", tl.float64),
}


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """Its PTX, with all pointers and sizes divisible by 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants and name != "splits"
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    ptx: str = triton.compile(ASTSource(kernel, signature, values, aligned), target=H100).asm["ptx"]
    return ptx


def main() -> None:
    for (name, (x, wide, dtype)), (layout, options) in itertools.product(TYPES.items(), LAYOUTS.items()):
        types = dict.fromkeys(("channels", "positions", "splits", "number"), "i32") | {
            "starts": "*i64",
            "counter": "*i64",
        }
        types |= dict.fromkeys(("x", "y", "gradient", "dx"), x)
        types |= dict.fromkeys(
            ("weight", "bias", "partial", "statistics", "sums", "terms", "running_mean", "running_var"), wide
        )
        for kernel in (kernels._moments, kernels._normalize, kernels._gradient_sums, kernels._input_gradient):
            ptx = build(kernel, types, {**options, "dtype": dtype})
            assert "ld.global.v" in ptx, f"{kernel.__name__}, {name}, {layout}: one number at a time"
        block = {"width": 64, "dtype": dtype}
        build(kernels._combine, types, {**block, "eps": 1e-5})
        build(kernels._follow, types, {**block, "momentum": 0.1, "counter": None})
        build(kernels._follow, types, {**block, "momentum": 0.0})


if __name__ == "__main__":
    main()
