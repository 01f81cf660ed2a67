"""What holds a training back: a minute of it, changes that are tried; and nothing is left."""

import contextlib
import itertools
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from convoy.doctor import examination, trials, updates
from convoy.doctor.diagnosis import Diagnosis
from convoy.doctor.examination import examine
from convoy.doctor.facts import Facts
from convoy.doctor.trials import Budget
from convoy.engine import profiling
from convoy.tasks.task import Evaluation
from convoy.training import recorder, step
from convoy.training.checkpoints import Saver
from made_time import made_time
from ranks import run_ranks
from training.scenarios import cores_as_before, session

EACH = ("checkpoint.every=1ba",)


def refuse(*args: Any, **options: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def examined(
    data: Path, folder: Path, settings: tuple[str, ...], tries: bool, no_folder: bool = False, update_s: float = 0.1
) -> tuple[Facts, list[str], int, float]:
    """An update takes 0.1 s, a batch of an evaluation as long, on rank 1 both twice that, and a checkpoint a second.

    Returns:
        The facts, what was said, the batches of evaluations, and how long it took.
    """
    folder.mkdir(exist_ok=True)
    found, said, batches = session(data, *settings), list[str](), itertools.count()
    limits = Budget(found.ranks, 40.0, began=0.0, say=lambda what, *_: said.append(what.split(",")[0]))
    clocks = examination, recorder, step, trials, profiling, updates
    with made_time(*clocks) as clock, cores_as_before(), ExitStack() as stack:
        each_s = update_s * (1 + found.ranks.rank)
        stack.enter_context(contextlib.chdir(folder))
        hook = register_optimizer_step_pre_hook(lambda *_: clock.sleep(each_s))  # in sessions of trials too
        stack.callback(hook.remove)
        add = clock.before(Evaluation.add, lambda: each_s + 0 * next(batches))
        stack.enter_context(patch.object(Evaluation, "add", add))
        stack.enter_context(patch.object(Saver, "save", clock.before(Saver.save, lambda: 1.0)))
        if no_folder:
            stack.enter_context(patch.object(tempfile, "TemporaryDirectory", refuse))
        facts = examine(found, limits, trials=tries, folder=folder / "runs" / "x")
        return facts, list(dict.fromkeys(said)), next(batches), clock.now


def test_one_device_is_examined(data: Path, tmp_path: Path) -> None:
    ((facts, said, batches, _),) = run_ranks(examined, 1, data, tmp_path, EACH, False)
    assert facts.pictures is not None and facts.pictures.in_memory
    assert facts.update_s == pytest.approx(0.1) == facts.compute_s
    assert batches > 0 and facts.evaluation_s == pytest.approx(0.1 * batches / 2 + 0.5 * 1.0)  # half save the best
    assert facts.checkpoint_s == pytest.approx(1.0) and facts.checkpoint_every == 1
    assert said[:3] == ["timing updates", "timing pictures", "timing an evaluation"]
    assert next(advice.cause for advice in Diagnosis.of(facts).advice if advice.cause != "busy") == "checkpoint"
    ((facts, _, _, taken),) = run_ranks(examined, 1, data, tmp_path, EACH, False, False, 8.0)
    assert facts.update_s == pytest.approx(8.0) and taken <= 40 and "--seconds 80 leaves more." in facts.notes[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_devices_know_the_same(data: Path, tmp_path: Path) -> None:
    (facts, *_), (other, *_) = run_ranks(examined, 2, data, tmp_path, ("parallel.shares=auto", "batch=32", *EACH), True)
    assert facts == other and facts.devices == len(facts.ranks) == 2
    assert facts.link_bits_per_s is not None and facts.link_bits_per_s > 1e6 and len(facts.hosts) == 1
    assert facts.trials and facts.compute_s and facts.evaluation_s and facts.pictures and facts.checkpoint_s
    for facts, *_ in run_ranks(examined, 2, data, tmp_path, EACH, False, True):  # no place for checkpoints
        assert facts.checkpoint_s is None and facts.evaluation_s is not None
    assert not list(tmp_path.iterdir())
