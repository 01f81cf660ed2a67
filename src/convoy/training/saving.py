"""The checkpoints of a session: who saves them and when, and the one that it goes on from."""

from collections.abc import Callable
from typing import Any

from convoy.checkpoint.files import Checkpoint
from convoy.checkpoint.store import CheckpointStore
from convoy.training.checkpoints.saver import Saver
from convoy.training.checkpoints.when import Automatic, Every, When, Young
from convoy.training.ranks.devices import Devices
from convoy.training.session import Session


def create_saver(store: CheckpointStore, session: Session, tell: Callable[[str], None], timeout_s: float) -> Saver:
    """What saves a session's state, as its recipe says.

    Args:
        store: of the run.
        session: that is trained.
        tell: takes a sentence for whoever watches.
        timeout_s: seconds that the run waits for a checkpoint before it ends.
    """
    recipe, every = session.recipe, session.quantities.checkpoint_every
    when: When
    if every is not None:
        when = Every(every)
    else:  # local SGD averages the weights for a checkpoint: only when it does so anyway may clocks decide
        multiple = recipe.parallel.local_sgd or 1
        when = Automatic(Young(recipe.checkpoint.mtbf, multiple), session.devices)
    return Saver(
        store,
        when,
        session.devices,
        tell,
        goes_on=recipe.checkpoint.on_error == "continue",
        on_processor=session.device.type == "cpu",
        timeout_s=timeout_s,
    )


def load_latest(store: CheckpointStore, identity: str, devices: Devices) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that rank 0 finds whole, on every rank. All ranks call it.

    Returns:
        The checkpoint, or None where there is none at all, and a sentence for each damaged one passed over.

    Raises:
        DamagedCheckpointError: there are checkpoints, but none of them can be used.
    """
    found: Checkpoint | None = None

    def read() -> tuple[tuple[int, str, dict[str, Any]] | None, list[str]]:
        nonlocal found
        found, refused = store.load_latest(identity)
        return (found.step, found.identity, found.values) if found is not None else None, refused

    facts, refused = devices.first(read)
    if facts is None:
        return None, refused
    tensors = devices.broadcast_tensors(found.tensors if found is not None else None)
    return Checkpoint(facts[0], facts[1], tensors, facts[2]), refused
