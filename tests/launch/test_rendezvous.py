"""The rendezvous that listens on one address: torch knows it, and torch's private parts that it changes are there."""

import hmac
import os
import pickle
import stat
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
)

from convoy.launch import torchrun
from convoy.launch.rendezvous import Sealed, StrangerError, make
from emulated_hosts import listening


def parameters(endpoint: str, max_nodes: int = 1) -> RendezvousParameters:
    return RendezvousParameters("convoy", endpoint, "a run", 1, max_nodes)


def test_torchs_handler_still_makes_the_ranks_store_by_the_method_that_is_replaced() -> None:
    assert "_create_tcp_store_server" in vars(DynamicRendezvousHandler)
    assert "_create_tcp_store_server" in DynamicRendezvousHandler.next_rendezvous.__code__.co_names


def test_the_package_tells_torchrun() -> None:
    entries = [entry for entry in entry_points(group="torchrun.handlers") if entry.name == "convoy"]
    assert [entry.load()() for entry in entries] == [torchrun.entry_point()]


def test_one_host_meets_itself_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_STORE", "")
    before = listening([os.getpid()])
    handler = make(parameters("127.0.0.1:0"))
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size, handler.use_agent_store) == (0, 1, False)
    assert listening([os.getpid()]) == before
    folder = Path(os.environ["CONVOY_STORE"]).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert handler.shutdown()


class Attack:
    """What torch would unpickle."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def sealed(store: HashStore, key: bytes) -> _BackendRendezvousStateHolder:
    return _BackendRendezvousStateHolder(
        Sealed(store, "a run", key), RendezvousSettings("a run", 2, 2, RendezvousTimeout(), *(timedelta(seconds=5), 3))
    )


@pytest.mark.parametrize("key", [b"", b"known to all hosts"])
def test_a_state_is_read_by_who_knows_the_secret_alone(key: bytes, tmp_path: Path) -> None:
    """torch's own code reads and writes it."""
    store, now = HashStore(), datetime.now(UTC)
    first, second, stranger = sealed(store, key), sealed(store, key), sealed(store, b"another")
    first.sync()
    node = _NodeDesc("node0", 1, 0)
    first.state.participants[node], first.state.last_heartbeats[node], first.state.deadline = 0, now, now
    first.state.wait_list.add(node)
    first.mark_dirty()
    assert first.sync()
    second.sync()
    assert vars(second.state) == vars(first.state)
    with pytest.raises(StrangerError, match="give all hosts the same CONVOY_SECRET"):
        stranger.sync()

    attack = pickle.dumps(Attack(tmp_path / "ran"))
    seal = hmac.digest(b"/a run", attack, "sha256")  # as where there is no secret
    for state in (attack, seal + attack, b"", b"\0" * 99):
        store.set("torch.rendezvous.a run", b64encode(state).decode())
        with pytest.raises(StrangerError, match="written by somebody who is no host of this run"):
            second.mark_dirty()
            second.sync()
    assert not (tmp_path / "ran").exists()
    pickle.loads(attack)  # as torch's own backend has it done
    assert (tmp_path / "ran").exists()
