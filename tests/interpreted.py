"""Triton's kernels on a machine without a GPU: run by Triton's interpreter (`conftest.py` has it interpret)."""

import functools
import importlib
import os
from typing import Any

import pytest


@functools.cache
def kernels() -> dict[str, Any]:
    """The modules of kernels, by name; skips the test where Triton is not installed, and where a GPU is, whose tests
    need them compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here, whose tests need the kernels compiled: TRITON_INTERPRET=1 runs these instead")
    pytest.importorskip("triton", reason="Triton is not installed: its kernels are not run")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Scalars are arrays of one number there, which since NumPy 2.4 are no indices."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    from convoy.ops import batch_norm_kernels, random_kernels

    assert isinstance(random_kernels._random_bits, interpreter.InterpretedFunction), "Triton was imported to compile"
    return {"batch_norm": batch_norm_kernels, "random": random_kernels}
