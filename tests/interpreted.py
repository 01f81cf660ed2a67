"""Triton's kernels on a machine without a GPU: run by Triton's interpreter."""

import contextlib
import functools
import importlib
import os
import sys
from typing import Any

import pytest
import torch


@functools.cache
def kernels() -> dict[str, Any]:
    """The modules of kernels, by name; skips the test where Triton is not installed, or where a GPU is: modules that
    were imported to be interpreted stay so, and tests of the GPU would not see compiled ones."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, whose tests need the kernels compiled")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton is imported already: set TRITON_INTERPRET=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # which it reads when kernels are imported
        pytest.importorskip("triton", reason="Triton is not installed: its kernels are not run")
        with contextlib.suppress(ImportError):
            importlib.import_module("triton.experimental.gluon")  # which Triton itself imports when a kernel runs
        from convoy.ops import microbatch_kernels, random_kernels
    return {"microbatch": microbatch_kernels, "random": random_kernels}
