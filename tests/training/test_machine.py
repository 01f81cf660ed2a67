"""What a device can do and a recipe leaves open, GPUs that are not there, signals, and metrics on a full disk."""

import json
import os
import resource
import signal
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import convoy
from convoy.cli.on_devices import device_of
from convoy.comm.joining import gpus
from convoy.comm.ranks import Ranks
from convoy.engine.parallelize import take_part
from convoy.errors import ConvoyError
from convoy.recipe.recipe import Recipe, load_recipe
from convoy.training import choose_device, environment, precision
from convoy.training.environment import join_ranks
from convoy.training.log import MetricsWriter
from convoy.training.precision import Scaler, Settled, settle
from convoy.training.stop import Interrupt
from ranks import run_ranks
from training.scenarios import config, summary, weights
from whole_runs import train_here

CPU = torch.device("cpu")

# What a recipe leaves open follows the device that can least

H100, V100 = ("cuda", "NVIDIA H100", True), ("cuda", "Tesla V100", False)
NEW, OLD = ("cpu", "this CPU", True), ("cpu", "this CPU", False)
GPU_SAYS = [
    "precision bf16: layers compute in bf16, weights stay in fp32 (--precision fp32 turns it off)",
    "channels_last: channels lie innermost, as bf16 convolutions on GPUs take them (--channels-first turns it off)",
    "fused optimizer: the update of all weights is one kernel (--set optimizer.fused=false turns it off)",
]
SETTLED: list[tuple[list[tuple[str, str, bool]], str, tuple[object, ...], list[str]]] = [
    ([H100] * 4, "precision=auto", ("bf16", True, True), GPU_SAYS),
    ([H100], "optimizer.name=lars optimizer.lr=1", ("bf16", True, "none"), GPU_SAYS[:2]),
    ([H100], "reproducible=true", ("fp32", False, None), ["precision fp32: a reproducible run does not follow"]),
    ([H100, V100], "", ("fp32", False, None), ["precision fp32: Tesla V100, the device of rank 1, has no bf16"]),
    ([NEW], "precision=auto", ("bf16", False, True), ["precision "]),
    ([OLD], "reproducible=true", ("fp32", False, None), []),
    ([OLD], "precision=auto", ("fp32", False, True), ["precision fp32: this CPU has no bf16 in hardware: neither"]),
]


def recipe_of(*settings: str) -> Recipe:
    return load_recipe("default", ["model.name=tiny:TinyNet", *settings])


def chosen(recipe: Recipe) -> tuple[object, ...]:
    return recipe.precision, recipe.channels_last, getattr(recipe.optimizer, "fused", "none")


def test_what_is_open_follows_the_device_that_can_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_bf16", lambda device: True)
    for devices, settings, want, said in SETTLED:
        able = [precision._Ability(*device) for device in devices]
        ranks = Ranks(num=len(able))
        monkeypatch.setattr(precision, "_ability", lambda device, able=able: able[0])
        monkeypatch.setattr(Ranks, "gather", lambda self, value, able=able: able if self.num == len(able) else [value])
        found: Settled = settle(recipe_of(*settings.split()), CPU, ranks)
        assert chosen(found.recipe) == want and len(found.notes) == len(said)
        assert all(note.startswith(words) for note, words in zip(found.notes, said, strict=True)), found.notes
        assert settle(found.recipe, CPU, ranks).recipe == found.recipe


def test_a_run_keeps_what_was_chosen_and_goes_on_with_it_elsewhere(data: Path, tmp_path: Path) -> None:
    gpu, cpu, four = tmp_path / "gpu", tmp_path / "cpu", {"epochs": "4ba"}
    with pytest.MonkeyPatch.context() as patch:  # a GPU, as far as choices go
        patch.setattr(precision, "_ability", lambda device: precision._Ability(*H100))
        train_here(data, tmp_path / "whole", four)
        train_here(data, gpu, four, stop_at=2)
    found, kept = summary(tmp_path / "whole"), config(gpu)
    assert set(GPU_SAYS) <= set(found["notes"])
    rows = {row["name"]: row["value"] for row in found["derived"]}
    assert (rows["precision"], rows["memory format"], rows["optimizer"]) == ("bf16", "channels_last", "fused")
    assert (kept["precision"], kept["channels_last"], kept["optimizer"]["fused"]) == ("bf16", True, True)
    train_here(data, gpu, four, resume=True)  # a CPU, by a recipe that leaves all open
    assert alike(tmp_path / "whole", gpu)
    train_here(data, cpu, four, stop_at=2)
    assert (config(cpu)["precision"], config(cpu)["channels_last"]) == ("fp32", False)
    with pytest.raises(ConvoyError, match="was begun with precision=fp32 and cannot go on with precision=bf16"):
        train_here(data, cpu, four | {"precision": "bf16"}, resume=True)


def alike(a: Path, b: Path) -> bool:
    return all(torch.equal(tensor, weights(b)[name]) for name, tensor in weights(a).items())


def overflowing() -> list[tuple[Tensor, float]]:
    """Weights and the scale after each of three updates; in the second, rank 1's own gradient overflows."""
    torch.manual_seed(0)
    images, (ranks, device) = torch.ones(2, 3, 4, 4), join_ranks()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 6))
    take_part(net, "filter=2", images)  # as the trainer does: gradients do not agree by themselves
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler, ends = Scaler(device, "fp16", ranks.any), []
    for update in range(3):
        optimizer.zero_grad()
        scaler.scale(net(images).square().mean()).backward()
        if update == 1 and ranks.rank == 1:
            net[2].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        ends.append((torch.cat([p.flatten() for p in convoy.state_dict(net).values()]), scaler.get_scale()))
    return ends


def test_all_ranks_skip_an_update_in_which_one_overflows() -> None:
    (first, second, third), other = run_ranks(overflowing, 2)
    assert all(torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip((first, second, third), other, strict=True))
    assert torch.equal(first[0], second[0]) and not torch.equal(second[0], third[0])
    assert second[1] == first[1] / 2 == third[1]


# GPUs that are not there or that torch cannot use

TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update"
NO_GPU = "CUDA initialization: CUDA driver initialization failed, you might not have a CUDA gpu. (Triggered in x)"


def test_gpus_that_torch_cannot_use_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def there_are(number: int, warning: str = "") -> None:
        gpus.cache_clear()
        environment._say_once.cache_clear()
        warns = lambda: (warning and warnings.warn(warning, stacklevel=2)) or number > 0  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_available", warns)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    there_are(2)
    for choose in (choose_device, lambda name: device_of(name, CPU, 2)):
        with pytest.raises(ConvoyError, match="--device cuda:7 is not here: torch sees 2 GPUs; use --device cpu"):
            choose("cuda:7")
    there_are(0, NO_GPU)
    assert choose_device(None) == device_of(None, CPU, 2) == CPU
    words = "CUDA driver initialization failed, you might not have a CUDA gpu"
    assert capsys.readouterr().err == f"convoy: no GPU is used: {words}\n"
    with pytest.raises(ConvoyError, match=f"--device cuda is not to be used: {words}"):
        choose_device("cuda")
    there_are(0, TOO_OLD)
    with pytest.raises(ConvoyError, match=r"too old \(found version 11040\) for this torch, .*update the driver"):
        choose_device(None)
    assert choose_device("cpu") == CPU
    gpus.cache_clear()


# Signals


def test_a_signal_is_noted_once_and_a_second_one_acts_as_usual() -> None:
    number = signal.SIGTERM
    came, before = [], signal.signal(number, lambda number, frame: came.append(number))
    try:
        with Interrupt() as interrupt:
            assert interrupt.signal is None
            os.kill(os.getpid(), number)
            assert (interrupt.signal, came) == (number.name, [])
            os.kill(os.getpid(), number)
            assert came == [number]
        with Interrupt() as interrupt:
            interrupt.agreed = number.name  # the other ranks had it before, and it may come late
        os.kill(os.getpid(), number)
        assert (interrupt.signal, came) == (number.name, [number])
    finally:
        signal.signal(number, before)


# Metrics


def _on_a_full_disk(folder: Path) -> list[str]:
    said: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with MetricsWriter(folder / "metrics.jsonl", said.append, lambda done: None) as metrics:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
            for step in range(1, 9):
                metrics.write("train", step, 0.0, 0.0, loss=1.0)
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert (folder / "metrics.jsonl").stat().st_size == 300
            metrics.write("train", 9, 0.0, 0.0, loss=1.0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
            metrics.write("train", 10, 0.0, 0.0, loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return said


def test_metrics_that_do_not_fit_are_kept_and_written_later_in_order(tmp_path: Path) -> None:
    ((first, second, *_, last),) = run_ranks(_on_a_full_disk, 1, tmp_path)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 10))
    assert first.endswith("cannot be written (File too large): the metrics are kept until it can")
    assert second == "the metrics are written again, those that were kept too"
    assert last.startswith("the last metrics could not be written to ") and last.endswith("(File too large)")
