"""Where the ranks meet before they have a process group: a key-value store, which listens on one address alone."""

import os
from collections.abc import MutableMapping
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from convoy import interfaces
from convoy.errors import MeetingError


def open_store(rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT.

    torchrun's agent keeps it where it says so. Otherwise rank 0 does, and listens on the address of MASTER_ADDR alone;
    torch would listen on all interfaces.

    Args:
        rank: this one.
        num_ranks: of all.
        timeout: to wait for rank 0.

    Raises:
        ConvoyError: others could not reach rank 0 where they look for it.
        MeetingError: rank 0 cannot listen there.
        RuntimeError: the store is not to be reached.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if rank > 0 or kept:
        return TCPStore(host, port, num_ranks, is_master=False, timeout=timeout)
    address = interfaces.meeting_address(host, alone=num_ranks <= _num_local(num_ranks))
    try:
        listening = interfaces.listen(address, port)
    except OSError as error:
        raise MeetingError(f"rank 0 {error.strerror}: set MASTER_PORT to a free port") from error
    port = listening.getsockname()[1]
    return TCPStore(address, port, num_ranks, is_master=True, timeout=timeout, master_listen_fd=listening.detach())


def choose_interface(num_ranks: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo talk on the network on which the ranks meet, unless an interface was chosen.

    By itself it would take the one that this host's name belongs to, which need not be one that others reach.
    """
    if interfaces.VARIABLES[0] in environment:
        return
    host = environment["MASTER_ADDR"]
    address = interfaces.towards(host)
    alone = interfaces.says_local(host) or num_ranks <= _num_local(num_ranks, environment)
    if address is None or (interfaces.is_loopback(address) and not alone):
        return
    name = interfaces.interface_with(address)
    if name is not None:
        environment[interfaces.VARIABLES[0]] = name


def _num_local(num_ranks: int, environment: MutableMapping[str, str] = os.environ) -> int:
    """Ranks of this host, as the launcher says; all where it does not."""
    text = environment.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() else num_ranks
