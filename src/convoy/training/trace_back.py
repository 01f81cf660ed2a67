"""Finds the update in which the loss of a run that failed stopped being finite, by doing the last ones again."""

from convoy.checkpoint.store import CheckpointStore
from convoy.training.failures.finite import ADVICE, SKIP, NotFiniteError
from convoy.training.saving import load_latest
from convoy.training.session import Session

LIMIT_S = 600.0
"""Seconds that it may take."""


def trace_back(session: Session, store: CheckpointStore, identity: str, error: NotFiniteError, update_s: float) -> str:
    """Do the updates after the newest checkpoint again until the first that is not finite. All ranks call it.

    Args:
        session: a fresh one of the run.
        store: of its checkpoints.
        identity: of the run.
        error: how it ended.
        update_s: seconds of an update.

    Returns:
        The sentence to end with.
    """
    checkpoint, _ = load_latest(store, identity, session.devices)
    begin = 0
    if checkpoint is not None:
        session.state.unpack(checkpoint)
        begin = checkpoint.step
    (too_long,) = session.devices.largest(int((error.by - begin) * update_s > LIMIT_S))
    if too_long:
        return f"{error}; to see where it begins takes too long here: save more often (--set checkpoint.every=…)"
    step, averaged = session.step(), session.state.averaged
    step.guard = session.guard()
    session.model.train()
    batches = session.batches(begin, error.by - begin)
    try:
        for update, batch in enumerate(batches, begin):
            result = step(batch, update)
            if result.bad is not None:
                return f"{result.bad}: {ADVICE}{SKIP} ({error.saved})"
            if averaged is not None:
                averaged.update(session.model)
    finally:
        batches.close()
    return f"{error}; done again, all updates were finite"
