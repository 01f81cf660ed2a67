"""A run made longer: a new one that begins with the state at the end of a finished one, of which nothing changes.

Its schedule is that of a run of the whole, new length: rates that are constant or fall at certain epochs go on as they
were, and a cosine, which has come to its end with the old run, goes on from where it would stand in the longer one.
"""

from pathlib import Path

from convoy.checkpoint.files import Checkpoint
from convoy.checkpoint.store import CheckpointStore
from convoy.comm.ranks import Ranks
from convoy.data import DataSet
from convoy.documents import show
from convoy.errors import ConvoyError
from convoy.training.derived import resolve
from convoy.training.recipe import Recipe, load_recipe
from convoy.training.resume import check_data, differences, identity, load_latest
from convoy.training.run_directory import RunDirectory

MAY_CHANGE = (
    "epochs",
    "extends",
    "schedule",
    "optimizer.lr",
    "optimizer.base_lr",
    "loss",
    "clip_norm",
    "data.augment",
    "data.mix",
    "reproducible",
    "threads",
    "compile",
    "channels_last",
)
"""Keys of the recipe that may be others than the old run's, beside those that never change a result."""


def check_extension(recipe: Recipe) -> None:
    """Refuse a recipe that cannot begin with the state of the run that it extends.

    Raises:
        ConvoyError: there is no such run, it is not finished, or the recipe differs in what the state is made of.
    """
    old = extended(recipe)
    if not old.is_run():
        raise ConvoyError(f"extends={recipe.extends} is no run directory (it has no config.yaml): name one")
    status = old.summary().get("status")
    if status != "finished":
        raise ConvoyError(
            f"{old.path} is not finished ({f'its summary says {status}' if status else 'it has no summary'}), so there "
            f"is nothing to extend yet: go on with it by convoy train {old.path} --resume"
        )
    if not CheckpointStore(old.checkpoints).steps():
        raise ConvoyError(
            f"{old.path} has no checkpoints any more, so its state is not known: begin a new run with its weights, "
            f"--weights {old.path}"
        )
    begun = load_recipe(str(old.config))
    for key, now, before in differences(recipe, begun):
        if not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE):
            raise ConvoyError(
                f"{old.path} was trained with {key}={show(before)}, so a run that extends it cannot have "
                f"{key}={show(now)}: leave that option away, or begin a new run with its weights (--weights {old.path})"
            )
    if recipe.epochs == begun.epochs or begun.epochs.longer_than(recipe.epochs):
        raise ConvoyError(
            f"a run of epochs={recipe.epochs} does not extend {old.path}, which has {begun.epochs}: make it longer"
        )


def extended(recipe: Recipe) -> RunDirectory:
    """The run that a recipe's run begins with."""
    assert recipe.extends is not None
    return RunDirectory(Path(recipe.extends))


def state_at_end(recipe: Recipe, data: DataSet, ranks: Ranks) -> tuple[Checkpoint, list[str]]:
    """The state at the end of the run that a recipe extends, the same on all ranks. All of them call it.

    Returns:
        The state, and sentences on it.

    Raises:
        ConvoyError: there is no checkpoint that can be used, or the data are not those of that run.
    """
    old = extended(recipe)
    ranks.first(lambda: check_data(data, old))
    begun = ranks.first(lambda: load_recipe(str(old.config)))
    name = identity(begun, len(data.train), len(data.test))
    checkpoint, notes = load_latest(CheckpointStore(old.checkpoints), name, ranks)
    if checkpoint is None:
        raise ConvoyError(f"the checkpoints of {old.path} have been removed: put them back, or begin another run")
    ended, now = resolve(begun, len(data.train)), resolve(recipe, len(data.train))
    done, total = checkpoint.step, ended.total_updates
    rates = f"{ended.schedule.lr(done - 1):.3g} at its end, {now.schedule.lr(done):.3g} from here on"
    notes.append(
        f"begins with the state of {old.path} after {done:,} updates"
        + (f" (of {total:,}: that is its newest checkpoint)" if done < total else "")
        + f"; the learning rate, {rates}, is that of a run of {recipe.epochs}"
    )
    return checkpoint, notes
