"""Classifying files: the evaluation's classes, on any number of ranks, in order, each picture once, as names come."""

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.data.folder import pictures
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan
from convoy.training.environment import join_ranks
from convoy.training.predict import Classifier, FileClasses, classify
from convoy.training.restore import TrainedRun, evaluate_run, evaluation_data, load_run
from ranks import RankFailed, run_ranks
from tiny import train_on_pictures, write_pictures
from whole_runs import as_before

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("predict")
    return train_on_pictures(write_pictures(tmp / "data"), tmp / "run", "--workers", "0")


def answers(run: Path, names: list[str], batch: int, top: int = 3) -> list[FileClasses]:
    with as_before():
        classifier = Classifier(load_run(run), CPU, top)
        return [answer for some in classify(classifier, names, batch) for answer in some]


def on_ranks(run: Path, names: list[str], batch: int) -> list[list[FileClasses]]:
    ranks, _ = join_ranks()
    ranks.follow(Plan.parse(f"sample={ranks.num}").mesh, (0,))
    with as_before():
        classifier = Classifier(load_run(run), CPU)
        classifier.num_threads += ranks.rank  # they agree on it
        return list(classify(classifier, names if ranks.rank == 0 else None, batch, ranks))


def test_each_picture_has_the_class_that_the_evaluation_counts(run: Path) -> None:
    trained_run = load_run(run)
    data, _ = evaluation_data(trained_run)
    result = evaluate_run(trained_run, data, CPU)
    files = [str(run.parent / "data" / data.test.name(i)) for i in range(len(data.test))]
    found = answers(run, files, 5)
    assert [answer.name for answer in found] == files
    confusion = torch.zeros(3, 3, dtype=torch.int64)
    for answer, label in zip(found, data.test.labels, strict=True):
        confusion[int(label), answer.best[0][0]] += 1
        assert [p for _, p in answer.best] == sorted((p for _, p in answer.best), reverse=True)
        assert sum(p for _, p in answer.best) == pytest.approx(1, abs=1e-6)
        assert sorted(number for number, _ in answer.best) == [0, 1, 2]
    assert torch.equal(confusion, result.confusion)
    assert {len(answer.best) for answer in answers(run, files[:4], 2, top=1)} == {1}


@pytest.mark.slow
def test_any_number_of_ranks_and_threads_gives_the_same_bits(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("x")
    names = pictures(run.parent / "data")
    names = [*names[:7], str(tmp_path / "bad.png"), *names[7:], str(tmp_path / "none.png")]
    wanted = answers(run, names, 4)
    assert [answer.name for answer in wanted] == names
    assert [answer.bad is None for answer in wanted].count(False) == 2
    assert wanted[7].bad == "is no picture in a known format"
    for world in (2, 3):
        for turns in run_ranks(on_ranks, world, run, names, 4):
            assert [answer for turn in turns for answer in turn] == wanted
    # Another composition of the batches may give other bits, but no other class.
    others = answers(run, names, 5)
    assert [answer.best[:1] and answer.best[0][0] for answer in others] == [
        answer.best[:1] and answer.best[0][0] for answer in wanted
    ]


def failing(run: Path) -> None:
    def names() -> Iterator[str]:
        yield from pictures(run.parent / "data")
        raise ConvoyError("the list ends here")

    ranks, _ = join_ranks()
    with as_before():
        classifier = Classifier(load_run(run), CPU)
        for _ in classify(classifier, names() if ranks.rank == 0 else None, 4, ranks):
            pass


def test_a_mistake_in_the_names_ends_all_ranks(run: Path) -> None:
    with pytest.raises(RankFailed, match="ConvoyError: the list ends here"):
        run_ranks(failing, 2, run)


def test_what_is_known_is_said_before_the_next_names_come(run: Path) -> None:
    names: queue.Queue[str] = queue.Queue()
    files = pictures(run.parent / "data")[:6]
    for file in files[:4]:
        names.put(file)
    found: list[FileClasses] = []
    ended = threading.Event()

    def read() -> Iterator[str]:
        while (name := names.get()) != "":
            yield name

    def consume() -> None:
        for some in classify(Classifier(load_run(run), CPU), read(), 2):
            found.extend(some)
        ended.set()

    with as_before():
        threading.Thread(target=consume, daemon=True).start()
        for number in (4, 6):  # nothing follows, and nobody has said that nothing will
            began = time.monotonic()
            while len(found) < number and time.monotonic() - began < 30:
                time.sleep(0.01)
            assert [answer.name for answer in found] == files[:number]
            for file in files[4:] if number == 4 else [""]:
                names.put(file)
        assert ended.wait(30)


class Remembering(nn.Module):
    """Keeps its input in itself while it computes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        time.sleep(0.01)
        logits: torch.Tensor = self.network(self.x)
        return logits


class Alone(Remembering):
    """Cannot be copied."""

    def __deepcopy__(self, memo: object) -> None:
        raise RuntimeError("there is only one of me")


@pytest.mark.parametrize("kind", [Remembering, Alone])
def test_threads_do_not_meet_in_a_network_that_keeps_things_in_itself(
    run: Path, kind: type[Remembering], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = pictures(run.parent / "data")
    wanted = answers(run, names, 4)
    loaded = load_run(run)
    other = TrainedRun(
        loaded.path, loaded.recipe, kind(loaded.network).eval(), loaded.transform, loaded.classes, loaded.given
    )
    monkeypatch.setattr("convoy.training.predict.num_cores", lambda: 8)
    with as_before():
        classifier = Classifier(other, CPU, 3)
        assert classifier._networks.qsize() == (8 if kind is Remembering else 1)
        found = [answer for some in classify(classifier, names, 4) for answer in some]
    assert found == wanted
    weights = [next(classifier._networks.get().parameters()) for _ in range(classifier._networks.qsize())]
    assert all(weight is weights[0] for weight in weights)


@pytest.mark.slow
def test_evaluation_on_ranks_counts_each_sample_once(run: Path) -> None:
    trained_run = load_run(run)
    data, _ = evaluation_data(trained_run)
    alone = evaluate_run(trained_run, data, CPU)
    for confusion, loss in run_ranks(evaluated, 2, run):
        assert confusion == alone.confusion.tolist() and loss == pytest.approx(alone.loss, rel=1e-6)


def evaluated(run: Path) -> tuple[list[list[int]], float]:
    ranks, _ = join_ranks()
    ranks.follow(Plan.parse(f"sample={ranks.num}").mesh, (0,))
    with pytest.MonkeyPatch.context() as patch, as_before():
        patch.setattr("convoy.training.restore.EVALUATION_BATCH", 5)
        trained_run = load_run(run)
        data, _ = evaluation_data(trained_run)
        result = evaluate_run(trained_run, data, CPU, ranks)
    return result.confusion.tolist(), result.loss
