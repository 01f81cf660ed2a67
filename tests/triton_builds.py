"""Builds Convoy's kernels for a GPU, on a machine without one."""

import itertools
from typing import Any

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
from triton.compiler import ASTSource  # type: ignore[import-not-found]

from convoy.ops import microbatch_kernels as kernels
from convoy.ops import random_kernels

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
ANY = ("splits", "blocks", "layer", "bound")
"""Numbers that are divisible by nothing."""


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """Its PTX, with all pointers and most sizes divisible by 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants and name not in ANY
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
    random_numbers()


def random_numbers() -> None:
    types = {"keys": "*i32", "layers": "*i32", "found": "*i32", "part": "*i32"}
    types |= dict.fromkeys(("layer", "bound", "count", "channels", "positions", "blocks", "samples"), "i32")
    for x, _, dtype in TYPES.values():
        for inner, by_channel, constants in itertools.product((False, True), (False, True), ({}, {"part": None})):
            options = {"kept": 1 / 0.7, "inner": inner, "by_channel": by_channel, "width": 1024, "dtype": dtype}
            ptx = build(random_kernels._drop, types | {"x": x, "y": x}, options | constants)
            assert "ld.global.v" in ptx and "st.global.v" in ptx, f"dropout, {x}: one number at a time"
            assert (".f64" in ptx) == (x == "*fp64"), f"dropout, {x}: in another precision"
            assert ("cvt.rn.bf16" in ptx) == (x == "*bf16"), f"dropout, {x}: not rounded to nearest"
    build(random_kernels._one_for_each, types, {"width": 256})


if __name__ == "__main__":
    main()
