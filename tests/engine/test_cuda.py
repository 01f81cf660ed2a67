"""The engine on a GPU: several ranks share one and speak over gloo; the reference is one device on the same GPU.

    python -m pytest tests/engine/test_cuda.py

`CONVOY_TEST_DEVICE=cpu` runs all of it on the CPU, to try the suite itself.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import all_distances
from own_loops import world_of
from test_autocast import is_close

from ranks import run_ranks
from started import ENVIRONMENT, command, digest, finish
from tiny import write_mnist

DEVICE = os.environ.get("CONVOY_TEST_DEVICE", "cuda:0")
"""`cpu` runs the suite where there is no GPU, to try the suite itself."""


def steady(run: Callable[..., Any], *args: Any) -> Any:
    """With kernels that give the same bits every time, and float32 that is float32."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    result = run(*args)
    if DEVICE != "cpu":
        torch.cuda.empty_cache()  # the ranks' processes live on, and share the memory
    return result


pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    pytest.mark.timeout(300),
]
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "sample=2": [(net, {}) for net in ("dropping", "resnet18")],
    "filter=2": [(net, {}) for net in ("dense", "depthwise", "shuffle", "permuted", "alexnet")],
    "channel=2": [(net, {}) for net in ("squeeze-excite", "root-mean-square")],
    "height=2": [("dropping", {}), ("squeezenet1_1", {}), ("resnet18", {"size": 64})],
    **{plan: [("dense", {})] for plan in ("width=2", "owt=2", "sample=2,filter=2", "sample=2,height=2", "stage=2")},
}


@pytest.mark.parametrize("plan", CASES)
def test_training_is_that_of_one_device(plan: str) -> None:
    cases = [(net, plan, {"device": DEVICE} | options) for net, options in CASES[plan]]
    for found in run_ranks(steady, world_of(plan), all_distances, cases, timeout=250):
        assert not {case[0]: errors for case, errors in zip(cases, found, strict=True) if errors}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", ["filter=2", "height=2"])
def test_autocast_is_as_precise_as_on_one_device(plan: str, dtype: torch.dtype) -> None:
    assert not any(run_ranks(steady, 2, is_close, "resnet18", plan, dtype, 64, DEVICE, timeout=200))


@pytest.mark.parametrize("model", ["tiny:TinyNet", "resnet18"])
def test_reproducible_runs_have_the_same_weights(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "0")
    data, kind, digests = write_mnist(tmp_path / "data"), DEVICE.partition(":")[0], set()
    for devices in ("1", "2", "4"):
        out, on = tmp_path / devices, ["--device", kind, "--devices", devices, "--set", "data.channels=3"]
        finish(command(data, out, *on, model=model, epochs="6ba"))
        assert kind in json.loads((out / "environment.json").read_text())["device"]
        digests.add(digest(out))
    assert len(digests) == 1
