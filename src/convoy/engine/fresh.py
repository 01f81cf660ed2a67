"""A key-value store that several generations of ranks use one after the other, without finding each other's keys.

torch's elastic launcher keeps one store for all restarts of a job. In it ranks find the addresses of those before them,
and call processes that are gone. How often ranks were restarted they cannot ask: each host counts for itself.
"""

import json
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

_POLL_S = 0.01
_PATIENCE_S = 0.5


def fresh(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """The part of a store that only the ranks which call this now use.

    Rank 0 names a generation, the others answer with a word of their own, and it confirms the words that it has read:
    so nobody takes a generation for the present one that is past.

    Args:
        store: that all of them have.
        rank: this one.
        num_ranks: that call it.
        timeout: for all of it.

    Raises:
        RuntimeError: the others do not come.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("generation", own)
        names = [f"{own}/{other}" for other in range(1, num_ranks)]
        if names:
            store.wait(names, timeout)
        store.set(f"{own}/all", json.dumps([store.get(name).decode() for name in names]))
        return PrefixStore(own, store)
    until = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < until:
        store.wait(["generation"], timeout)
        generation = store.get("generation").decode()
        store.set(f"{generation}/{rank}", own)
        soon = time.monotonic() + _PATIENCE_S
        while time.monotonic() < soon:
            if store.check([f"{generation}/all"]) and own in json.loads(store.get(f"{generation}/all")):
                return PrefixStore(generation, store)
            if store.get("generation").decode() != generation:
                break
            time.sleep(_POLL_S)
    raise RuntimeError(f"rank {rank} has waited {timeout.total_seconds():g} s for rank 0 to see all {num_ranks} ranks")
