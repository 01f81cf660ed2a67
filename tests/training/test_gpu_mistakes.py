"""GPUs that are not there, that torch cannot use, or that lack memory: one sentence each, on stubs."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from convoy.cli import main
from convoy.cli.on_devices import device_of
from convoy.comm import backend
from convoy.comm.memory import memory_explained
from convoy.errors import ConvoyError, MachineError, TooLargeError
from convoy.training import choose_device, environment
from tiny import write_mnist
from whole_runs import train_here

OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_GPU = (
    "CUDA initialization: CUDA driver initialization failed, you might not have a CUDA gpu. (Triggered internally at "
    "../c10/cuda/CUDAFunctions.cpp:109.)"
)
LACKS = (
    "CUDA out of memory. Tried to allocate 98.00 MiB. GPU 0 has a total capacity of 7.91 GiB of which 3.50 MiB is free."
)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    backend.gpus.cache_clear()
    environment._say_once.cache_clear()
    yield
    backend.gpus.cache_clear()


def stub(patch: pytest.MonkeyPatch, number: int, warning: str = "") -> list[torch.device]:
    """GPUs, and which of them became the current one."""
    made_current: list[torch.device] = []

    def is_available() -> bool:
        if warning:
            warnings.warn(warning, stacklevel=2)
        return number > 0

    patch.setattr(torch.cuda, "is_available", is_available)
    patch.setattr(torch.cuda, "device_count", lambda: number)
    patch.setattr(torch.cuda, "set_device", made_current.append)
    return made_current


def test_a_gpu_that_is_named_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made_current = stub(monkeypatch, 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert made_current == [torch.device("cuda:1")]


@pytest.mark.parametrize(
    ("number", "name", "words"),
    [
        (0, "cuda", "--device cuda is not here: torch sees 0 GPUs; use --device cpu"),
        (2, "cuda:7", "--device cuda:7 is not here: torch sees 2 GPUs; use --device cpu"),
    ],
)
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, number: int, name: str, words: str) -> None:
    stub(monkeypatch, number)
    with pytest.raises(ConvoyError, match=words):
        choose_device(name)
    with pytest.raises(ConvoyError, match=words):  # of a rank
        device_of(name, torch.device("cpu"), 2)


@pytest.mark.parametrize("name", [None, "cuda"])
def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    stub(monkeypatch, 0, OLD)
    words = r"driver on your system is too old \(found version 11040\) for this torch, .*update the driver"
    for _ in range(2):  # torch says it once
        with pytest.raises(ConvoyError, match=words):
            choose_device(name)
    with pytest.raises(ConvoyError, match=words):
        device_of(name, torch.device("cpu"), 2)
    assert choose_device("cpu") == device_of("cpu", torch.device("cpu"), 2) == torch.device("cpu")


def test_a_driver_without_a_gpu_is_only_mentioned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, 0, NO_GPU)
    for _ in range(2):
        assert choose_device(None) == device_of(None, torch.device("cpu"), 2) == torch.device("cpu")
    words = "CUDA driver initialization failed, you might not have a CUDA gpu"
    assert capsys.readouterr().err == f"convoy: no GPU is used: {words}\n"
    with pytest.raises(ConvoyError, match=f"--device cuda is not to be used: {words}"):
        choose_device("cuda")


def test_a_driver_of_which_torch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        raise RuntimeError(OLD.removeprefix("CUDA initialization: "))

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert "found version 11040) for this torch" in backend.gpus().why


def test_without_gpus_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, 0)
    assert choose_device(None) == torch.device("cpu")


def test_the_command_says_it_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, 0, OLD)
    data = write_mnist(tmp_path / "data")
    assert main(["train", "tiny:TinyNet", "--data", str(data), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("convoy: torch cannot use the GPUs here: The NVIDIA driver") and "\n" not in said


def hungry(patch: pytest.MonkeyPatch, allowed: int, least: int) -> None:
    """Linear layers lack memory in training, from a number of passes on, of so many samples or more."""
    before, passes = nn.Linear.forward, 0

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        nonlocal passes
        if self.training and len(x) >= least:
            passes += 1
            if passes > allowed:
                raise torch.OutOfMemoryError(LACKS)
        return before(self, x)

    patch.setattr(nn.Linear, "forward", forward)


NEEDED = (
    "it asked for 98.00 MiB where 3.50 MiB of 7.91 GiB were free; smaller microbatches, a plan over more devices or"
)


@pytest.mark.parametrize(
    ("allowed", "least", "where", "kind"),
    [
        (0, 1, "before the first update, layer head", TooLargeError),
        (0, 20, "update 1, forward pass of layer head", TooLargeError),
        (5, 20, "update 3, forward pass of layer aux", MachineError),  # it may go well again
    ],
)
def test_memory_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: int, least: int, where: str, kind: type[ConvoyError]
) -> None:
    hungry(monkeypatch, allowed, least)
    data = write_mnist(tmp_path / "data")
    with pytest.raises(ConvoyError) as caught:
        train_here(data, tmp_path / "run", {"epochs": "4ba"})
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"the device ran out of memory ({where}): {NEEDED}")
    if allowed or least > 1:
        assert "ran out of memory" in (tmp_path / "run" / "summary.json").read_text()


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="odd"), memory_explained(0, 1):
        raise RuntimeError("odd")
