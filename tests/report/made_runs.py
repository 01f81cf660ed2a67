"""Run directories as the trainer writes them, made from formulas: with any damage."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from convoy.planner.comparison import GRADIENTS, Both, Comparison, Group

DIGITS = [str(digit) for digit in range(10)]
CONFIG = """\
model:
  name: lenet
data:
  path: mnist-mini
batch: 128
microbatch: 32
epochs: 4ep
seed: 3
loss:
  label_smoothing: 0.0
"""


def metrics() -> list[dict[str, Any]]:
    """The lines of a run of 124 updates, 31 of them an epoch: the loss falls with a power of the update."""
    lines: list[dict[str, Any]] = []
    for step in range(1, 125):
        loss, place = 2.3 * (1 + step / 4) ** -0.9, {"step": step, "epoch": step / 31, "time_s": 0.064 * step}
        if step % 4 == 0:
            line = {"loss": loss, "top1": 1 - 0.4 * loss, "images_per_s": 2000.0, "lr": 0.1, "data_wait_s": 0.01}
            lines.append({"split": "train", **place, **line})
        if step % 31 == 0:
            line = {"loss": 1.2 * loss, "top1": 1 - 0.3 * loss, "top5": 0.9, "images": 1000, "images_per_s": 2500.0}
            lines.append({"split": "test", **place, **line})
    return lines


def evaluation(classes: Sequence[str], *, each: int = 100, mistakes: int = 6) -> dict[str, Any]:
    """A final evaluation with some confusion between classes."""
    size, noise = len(classes), np.random.default_rng(1)
    table = np.zeros((size, size), dtype=np.int64)
    for true in range(size):
        wrong = noise.choice(size, size=noise.integers(0, max(2, each // 8)))
        np.add.at(table[true], wrong, 1)
        table[true, true] += each - len(wrong)
    worst = [
        {"sample": 7 * place, "name": f"image {7 * place}", "label": place % size, "predicted": (place + 1) % size}
        | {"probability": 0.999 - 0.03 * place, "picture": f"mistakes/{place:02d}.png"}
        for place in range(mistakes)
    ]
    results = {"images": int(table.sum()), "top1": float(np.trace(table) / table.sum()), "top5": 0.998, "loss": 0.12}
    return {"classes": list(classes), "confusion": table.tolist(), **results, "mistakes": worst}


SUMMARY: dict[str, Any] = {
    "status": "finished", "model": "lenet", "data": "mnist-mini", "parameters": 61_706, "flops": 833_000,
    "num_train": 4000, "num_test": 1000, "steps": 124, "total_steps": 124, "epochs": 4.0, "top1": 0.97, "top5": 0.998,
    "loss": 0.12, "best_top1": 0.972, "best_step": 93, "time_s": 134.2, "images_per_s": 2010.4,
    "data_wait_share": 0.012, "bad_images": [], "notes": [],
    "derived": [
        {"name": "learning rate", "value": 0.1, "formula": "0.2 · 128 / 256",
         "source": "linear scaling rule: Goyal et al., 2017"},
        {"name": "microbatch sizes", "value": [32, 32, 32, 32], "formula": "128 / 4", "source": ""},
    ],
}  # fmt: skip
ENVIRONMENT = {
    "command": "convoy train lenet --data mnist-mini --out runs/first", "convoy": "0.1.0", "torch": "2.13.0",
    "python": "3.11.9", "machine": "Linux x86_64", "device": "cpu", "threads": 2, "cores": 2,
    "started": "2026-03-01T10:00:00+00:00",
}  # fmt: skip


def summary(**changes: Any) -> dict[str, Any]:
    """A summary of a finished run."""
    return {**SUMMARY, **changes}


def write_run(
    folder: Path,
    *,
    config: str = CONFIG,
    lines: Sequence[dict[str, Any]] | None = None,
    results: dict[str, Any] | None = None,
    final: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
) -> Path:
    """A run directory below `folder` with the files that are given; `config.yaml` always."""
    run = folder / "first"
    (run / "mistakes").mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(config, encoding="utf-8")
    if lines is not None:
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for name, content in (("summary.json", results), ("evaluation.json", final), ("environment.json", environment)):
        if content is not None:
            (run / name).write_text(json.dumps(content), encoding="utf-8")
    for place, mistake in enumerate((final or {}).get("mistakes", [])):
        pixels = np.random.default_rng(place).integers(0, 256, (28, 28), dtype=np.uint8)
        Image.fromarray(pixels).save(run / mistake["picture"])
    return run


def complete_run(folder: Path, **changes: Any) -> Path:
    """A finished run with every file; `changes` replace some of them."""
    files = {"lines": metrics(), "results": summary(), "final": evaluation(DIGITS), "environment": ENVIRONMENT}
    return write_run(folder, **{**files, **changes})


def comparison(**changes: Any) -> Comparison:
    """Of a network of two layers; every prediction is twice what was measured."""

    def both(measured: float) -> Both:
        return Both(2 * measured, measured)

    parts = {"input": 1e-3, "forward": 4e-3, "backward": 8e-3, "rest": 1e-3, "packing": 0.0, "waiting": 3e-3}
    layers = Group("features.0", both(9e-3), both(2e-3)), Group("<b>fc</b>", both(3e-3), both(0.0))
    values: dict[str, Any] = {"model": "lenet", "plan": "sample=2", "devices": 2, "batch": 128, "rank": 1}
    values |= {"timed": 55, "watched": 3, "learned": 11, "update": both(17e-3)}
    values["groups"] = (*layers, Group(GRADIENTS, both(0.0), both(1e-3)))
    values |= {"parts": {name: both(seconds) for name, seconds in parts.items()}, "notes": ("said <i>so</i>",)}
    return Comparison(**{**values, **changes})
