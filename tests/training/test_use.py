"""What a run has trained, in the hands of its user: loaded, evaluated and asked, without the data and on any ranks."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from convoy.cli import main
from convoy.comm.ranks import Ranks
from convoy.data.folder import pictures
from convoy.data.loader import evaluation_batches
from convoy.plans.plan import Plan
from convoy.training.environment import join_ranks
from convoy.training.evaluation import mean_over_views
from convoy.training.restore import evaluate_run, evaluation_data, load_run
from convoy.training.use import Classifier, FileClasses, classify, export
from ranks import run_ranks
from tiny import train_on_pictures, write_pictures
from training.scenarios import lines, summary
from whole_runs import as_before, train_here

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three classes of pictures, in `data` beside it."""
    tmp = tmp_path_factory.mktemp("use")
    options = "--workers", "0", "--set", "data.resize=29", "--set", "evaluation_views=6"
    return train_on_pictures(write_pictures(tmp / "data"), tmp / "run", *options)


@pytest.fixture(scope="module")
def checkpointed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averaged weights whose checkpoints two ranks wrote, each with a part of every weight."""
    often = {"evaluate_every": "2ba", "checkpoint.every": "1000ba", "checkpoint.keep": "99"}
    settings = often | {"epochs": "12ba", "parallel.plan": "filter=2", "ema.decay": "0.5"}
    out = tmp_path_factory.mktemp("checkpointed") / "run"
    run_ranks(train_here, 2, data, out, settings)
    return out


def test_network_and_transform_give_the_evaluations_logits_without_the_data(run: Path) -> None:
    recorded = load_run(run)
    opened, _ = evaluation_data(recorded)
    (batch,) = evaluation_batches(opened, recorded.recipe.data, batch=100)
    data, moved = run.parent / "data", run.parent / "away"
    data.rename(moved)
    try:
        torch.manual_seed(3)
        loaded, drawn = load_run(run), torch.rand(4)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(4), drawn)  # nobody's random numbers change
        assert loaded.classes == ["a", "b", "c"] and not loaded.network.training
        files = [str(moved / opened.test.name(i)) for i in range(len(opened.test))]
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (opened.mean, opened.std))
        for way in (str, Path, Image.open, lambda file: np.asarray(Image.open(file))):
            images = torch.stack([loaded.transform(way(file)) for file in files])
            assert images.shape == batch.images.shape and images.dtype == torch.float32
            assert torch.equal((images * std + mean).mul(255).round().to(torch.uint8), batch.images)
    finally:
        moved.rename(data)
    with torch.inference_mode():
        padded, net = F.pad(images, (1, 1, 1, 1), "reflect"), loaded.network
        views = {1 / 4: [images], 1 / 8: [padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]]}
        logits = [weight * net(x) for weight, moved in views.items() for view in moved for x in (view, view.flip(3))]
        right = sum(logits).argmax(1) == batch.targets
    assert torch.allclose(mean_over_views(loaded.task, net, images, 6), sum(logits))
    assert not torch.allclose(net(images), sum(logits))
    assert right.float().mean().item() == pytest.approx(summary(run)["top1"])


def test_a_checkpoint_gives_its_network(checkpointed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final, summed = load_run(checkpointed).network.state_dict(), summary(checkpointed)
    measured = {step: (top1, loss) for step, top1, loss in lines(checkpointed, "step", "top1", "loss", split="test")}
    stopped = shutil.copytree(checkpointed, tmp_path / "stopped")  # as one is whose end has not come
    for file in ("weights.safetensors", "evaluation.json", "summary.json", "metrics.jsonl"):
        (stopped / file).unlink()
    for which, step in {"last": 12, "best": summed["best_step"]}.items():
        assert main(["eval", str(stopped), "--checkpoint", which, "--json"]) == 0
        said = capsys.readouterr()
        assert said.err == f"the network is that of the checkpoint after {step} updates\n"
        (row,) = json.loads(said.out)
        assert (row["top1"], row["loss"]) == (measured[step][0], pytest.approx(measured[step][1], rel=1e-6))
    assert row["top1"] == summed["best_top1"] == max(top1 for top1, _ in measured.values())
    last = load_run(stopped, "last").network.state_dict()
    assert all(torch.equal(last[name], tensor) for name, tensor in final.items())
    assert not (stopped / "evaluation.json").exists()  # that is of the final weights


# Classes of files


class Remembering(nn.Module):
    """Keeps its input in itself while it computes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        time.sleep(0.01)
        logits: Tensor = self.network(self.x)
        return logits


def answers(run: Path, names: list[str], ranks: Ranks | None = None) -> list[FileClasses]:
    """By several threads, which do not meet in a network that keeps things in itself."""
    with as_before(), patch("convoy.training.use.own_cores", lambda: range(8 if ranks is None else 2)):
        loaded = load_run(run)
        classifier = Classifier(replace(loaded, network=Remembering(loaded.network).eval()), CPU, 3)
        read = names if ranks is None or ranks.rank == 0 else None
        return [answer for some in classify(classifier, read, 4, ranks) for answer in some]


def test_a_network_of_several_outputs_is_exported_with_the_first(run: Path, tmp_path: Path) -> None:
    network, plain = (loaded := load_run(run)).network, loaded.network.forward
    network.forward = lambda x: {"logits": (logits := plain(x)), "twice": 2 * logits}
    assert export(loaded, "torch-export", tmp_path / "a.pt2") < 1e-5


def on_ranks(run: Path, names: list[str]) -> tuple[list[FileClasses], list[list[int]], float]:
    """Answers; the evaluation's matrix and loss."""
    ranks, _ = join_ranks()
    ranks.follow(Plan.parse(f"sample={ranks.num}").mesh, (0,))
    with patch("convoy.training.restore.EVALUATION_BATCH", 5), as_before():
        loaded = load_run(run)
        result = evaluate_run(loaded, evaluation_data(loaded)[0], CPU, ranks)
    return answers(run, names, ranks), result.confusion.tolist(), result.loss


def test_any_number_of_ranks_and_threads_gives_the_classes_of_the_evaluation(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("x")
    names = pictures(run.parent / "data")
    names = [*names[:7], str(tmp_path / "bad.png"), *names[7:], str(tmp_path / "none.png")]
    want, loaded = answers(run, names), load_run(run)
    assert [answer.name for answer in want] == names and [answer.bad is None for answer in want].count(False) == 2
    data, _ = evaluation_data(loaded)
    alone, confusion = evaluate_run(loaded, data, CPU), torch.zeros(3, 3, dtype=torch.int64)
    best = {answer.name: answer.best for answer in want}
    for number, label in enumerate(data.test.labels.tolist()):
        confusion[label, best[str(run.parent / "data" / data.test.name(number))][0][0]] += 1
    assert torch.equal(confusion, alone.confusion)
    for classified, on_all, loss in run_ranks(on_ranks, 3, run, names):
        assert classified == want and on_all == confusion.tolist() and loss == pytest.approx(alone.loss, rel=1e-6)
