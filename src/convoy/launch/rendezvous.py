"""torch's c10d rendezvous, listening on one address instead of on all interfaces.

`torchrun --rdzv-backend=convoy --rdzv-endpoint=HOST:PORT` is otherwise used as with `c10d`. The stores of torch's
agents listen on the address of the endpoint and, for the ranks, of the interface that GLOO_SOCKET_IFNAME names or that
is on the way to the endpoint; hosts call themselves by that address, so that their names need not be known to others.
"""

import contextlib
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from convoy import interfaces

PORT = 29_400


def make(params: RendezvousParameters) -> RendezvousHandler:
    """A host's part in a rendezvous.

    Raises:
        ConvoyError: this host cannot listen where others would reach it.
        RendezvousConnectionError: the store is not to be reached.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, PORT)
    store = _open(host, port, params.max_nodes == 1, timedelta(seconds=params.get_as_int("read_timeout", 60) or 60))
    interface = interfaces.chosen()
    own = interfaces.address_of(interface) if interface is not None else interfaces.towards(host)
    handler: DynamicRendezvousHandler = OneAddress.from_backend(
        params.run_id,
        store,
        C10dRendezvousBackend(store, params.run_id),
        params.min_nodes,
        params.max_nodes,
        params.local_addr or own,
        RendezvousTimeout(*(_timeout(params, name) for name in ("join", "last_call", "close", "heartbeat"))),
        keep_alive_interval=params.get_as_int("keep_alive_interval", 5) or 5,
        keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt", 3) or 3,
    )
    handler._backend_name = params.backend  # torch refuses a handler by another name than it asked for
    return handler


class OneAddress(DynamicRendezvousHandler):
    """torch's handler, whose store for the ranks listens on this host's address alone."""

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class, which leaves out to say in a later round where the store for the ranks is: a host that came
        since, in the place of one that is gone, would wait for that in vain."""
        self._bootstrap_store_info = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return _serve(master_addr, master_port, timedelta(seconds=300))


def _open(host: str, port: int, alone: bool, wait: timedelta) -> TCPStore:
    """The store at the endpoint: the first process of the endpoint's host that comes serves it."""
    if interfaces.is_own(host):
        address = interfaces.meeting_address(host, alone)
        with contextlib.suppress(OSError):  # another process of this host serves it
            return _serve(address, port, wait)
    try:
        return TCPStore(host, port, is_master=False, timeout=wait)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(f"the rendezvous at {host}:{port} is not to be reached: {error}") from error


def _serve(address: str, port: int, wait: timedelta) -> TCPStore:
    listening = interfaces.listen(address, port)
    address, port = listening.getsockname()[:2]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listening.detach()
    )


def _timeout(params: RendezvousParameters, name: str) -> timedelta | None:
    seconds = params.get_as_int(f"{name}_timeout")
    return None if seconds is None else timedelta(seconds=seconds)
