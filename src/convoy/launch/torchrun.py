"""Makes Convoy's rendezvous known to torch's launcher, which loads this with all packages' entry points."""

import contextlib
from collections.abc import Callable
from typing import Any

BACKEND = "convoy"


def entry_point() -> Callable[[Any], Any]:
    """What makes a host's part in a rendezvous, as torchrun asks for it."""
    return _make


def register() -> None:
    """Do by hand what the entry point does in an installed package."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    with contextlib.suppress(ValueError):  # it is known
        rendezvous_handler_registry.register(BACKEND, _make)


def _make(params: Any) -> Any:
    from convoy.launch.rendezvous import make  # which needs what torch is importing while it asks for entry points

    return make(params)
