"""From what is asked for to a study that has been measured, and to its file."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from convoy.data import open_data
from convoy.errors import ConvoyError
from convoy.experiments.scaling.ask import Ask
from convoy.experiments.scaling.prepare import Prepared, prepare
from convoy.experiments.scaling.ranks.processes import Place, Say
from convoy.experiments.scaling.ranks.seats import Seats
from convoy.experiments.scaling.schedule import Schedule
from convoy.experiments.scaling.storage.store import Store
from convoy.experiments.scaling.study.coarseness import too_coarse
from convoy.experiments.scaling.study.configuration import Configuration, parts_of
from convoy.experiments.scaling.study.made_data import assumed
from convoy.experiments.scaling.study.study import IMAGENET, Study
from convoy.experiments.scaling.training_runs import TrainingRuns, recipe_for_training
from convoy.launch.emulated import Cluster, emulate
from convoy.training import RunDirectory
from convoy.training.derived import num_microbatches


def measure(ask: Ask, progress: Say, tell: Callable[[str], None]) -> None:
    """Measure what is not known yet, and train where that is asked for.

    Args:
        ask: what is asked for, checked.
        progress: is told of the work as a whole: what, done, of how many.
        tell: is told sentences that stay.

    Raises:
        ConvoyError: something in it cannot be, or another process measures there.
    """
    prepared = prepare(ask)
    study, recipe = prepared.study, prepared.study.recipe
    Store.open(ask.folder, study, prepared.machine)
    if study.made is not None and (sentence := assumed(recipe, study.made, ask.image_size)):
        tell(sentence)
    size = ask.dataset_size or (IMAGENET if study.made is not None else len(open_data(recipe.data, progress).train))
    with _places(prepared.cluster) as places:
        _make_folder(ask.folder)
        with RunDirectory(ask.folder).lock(tell=tell):
            store = Store.open(ask.folder, study, prepared.machine)  # as it is when nobody else writes there
            store.document["table"] = {"epochs": ask.epochs, "dataset_size": size, "rounds": ask.rounds}
            if ask.train_epochs is not None:
                store.begin_training(ask.train_epochs)
            store.begin(ask.command, datetime.now(UTC).isoformat(timespec="seconds"))
            for sentence in _coarse(study, prepared.rows):
                tell(sentence)
            _run(ask, prepared, store, Seats(study.cores_per_device, places), progress, tell)


def _run(ask: Ask, prepared: Prepared, store: Store, seats: Seats, progress: Say, tell: Callable[[str], None]) -> None:
    """The rounds, then the trainings."""
    study, rows = prepared.study, prepared.rows
    predict = ask.predict and ask.rounds > 0
    Schedule(study, rows, store, seats, ask.rounds, ask.timeout, predict, progress, tell)()
    if ask.train_epochs is not None:
        said = any(setting.startswith("evaluate_every") for setting in ask.settings)
        trained = replace(study, recipe=recipe_for_training(study.recipe, ask.train_epochs, said))
        TrainingRuns(trained, rows, store, ask.folder, seats, ask.timeout, ask.command, progress, tell)()


def _coarse(study: Study, rows: list[Configuration]) -> list[str]:
    """Sentences on batches that cannot be divided by the speeds of an emulated cluster's devices."""
    microbatches = num_microbatches(study.recipe)
    wanted = dict.fromkeys(
        row.devices for row in rows if row.shares and parts_of(row.plan or "serial", row.devices) == row.devices
    )
    found = [too_coarse(study.batch(number), microbatches, study.speeds[:number]) for number in wanted if study.speeds]
    return list(dict.fromkeys(filter(None, found)))


@contextmanager
def _places(cluster: Cluster | None) -> Iterator[list[Place]]:
    """The devices of an emulated cluster; none without one."""
    if cluster is None:
        yield []
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hosts of a cluster have no names, which torch would tell
    with emulate(cluster) as places:
        yield list(places)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConvoyError(f"--out {folder} cannot be made ({error.strerror}): choose another place") from error
