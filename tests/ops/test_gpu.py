"""Convoy's own kernels for GPUs, on a machine without one; what they compute is tested beside what torch computes."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from convoy.ops import gpu


def test_where_triton_cannot_build_its_kernels_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory lacks nothing is decided: it may go well the next time, and the rounding of updates hangs on it."""
    answers: list[Exception | None] = [
        RuntimeError("Failed to find C compiler.\nSet CC."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        None,
    ]

    def try_out(_: object) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    kernels = types.ModuleType("convoy.ops.batch_norm_kernels")
    kernels.try_out = try_out  # type: ignore[attr-defined]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    arguments = ("batch_norm_kernels", "batch norm by microbatch", torch.device("cuda"))
    match = r"^batch norm by microbatch runs .* more slowly, as they cannot be built here: Failed to find C compiler\.$"
    with pytest.warns(UserWarning, match=match):
        assert gpu._tried.__wrapped__(*arguments) is None
    gpu._tried.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        gpu._tried(*arguments)
    assert gpu._tried(*arguments) is kernels
    gpu._tried.cache_clear()


@pytest.mark.slow  # the interpreter shows in every run what the kernels compute
def test_triton_builds_for_gpus(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: its kernels are not built")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    subprocess.run([sys.executable, "-m", "triton_builds"], env=environment, check=True, timeout=150)
