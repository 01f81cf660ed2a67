"""Runs go on with the data and the code that began them: other ones are refused by what differs, or said."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from convoy.comm.ranks import Ranks
from convoy.data import dataset, pack
from convoy.data.config import DataConfig
from convoy.data.dataset import open_data, open_files
from convoy.data.packed import PackOptions
from convoy.errors import ConvoyError
from convoy.recipe.recipe import load_recipe
from convoy.training.build import build_for, build_model
from convoy.training.derived import fitting_batch
from ranks import run_ranks
from tiny import CHANGES, write_mnist, write_pictures
from training.scenarios import drop_checkpoints, files, refusals, session, summary
from whole_runs import train_here

TWO = {"epochs": "2ba"}
PICTURES = {"epochs": "1ba", "data.image_size": "28", "data.augment.crop": "none", "data.workers": "0"}

# Data


def test_too_large_a_batch_is_refused_before_pictures_are_decoded(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dataset, "_settle")
    with pytest.raises(ConvoyError, match="the batch of 97 is larger than the 96 samples: lower --batch to 96"):
        session(data, "batch=97")


def test_a_batch_that_nobody_chose_fits_the_data_and_a_chosen_one_does_not(data: Path) -> None:
    opened = session(data, "batch=128")
    assert (opened.recipe.batch, opened.quantities.sizes) == (64, (8,) * 8)
    assert "the batch is 64, not 128, as there are 96 training samples" in opened.notes
    recipe = opened.recipe.model_copy(update={"batch": 128})
    assert fitting_batch(recipe, 96, {"batch"}).batch == 128  # the negative control


def test_the_first_layer_whitens_patches_of_the_training_pictures(data: Path) -> None:
    config = {"data.path": str(data), "model.name": "tiny:TinyWhite", "model.whiten": "80"}
    recipe = load_recipe("default", [f"{key}={value}" for key, value in config.items()])
    opened = open_data(recipe.data)
    net, _ = build_for(recipe, opened, None, Ranks())
    images = torch.from_numpy(opened.train.subset(np.arange(80) * 96 // 80).pixels).permute(0, 3, 1, 2).double() / 255
    outputs = F.conv2d((images - opened.mean[0]) / opened.std[0], net.conv.weight).transpose(0, 1).flatten(1)
    products, variances = outputs @ outputs.T / outputs.shape[1], outputs[:4].square().mean(1)
    assert torch.allclose(products[:4, :4], torch.diag(variances), atol=1e-9) and variances.max() > 0.99
    assert torch.equal(outputs[4:], -outputs[:4]) and not net.conv.weight.requires_grad
    eigenvalues = 5e-4 * variances / (1 - variances)  # λ/(λ + ε), the largest first
    assert torch.equal(eigenvalues.argsort(descending=True), torch.arange(4))
    other = [f"{key}={value}" for key, value in (config | {"model.name": "tiny:TinyNet"}).items()]
    with pytest.raises(ConvoyError, match=r"whiten needs a first convolution with twice as many filters .* 18 of 8"):
        build_model(load_recipe("default", other), opened)


def repaint(folder: Path, pattern: str = "train/*/*.png") -> None:
    """Other pictures under the same names."""
    for number, file in enumerate(sorted(folder.glob(pattern))):
        Image.new("RGB", (40, 30), (number, 9, 9)).save(file)


def pack_it(folder: Path) -> None:
    kind, opened = open_files(DataConfig(path=str(folder)))
    pack.pack(kind, opened, folder / "packed", PackOptions(), None, 1)
    for name in ("train", "val"):
        shutil.rmtree(folder / name)
    for file in (folder / "packed").iterdir():
        file.rename(folder / file.name)


Change = Callable[[Path], object]


def train_on_hosts(folder: Path) -> list[str]:
    """What is said where the same path leads to other files, as on another host."""
    before = Path.cwd()
    os.chdir(folder / f"host-{os.environ['RANK']}")
    try:
        return refusals(Path("data"), folder / "run", [PICTURES])
    finally:
        os.chdir(before)


def test_other_data_on_another_host_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_mnist(tmp_path / f"host-{rank}" / "data", 96)
    file = tmp_path / "host-1/data/train-images-idx3-ubyte"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (first,), (second,) = run_ranks(train_on_hosts, 2, tmp_path, timeout=170)
    words = "the contents of the training samples differ between rank 1.*: give all hosts the"
    assert first == second and re.search(f"^the data are not the same everywhere: .*{words}", first), first
    assert not (tmp_path / "run").exists()


RESUMED: dict[str, tuple[Change, str | None]] = {
    "repainted": (repaint, "the sizes of the training files have changed"),
    "packed": (pack_it, None),
    "mended": (lambda data: repaint(data, "train/a/0.png"), None),
}


def test_a_run_goes_on_with_the_same_data_or_not_at_all(tmp_path: Path) -> None:
    data, out = write_pictures(tmp_path / "data"), tmp_path / "run"
    train_here(data, out, PICTURES)
    for name, (change, words) in RESUMED.items():
        changed = shutil.copytree(data, tmp_path / name)
        change(changed)
        (out / "summary.json").unlink(missing_ok=True)
        drop_checkpoints(out, -1)  # as at its beginning
        (out / "weights.safetensors").unlink(missing_ok=True)
        if words is None:
            said = train_here(changed, out, PICTURES, resume=True).said
            sentence = "1 of 36 files that were looked at have another size than when the run was begun"
            assert (sentence in said) == (name == "mended"), said
        else:
            with pytest.raises(ConvoyError, match=rf"not those that {out} was begun on \(.*{words}"):
                train_here(changed, out, PICTURES, resume=True)


# Code


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    CHANGES.clear()
    yield
    CHANGES.clear()


def test_other_code_is_refused_and_an_option_goes_on(data: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", TWO | {"model.name": "tiny:Changing"}
    train_here(data, out, settings)
    CHANGES.update(act=nn.ReLU, frozen=True)  # whose optimizer state is passed over
    before, changed = files(out), "layer act was silu and is relu"
    with pytest.raises(ConvoyError, match=rf"another than at update 2 \({changed}\): .*--accept-code-change"):
        train_here(data, out, settings, resume=True)
    assert files(out) == before
    longer, more = tmp_path / "longer", settings | {"extends": str(out), "epochs": "3ba"}
    said = train_here(data, longer, more, accept_code_change=True).said
    (sentence,) = [each for each in said if each.startswith("from update 3 on with other code")]
    assert sentence in summary(longer)["notes"]
