"""Fine-tuning: frozen layers, layers that are trained from some update on, and rates that fall with the depth."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ranks import run_ranks
from training.scenarios import Settings
from training.test_devices import distance, on_plan
from whole_runs import train_here, train_until

TUNED = {"model.name": "tiny:TinyResidual", "epochs": "5ba", "optimizer.layer_decay": "0.7", "clip_norm": "0.5"}
TUNED |= {"optimizer.freeze": "[conv, 'block:2ba']", "optimizer.groups": "[{parameters: '*.bias', lr_factor: 2}]"}


@pytest.mark.parametrize("plan", ["filter=2", "height=2", "sample=2", "stage=2"])
def test_layers_that_thaw_train_as_on_one_device(data: Path, tmp_path: Path, plan: str) -> None:
    settings = TUNED | ({"parallel.shares": "[3,1]"} if plan == "sample=2" else {})
    (want,) = on_plan(data, tmp_path / "serial", "serial", TUNED)
    for ended in on_plan(data, tmp_path / "run", plan, settings):
        assert ended.curve == pytest.approx(want.curve, rel=1e-6)  # recorded in float32
    assert distance(tmp_path / "run", tmp_path / "serial") < 1e-9
    if plan == "sample=2":
        for unlike in ("[conv, 'block:3ba']", "[conv, 'block.conv?:2ba']"):  # of the latter batch norm trains at once
            on_plan(data, tmp_path / unlike, plan, settings | {"optimizer.freeze": unlike})
            assert distance(tmp_path / unlike, tmp_path / "serial") > 1e-6
