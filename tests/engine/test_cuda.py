"""The engine on a GPU: several ranks share one and speak over gloo; the reference is one device on the same GPU.

    python -m pytest tests/engine/test_cuda.py

`CONVOY_TEST_DEVICE=cpu` runs all of it on the CPU, to try the suite itself.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_ranks import DEVICE, bits, dropped, exact, low_precision

from convoy.plans.plan import Plan
from ranks import RankFailed, run_ranks
from small_nets import SMALL_NETS

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    pytest.mark.timeout(300),
]

PLANS = ["sample=2", "filter=2", "channel=2", "height=2", "width=2", "sample=2,filter=2", "owt=2"]
NETS = ["lenet", *SMALL_NETS, "squeezenet1_1", "resnet18", "alexnet"]
LARGE = {("resnet18", "height=2"): 64, ("resnet18", "width=2"): 64}


def check(net: str, plan: str, **options) -> None:
    world = Plan.parse(plan).mesh.num_devices
    for found in run_ranks(exact, world, net, plan, options, timeout=200):
        assert found.ok, found


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", NETS)
def test_training_is_that_of_one_device(net: str, plan: str) -> None:
    if (net, plan) == ("lenet", "channel=2"):
        with pytest.raises(RankFailed, match="has only 1 input channel"):
            check(net, plan)
        return
    check(net, plan, size=LARGE.get((net, plan)))


@pytest.mark.parametrize("plan", ["sample=3", "filter=3", "height=3", "sample=2,height=2", "sample=4"])
def test_more_ranks_on_the_gpu(plan: str) -> None:
    check("dense", plan)


def test_a_broken_engine_is_noticed_on_the_gpu() -> None:
    options = {"sabotage": "missing_gradient_sum", "batches": (5, 7)}
    assert not any(found.ok for found in run_ranks(exact, 2, "dense", "sample=2", options, timeout=200))


def test_random_numbers_are_those_of_the_cpu() -> None:
    here, there = run_ranks(bits, 1, "cpu")[0], run_ranks(bits, 1, DEVICE, timeout=120)[0]
    assert torch.equal(here, there)
    assert here.unique().numel() > 100_000


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
    for found in run_ranks(low_precision, 2, "resnet18", plan, dtype, 64, timeout=200):
        assert found.dtype == dtype
        assert found.ok, found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random pictures of 28 by 28 pixels, as files of MNIST's kind."""
    folder = tmp_path_factory.mktemp("cuda") / "data"
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, number in (("train", 96), ("t10k", 20)):
        pixels = random.integers(256, size=(number, 28, 28), dtype=np.uint8)
        header = b"".join(size.to_bytes(4, "big") for size in (0x803, number, 28, 28))
        (folder / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = np.arange(number, dtype=np.uint8) % 10
        header = b"".join(size.to_bytes(4, "big") for size in (0x801, number))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return folder


def trained(data: Path, out: Path, model: str, devices: int) -> str:
    """Digest of the weights of a run."""
    kind = DEVICE.partition(":")[0]
    command = [sys.executable, "-m", "convoy", "train", model, "--data", str(data), "--out", str(out)]
    command += ["--device", kind, "--devices", str(devices), "--reproducible", "--batch", "24", "--epochs", "6ba"]
    command += ["--lr", "0.05", "--workers", "0", "--set", "microbatch=3", "--set", "data.channels=3"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert kind in json.loads((out / "environment.json").read_text())["device"]
    return hashlib.sha256((out / "weights.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("model", ["tiny:TinyNet", "resnet18"])
def test_reproducible_runs_have_the_same_weights(pictures: Path, tmp_path: Path, model: str) -> None:
    if model == "tiny:TinyNet":
        pytest.importorskip("tiny")
    digests = {devices: trained(pictures, tmp_path / f"on-{devices}", model, devices) for devices in (1, 2, 4)}
    assert len(set(digests.values())) == 1, digests
