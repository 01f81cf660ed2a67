"""The engine on a GPU: several ranks share one and speak over gloo; the reference is one device on the same GPU.

    python -m pytest tests/engine/test_cuda.py

`CONVOY_TEST_DEVICE=cpu` runs all of it on the CPU, to try the suite itself.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import SEED, all_distances, build
from low_precision import is_close
from own_loops import world_of
from torch import Tensor

import convoy
from ranks import run_ranks
from started import ENVIRONMENT, command, digest, finish
from tiny import write_mnist

DEVICE = os.environ.get("CONVOY_TEST_DEVICE", "cuda:0")
"""`cpu` runs the suite where there is no GPU, to try the suite itself."""


@contextlib.contextmanager
def steady() -> Iterator[None]:
    """Kernels that give the same bits every time, and float32 that is float32."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    if DEVICE != "cpu":
        torch.cuda.empty_cache()  # the ranks' processes live on, and share the memory


def exact(cases: list[tuple[str, Any, dict[str, Any]]]) -> list[dict[str, float]]:
    """What differs between training under plans and on one device, on the same GPU."""
    with steady():
        return all_distances([(net, plan, {"device": DEVICE} | options) for net, plan, options in cases])


def dropped(plan: str, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of this rank's part and whole gradients of a network with dropout, in float64, on the CPU."""
    with steady():
        model = build("dropping")[0].to(device)
        images = torch.randn(6, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
        net = convoy.parallelize(model, plan, example=images, seed=SEED)
        mine = convoy.local_samples(net, len(images))
        loss = F.cross_entropy(net(images[mine]), torch.arange(6, device=device)[mine])
        loss.backward()
        return loss.detach().cpu(), {name: gradient.cpu() for name, gradient in convoy.gradients(net).items()}


def low_precision(*args: Any) -> str:
    """`low_precision.is_close` on the GPU."""
    with steady():
        return is_close(*args, DEVICE)


pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    pytest.mark.timeout(300),
]
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "sample=2": [(net, {}) for net in ("lenet", "dropping", "resnet18")],
    "filter=2": [(net, {}) for net in ("dense", "depthwise", "shuffle", "permuted", "alexnet")],
    "channel=2": [(net, {}) for net in ("squeeze-excite", "root-mean-square")],
    "height=2": [*((net, {}) for net in ("dense", "dropping", "squeezenet1_1")), ("resnet18", {"size": 64})],
    "width=2": [("resnet18", {"size": 64})],
    "owt=2": [("lenet", {})],
    "sample=2,filter=2": [("dense", {})],
    "sample=2,height=2": [("dense", {})],
    "stage=2": [("dense", {})],
}


@pytest.mark.parametrize("plan", CASES)
def test_training_is_that_of_one_device(plan: str) -> None:
    cases = [(net, plan, options) for net, options in CASES[plan]]
    for found in run_ranks(exact, world_of(plan), cases, timeout=250):
        assert not {case[0]: errors for case, errors in zip(cases, found, strict=True) if errors}


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "height=2"])
def test_dropout_masks_are_those_of_the_cpu(plan: str) -> None:
    (loss, want), *_ = run_ranks(dropped, 1, "serial", "cpu")
    found = run_ranks(dropped, 2, plan, DEVICE, timeout=120)
    losses = torch.stack([part for part, _ in found])
    torch.testing.assert_close(losses.mean(), loss, rtol=1e-10, atol=0.0)  # 3 samples each, or all 6 on both
    for _, gradients in found:
        torch.testing.assert_close(gradients, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", ["filter=2", "height=2"])
def test_autocast_is_as_precise_as_on_one_device(plan: str, dtype: torch.dtype) -> None:
    assert not any(run_ranks(low_precision, 2, "resnet18", plan, dtype, 64, timeout=200))


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
