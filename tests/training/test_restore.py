"""What a run has trained, in the hands of its user: the network, the transform and the classes, without the data."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from convoy.checkpoint.store import CheckpointStore
from convoy.cli import main
from convoy.data import evaluation_batches
from convoy.errors import ConvoyError
from convoy.training.restore import evaluate_run, evaluation_data, load_run
from ranks import run_ranks
from tiny import train_on_pictures, write_mnist, write_pictures
from whole_runs import train_here

CPU = torch.device("cpu")


SETTINGS = {
    "small pictures of one size, in memory": ((40, 30), ["--set", "data.resize=29"]),
    "in memory, made grey before they are resized": ((40, 30), ["--set", "data.channels=1"]),
    "large ones, read when they are needed": ((90, 70), ["--set", "data.resize=32"]),
    "large ones in grey, resized otherwise": (
        (90, 70),
        ["--set", "data.channels=1", "--set", "data.augment.interpolation=bicubic"],
    ),
    "averaged weights": ((40, 30), ["--set", "ema.decay=0.5", "--channels-last"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("size, settings", SETTINGS.values(), ids=SETTINGS)
def test_network_and_transform_give_the_evaluations_logits(
    size: tuple[int, int], settings: list[str], tmp_path: Path
) -> None:
    data = write_pictures(tmp_path / "data", size=size)
    out = train_on_pictures(data, tmp_path / "run", *settings)
    recorded = load_run(out)
    opened, _ = evaluation_data(recorded)
    (batch,) = evaluation_batches(opened, recorded.recipe.data, batch=100)
    top1 = json.loads((out / "summary.json").read_text())["top1"]
    moved = data.rename(tmp_path / "away")
    run = load_run(out)  # without its data
    assert run.classes == ["a", "b", "c"] and not run.network.training
    files = [str(moved / opened.test.name(i)) for i in range(len(opened.test))]
    ways = [
        [run.transform(file) for file in files],
        [run.transform(Path(file)) for file in files],
        [run.transform(Image.open(file)) for file in files],
        [run.transform(np.asarray(Image.open(file))) for file in files],
    ]
    for samples in ways:
        assert samples[0].shape == batch.images.shape[1:] and samples[0].dtype == torch.float32
        images = torch.stack(samples)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (opened.mean, opened.std))
        assert torch.equal((images * std + mean).mul(255).round().to(torch.uint8), batch.images)
    with torch.inference_mode():
        right = run.network(images).argmax(1) == batch.labels
    assert right.float().mean().item() == pytest.approx(top1)


def test_pictures_are_turned_upright_once(tmp_path: Path) -> None:
    out = train_on_pictures(write_pictures(tmp_path / "data"), tmp_path / "run")
    run = load_run(out)
    assert run.given.in_memory
    upright = Image.fromarray(np.random.default_rng(1).integers(0, 255, (30, 40, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned by 90°
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "x.png", exif=exif)
    assert torch.equal(run.transform(tmp_path / "x.png"), run.transform(upright))


def test_nobodys_random_numbers_change(tmp_path: Path) -> None:
    out = train_on_pictures(write_pictures(tmp_path / "data"), tmp_path / "run")
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    load_run(out)
    assert torch.equal(torch.rand(4), wanted)


def test_what_is_no_run_or_no_picture_is_refused(tmp_path: Path) -> None:
    out = train_on_pictures(write_pictures(tmp_path / "data"), tmp_path / "run")
    run = load_run(out)
    (tmp_path / "x.png").write_text("x")
    for picture, words in {
        str(tmp_path / "none.png"): r"none\.png cannot be read \(No such file or directory\): mend",
        str(tmp_path / "x.png"): "is no picture in a known format",
        "\0": "cannot be read",
    }.items():
        with pytest.raises(ConvoyError, match=words):
            run.transform(picture)
    arrays = [np.zeros((4, 4, 3)), *(np.zeros(shape, np.uint8) for shape in ((4, 4, 4), (2, 4, 4, 3), (0, 4, 3)))]
    for array in arrays:
        with pytest.raises(ConvoyError, match="is no picture: give uint8"):
            run.transform(array)
    with pytest.raises(ConvoyError, match="a Tensor is no picture"):
        run.transform(torch.zeros(3, 4, 4))  # type: ignore[arg-type]
    with pytest.raises(ConvoyError, match="is no run directory"):
        load_run(tmp_path)
    environment = json.loads((out / "environment.json").read_text())
    (out / "environment.json").write_text(json.dumps(environment | {"input": {"classes": ["a"]}}))
    with pytest.raises(ConvoyError, match="does not say how pictures were prepared"):
        load_run(out)
    del environment["input"]  # as the first versions wrote it
    (out / "environment.json").write_text(json.dumps(environment))
    assert load_run(out).given == run.given
    (out / "weights.safetensors").unlink()
    with pytest.raises(ConvoyError, match=r"has no weights.safetensors yet: finish the run with"):
        load_run(out)


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averaged weights whose checkpoints two ranks wrote, each with a part of every weight."""
    tmp = tmp_path_factory.mktemp("checkpointed")
    often = {"evaluate_every": "2ba", "checkpoint.every": "1000ba", "checkpoint.keep": "99"}
    settings = often | {"epochs": "12ba", "parallel.plan": "filter=2", "ema.decay": "0.5"}
    run_ranks(train_here, 2, write_mnist(tmp / "data"), tmp / "run", settings)
    return tmp / "run"


def test_a_checkpoint_gives_the_network_that_was_evaluated_then(
    checkpointed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = load_run(checkpointed).network.state_dict()
    lines = map(json.loads, (checkpointed / "metrics.jsonl").read_text().splitlines())
    measured = {line["step"]: line for line in lines if line["split"] == "test"}
    summary = json.loads((checkpointed / "summary.json").read_text())
    steps = {"best": summary["best_step"], "last": 12, str(summary["best_step"]): summary["best_step"]}
    stopped = shutil.copytree(checkpointed, tmp_path / "stopped")  # as one is whose end has not come
    for file in ("weights.safetensors", "evaluation.json", "summary.json", "metrics.jsonl"):
        (stopped / file).unlink()
    for which, step in steps.items():
        assert main(["eval", str(stopped), "--checkpoint", which, "--json"]) == 0
        said = capsys.readouterr()
        assert said.err == f"the network is that of the checkpoint after {step} updates\n"
        (row,) = json.loads(said.out)
        assert (row["top1"], row["loss"]) == (measured[step]["top1"], pytest.approx(measured[step]["loss"], rel=1e-6))
    assert row["top1"] == summary["best_top1"] == max(line["top1"] for line in measured.values())
    last = load_run(stopped, "last").network.state_dict()
    assert all(torch.equal(last[name], tensor) for name, tensor in final.items())
    assert not (stopped / "evaluation.json").exists()  # that is of the final weights
    assert main(["export", str(stopped), "--checkpoint", "best", "--torch-export"]) == 0
    assert (stopped / "model-best.pt2").exists()
    assert main(["predict", str(stopped), "--checkpoint", "last", str(write_pictures(tmp_path / "x") / "val")]) == 0


def test_a_checkpoint_that_is_not_there_is_refused(checkpointed: Path, tmp_path: Path) -> None:
    stopped = shutil.copytree(checkpointed, tmp_path / "stopped")
    (stopped / "weights.safetensors").unlink()
    with pytest.raises(ConvoyError, match=r"--resume, or use its newest checkpoint \(--checkpoint last\)"):
        load_run(stopped)
    with pytest.raises(ConvoyError, match=r"has no checkpoint 11: .* an update that has one: .*, 12$"):
        load_run(stopped, 11)
    (shard, *_) = (stopped / "checkpoints/step-00000012/state").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConvoyError, match=r"step-00000012 is damaged"):
        load_run(stopped, "last")
    shutil.rmtree(stopped / "checkpoints")
    with pytest.raises(ConvoyError, match=r"has no checkpoint best: .* an update that has one: none$"):
        load_run(stopped, "best")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("subset")
    return train_on_pictures(write_pictures(tmp / "data"), tmp / "run")


def counted(run: Path, data: Path) -> list[int]:
    """Samples of each class that an evaluation on some data counts."""
    trained = load_run(run)
    opened, _ = evaluation_data(trained, str(data))
    counts: list[int] = evaluate_run(trained, opened, CPU).confusion.sum(1).tolist()
    return counts


@pytest.mark.slow
def test_data_with_some_of_the_classes(run: Path, tmp_path: Path) -> None:
    own = run.parent / "data"
    shutil.copytree(own / "val" / "c", tmp_path / "some" / "c")
    assert counted(run, tmp_path / "some") == [0, 0, 4]
    shutil.copytree(own / "train" / "a", tmp_path / "some" / "a")
    assert counted(run, tmp_path / "some") == [8, 0, 4]  # all of them: they have no split of their own
    assert counted(run, own / "val" / "b") == [0, 4, 0]
    assert counted(run, own / "val") == [4, 4, 4]
    assert counted(run, own) == [4, 4, 4]
    # The labels are the run's, and not those of the data by themselves.
    trained = load_run(run)
    opened, _ = evaluation_data(trained, str(tmp_path / "some"))
    assert opened.classes == ["a", "c"] and opened.test.labels.tolist() == [0] * 8 + [2] * 4


def test_classes_that_the_run_does_not_know_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run.parent / "data" / "val" / "a", tmp_path / "odd" / "dog")
    trained = load_run(run)
    for place in (tmp_path / "odd", tmp_path / "odd" / "dog"):
        with pytest.raises(ConvoyError, match=f"has the class 'dog', which .* knows a, b, c.*convoy predict {run}"):
            evaluation_data(trained, str(place))
    with pytest.raises(ConvoyError, match=r"0\.png is one picture, without a class to compare with: convoy predict"):
        evaluation_data(trained, str(tmp_path / "odd" / "dog" / "0.png"))


def test_the_runs_own_data_in_another_place_keep_their_split(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data") / "train"
    out = train_on_pictures(data, tmp_path / "run", "--set", "data.validation_fraction=0.25")
    trained_run = load_run(out)
    own, _ = evaluation_data(trained_run)
    moved = shutil.copytree(data, tmp_path / "moved")
    opened, notes = evaluation_data(trained_run, str(moved))
    assert [opened.test.name(i) for i in range(6)] == [own.test.name(i) for i in range(6)] and len(opened.test) == 6
    assert "6 of its 24 samples are held out" in notes[0]
    (moved / "a" / "0.png").unlink()
    opened, notes = evaluation_data(trained_run, str(moved))
    assert len(opened.test) == 23 and notes == ["moved has no split of its own: all of its 23 pictures are evaluated"]


def test_mnist_needs_no_folder(tmp_path: Path) -> None:
    data = write_mnist(tmp_path / "data")
    line = f"train tiny:TinyNet --data {data} --batch 24 --epochs 1 --set threads=1 --out {tmp_path / 'run'}"
    assert main(line.split()) == 0
    assert counted(tmp_path / "run", data) == [4] * 10


FORGED: dict[str, Any] = {
    "nothing": {},
    "a list": {"loop": [1]},
    "no scalars": {"optimizer": {"groups": []}},
    "words for groups": {"optimizer": {"scalars": {}, "groups": ["lr"]}},
    "a foreign count": {"loop": {"progress": {"nobody": 1}, "window": {}}},
    "a foreign cost": {"loop": {"progress": {"checkpoints": {"nobody": 1}}, "window": {}}},
    "other code": {"loop": {"progress": {}, "window": {}, "code": [1]}},
}


@pytest.mark.parametrize("forged", [None, *FORGED])
def test_other_values_with_checksums_that_fit_are_refused(
    run: Path, tmp_path: Path, forged: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(shutil.copytree(run, tmp_path / "run") / "checkpoints")
    last = store.load(store.steps()[-1])
    values = last.values if forged is None else {} if forged == "nothing" else last.values | FORGED[forged]
    store.save(replace(last, values=values))
    assert main(["train", str(tmp_path / "run"), "--resume"]) == (0 if forged is None else 2)
    said = capsys.readouterr().err
    words = (
        f"convoy: the checkpoint of update {last.step} holds other values than Convoy writes, though its checksums fit"
    )
    assert said.startswith(words if forged is not None else "") and said.count("\n") == (forged is not None)
    best = main(["eval", str(tmp_path / "run"), "--checkpoint", "best"])
    assert best == (2 if forged in ("nothing", "a list", "a foreign count", "a foreign cost", "other code") else 0)
    assert best == 0 or "holds other values" in capsys.readouterr().err
