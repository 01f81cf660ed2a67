"""Devices that are not equally fast: how long each computes."""

import contextlib
import hashlib
import os
import platform
from collections.abc import Sequence

from convoy.cost.device import Device
from convoy.cost.store import ProfileStore
from convoy.planning.ranks import Ranks

ALIKE = 1.1
"""Devices are taken to be equal where the slowest takes no more than so many times as long as the fastest."""


def paces(
    measured: Sequence[tuple[float, ...]], ranks: Ranks, store: ProfileStore | None, device: Device
) -> tuple[float, ...]:
    """How many times as long as in the mean each rank computes; empty where they are about equally fast.

    All ranks call it. Of ranks that nobody has measured it is empty too.

    Args:
        measured: of each rehearsal, the seconds that each rank took for the same; empty where only one rehearsed.
        ranks: who rehearsed.
        store: knows it from before where nothing had to be rehearsed.
        device: of the first rank.
    """
    name = "pace of " + hashlib.blake2b(repr(ranks.gather(_place())).encode(), digest_size=8).hexdigest()
    rows = [row for row in measured if len(row) == ranks.num > 1 and min(row) > 0]

    def known() -> tuple[float, ...]:
        if rows:
            found = [sum(own) for own in zip(*rows, strict=True)]
            if store is not None:
                with contextlib.suppress(OSError):  # a full disk is no reason not to plan
                    store.note(device, name, found)
            return tuple(found)
        noted = store.noted(device, name) if store is not None else None
        if not isinstance(noted, list) or len(noted) != ranks.num:
            return ()
        return tuple(one for one in noted if isinstance(one, float))

    if ranks.num == 1:
        return ()
    seconds = ranks.first(known)
    if len(seconds) < ranks.num or min(seconds) <= 0 or max(seconds) <= ALIKE * min(seconds):
        return ()
    return tuple(len(seconds) * own / sum(seconds) for own in seconds)


def _place() -> tuple[object, ...]:
    """Where this rank computes."""
    return platform.node(), sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
