"""The rendezvous that listens on one address: torch knows it, and torch's private parts that it changes are there."""

import os
from importlib.metadata import entry_points

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from convoy.errors import ConvoyError
from convoy.launch import torchrun
from convoy.launch.rendezvous import make
from emulated_hosts import listening


def parameters(endpoint: str, max_nodes: int = 1) -> RendezvousParameters:
    return RendezvousParameters("convoy", endpoint, "a run", 1, max_nodes)


def test_torchs_handler_still_makes_the_ranks_store_by_the_method_that_is_replaced() -> None:
    assert "_create_tcp_store_server" in vars(DynamicRendezvousHandler)
    assert "_create_tcp_store_server" in DynamicRendezvousHandler.next_rendezvous.__code__.co_names


def test_the_package_tells_torchrun() -> None:
    found = [entry for entry in entry_points(group="torchrun.handlers") if entry.name == "convoy"]
    assert [entry.load()() for entry in found] == [torchrun.entry_point()]
    torchrun.register()
    torchrun.register()  # a second time is no mistake


def test_one_host_meets_itself_on_loopback() -> None:
    before = listening([os.getpid()])
    torchrun.register()
    handler = get_rendezvous_handler(parameters("127.0.0.1:0"))
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    found = listening([os.getpid()]) - before
    assert len(found) == 2
    assert {address for address, _ in found} == {"127.0.0.1"}
    assert handler.shutdown()


def test_a_name_that_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *given, **named: [(2, 1, 6, "", ("127.0.1.1", 0))])
    with pytest.raises(ConvoyError, match=r"node1, where the ranks are to meet, is 127\.0\.1\.1 on this host"):
        make(parameters("node1:0", max_nodes=2))
