"""torch's c10d rendezvous for several hosts, on one address and for its own hosts alone; and one for a single host.

`torchrun --rdzv-backend=convoy --rdzv-endpoint=HOST:PORT` is otherwise used as with `c10d`. The stores of torch's
agents listen on the address of the endpoint and, for the ranks, of the interface that GLOO_SOCKET_IFNAME names or that
is on the way to the endpoint (torch's own listens on all, whatever host it is given, unless it gets a socket that
listens); hosts call themselves by that address, so that nobody needs to resolve their names. A
single host listens nowhere: its ranks meet in a file that no other user can open.
"""

import atexit
import contextlib
import hmac
import io
import os
import pickle
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.elastic.utils.distributed import get_free_port

from convoy import interfaces
from convoy.errors import MachineError
from convoy.launch.rank import private_folder

PORT = 29_400


def make(params: RendezvousParameters) -> RendezvousHandler:
    """A host's part in a rendezvous."""
    if params.max_nodes == 1:
        return OneHost(params)
    host, port = parse_rendezvous_endpoint(params.endpoint, PORT)
    key = interfaces.secret()
    store = _open(host, port, timedelta(seconds=params.get_as_int("read_timeout", 60) or 60))
    interface = interfaces.chosen()
    own_address = interfaces.address_of(interface) if interface is not None else interfaces.towards(host)
    handler: DynamicRendezvousHandler = OneAddress.from_backend(
        params.run_id,
        store,
        Sealed(store, params.run_id, key),
        params.min_nodes,
        params.max_nodes,
        params.local_addr or own_address,
        RendezvousTimeout(*(_timeout(params, name) for name in ("join", "last_call", "close", "heartbeat"))),
        keep_alive_interval=params.get_as_int("keep_alive_interval", 5) or 5,
        keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt", 3) or 3,
    )
    handler._backend_name = params.backend  # torch refuses a handler by another name than it asked for
    os.environ[interfaces.STORE] = ""
    return handler


class OneHost(StaticTCPRendezvous):
    """One host, with nobody to meet: torch's agent keeps its store to itself, and the ranks have a file, in a folder of
    this user's alone that ends with this process. The port is for scripts that join by themselves, as torch would have
    them."""

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__("127.0.0.1", get_free_port(), 0, 1, params.run_id, timeout=0)
        self._backend_name, stack = params.backend, ExitStack()
        os.environ[interfaces.STORE] = str(stack.enter_context(private_folder()) / "store")
        atexit.register(stack.close)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return self._backend_name


_STATE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_NAMES = {(_STATE, "_RendezvousState"), (_STATE, "_NodeDesc")} | {
    ("datetime", name) for name in ("datetime", "timedelta", "timezone")
}
_SEAL = 32


class _Reader(pickle.Unpickler):
    """Reads a state made of what torch's states are made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of it")


class StrangerError(MachineError, RendezvousStateError):
    """Somebody else takes part in the rendezvous."""


class CutOffError(MachineError, RendezvousConnectionError):
    """The host where all meet no longer answers."""


class Sealed(C10dRendezvousBackend):
    """torch's backend, which returns only states that a host with the run's secret has sealed and that name nothing
    beyond a state's classes: torch unpickles them, and a pickle may name a function to be called."""

    def __init__(self, store: TCPStore, run_id: str, key: bytes) -> None:
        super().__init__(store, run_id)
        self._seal = partial(hmac.digest, key + b"/" + run_id.encode(), digest="sha256")

    def get_state(self) -> Any:
        answer = super().get_state()
        return answer and (self._opened(answer[0]), answer[1])

    def set_state(self, state: bytes, token: Any = None) -> Any:
        answer = super().set_state(self._seal(state) + state, token)
        return answer and (self._opened(answer[0]), *answer[1:])

    def _call_store(self, *call: Any, **named: Any) -> Any:
        try:
            return super()._call_store(*call, **named)
        except RendezvousConnectionError as error:
            raise CutOffError(
                "the host of --rdzv-endpoint does not answer any more: when it and the network are there again, start "
                "torchrun again on all hosts, and the run goes on"
            ) from error

    def _opened(self, sealed: bytes) -> bytes:
        seal, state = sealed[:_SEAL], sealed[_SEAL:]
        try:
            if not hmac.compare_digest(seal, self._seal(state)):
                raise pickle.UnpicklingError(f"this host's {interfaces.SECRET} is another one")
            _Reader(io.BytesIO(state)).load()
        except Exception as error:
            raise StrangerError(
                f"the rendezvous was written by somebody who is no host of this run ({error}): give all hosts the same "
                f"{interfaces.SECRET}, and see who else reaches the port"
            ) from None
        return state


class OneAddress(DynamicRendezvousHandler):
    """torch's handler, whose store for the ranks listens on this host's address alone."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Say in every round where the store for the ranks is. The base class leaves that out in later ones, and a host
        that replaces one that is gone would wait for it in vain."""
        self._bootstrap_store_info = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return _serve(master_addr, master_port, timedelta(seconds=300))


def _open(host: str, port: int, wait: timedelta) -> TCPStore:
    """The store at the endpoint: the first process of the endpoint's host that comes serves it."""
    if interfaces.is_own(host):
        address = interfaces.meeting_address(host, alone=False)
        with contextlib.suppress(OSError):  # another process of this host serves it
            return _serve(address, port, wait)
    try:
        store = TCPStore(host, port, is_master=False, timeout=wait)
        interfaces.give_up_after(wait.total_seconds(), port)
        return store
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
