"""The interfaces of this host, and sockets on one address."""

import os
import socket

import pytest

from convoy import interfaces
from convoy.comm.joining import choose_interface, join
from convoy.errors import ConvoyError
from emulated_hosts import listening
from ranks import run_ranks


def test_what_is_no_name_of_an_interface_is_refused() -> None:
    assert interfaces.interface_with("127.0.0.1") == "lo" and interfaces.interface_with("192.0.2.1") is None
    environment: dict[str, str] = {}
    with pytest.raises(ConvoyError, match="no interface 'eth77': --interface must be one of lo"):
        interfaces.use("eth77", environment)
    assert environment == {}
    interfaces.use("lo", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name in ("", "eth0,eth1", "^lo", "a/b", "eth0\n", "e\x1b[0m", "interface-of-node"):
        with pytest.raises(ConvoyError, match="is no name of an interface"):
            interfaces.check_name(name)


def test_where_other_hosts_could_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interfaces.meeting_address("localhost", alone=True) in ("127.0.0.1", "::1")
    assert interfaces.meeting_address("127.0.0.1", alone=False) == "127.0.0.1"  # as the user says
    with pytest.raises(ConvoyError, match=r"192\.0\.2\.1, where .* is no address of this host"):
        interfaces.meeting_address("192.0.2.1", alone=True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interfaces.meeting_address("192.0.2.1", alone=False) == "127.0.0.1"


def test_gloo_talks_where_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
    choose_interface(2, environment)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setattr("socket.getaddrinfo", lambda *given, **named: [(2, 2, 17, "", ("127.0.1.1", 9))])
    several = {"MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "2"}
    choose_interface(4, several)  # a host that knows its own name as loopback's
    assert "GLOO_SOCKET_IFNAME" not in several
    with pytest.raises(ConvoyError, match=r"where other hosts cannot reach it: .* --interface"):
        interfaces.meeting_address("node1", alone=False)
    chosen = {"MASTER_ADDR": "node1", "GLOO_SOCKET_IFNAME": "lo"}
    choose_interface(1, chosen)
    assert chosen["GLOO_SOCKET_IFNAME"] == "lo"
    with pytest.raises(ConvoyError, match=r"GLOO_SOCKET_IFNAME names eth9: unset it, or name one of lo"):
        choose_interface(1, chosen | {"GLOO_SOCKET_IFNAME": "eth9"})


def join_by_variables(port: int) -> set[tuple[str, int]]:
    """As Slurm's tasks do: nobody else keeps a store."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    del os.environ["GLOO_SOCKET_IFNAME"]
    before = listening([os.getpid()])
    join(30)
    return listening([os.getpid()]) - before


def test_ranks_that_meet_by_themselves_listen_on_one_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first, second = run_ranks(join_by_variables, 2, port, join=False)
    assert {address for address, _ in first | second} == {"127.0.0.1"}
    assert ("127.0.0.1", port) in first
    assert len(first) >= 2 and len(second) >= 1
