"""Which network interface the ranks talk through, how they know each other, and sockets that listen on one address.

gloo and NCCL listen on the interface that a variable names, by default that of the route to the rendezvous: gloo's own
is the address of the host's name, loopback on many machines. torch's key-value store listens on all of them, unless it
is given a socket that listens already (`master_listen_fd`).
"""

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from convoy.errors import ConvoyError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Variable with the file in which the ranks of one host meet; empty where several hosts meet by Convoy's rendezvous.
STORE = "CONVOY_STORE"
# Variables with what the hosts of a run know and nobody else does, or with the name of the file that has it.
SECRET, SECRET_FILE = "CONVOY_SECRET", "CONVOY_SECRET_FILE"
_MOST_S = 60_000.0  # Linux takes no more than 32,767 s until it begins to look whether anybody is there
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def number_of(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number that a launcher has set."""
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        problem = f"is {text!r}, but must be a whole number" if text else "is not set"
        raise ConvoyError(f"{name} {problem}: start the ranks with torchrun, srun or --devices")
    return int(text)


def check_name(interface: str) -> None:
    """Refuse what cannot be the name of an interface, of any host: a list or a pattern, for instance."""
    if not re.fullmatch(r"[^\s/,^=]{1,15}", interface) or not interface.isprintable():
        raise ConvoyError(f"--interface {interface!r} is no name of an interface, such as eth1")


def use(interface: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the collectives of this process, and of those that it starts, go through an interface of this host."""
    address_of(interface)
    environment.update(dict.fromkeys(VARIABLES, interface))


def chosen(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """The one interface that the variables name, if they do: NCCL's may also be a list or a pattern."""
    name = environment.get(VARIABLES[0], "")
    return name if name and "," not in name else None


def secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the run's hosts; empty where they have none. That of a file is refused where others may read it."""
    name = environment.get(SECRET_FILE)
    if environment.get(SECRET) or not name:
        return environment.get(SECRET, "").encode()
    try:
        with Path(name).open("rb") as file:
            is_open, text = os.fstat(file.fileno()).st_mode & 0o077, file.read().strip()
    except OSError as error:
        raise ConvoyError(f"{SECRET_FILE}={name}: {error.strerror}: copy the secret of the first host there") from None
    if is_open or not text:
        mend = f"chmod 600 {name}" if is_open else f"openssl rand -hex 32 > {name}"
        raise ConvoyError(f"{SECRET_FILE}={name} is {'open to other users' if is_open else 'empty'}: {mend}")
    return text


def names() -> list[str]:
    """The interfaces of this host."""
    return [name for _, name in socket.if_nameindex()]


def loopback() -> str | None:
    """The interface through which nobody but this host is reached; None in a container without."""
    return "lo" if "lo" in names() else None


def address_of(interface: str) -> str:
    """An address of an interface of this host, of IPv4 if it has one."""
    if interface not in names():
        raise ConvoyError(f"this host has no interface {interface!r}: --interface must be one of {', '.join(names())}")
    addresses = _addresses(interface)
    if not addresses:
        raise ConvoyError(f"interface {interface!r} has no address: name another by --interface, or configure it")
    return addresses[0]


def interface_with(address: str) -> str | None:
    """The interface of this host that has an address; None where none has."""
    return next((name for name in names() if address in _addresses(name)), None)


def towards(host: str) -> str | None:
    """This host's address on the way to another, which is one of its own for its own names; None where the name is
    unknown or there is no way."""
    for family, _, _, _, place in _resolve(host, 9):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
            try:
                probe.connect(place)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def says_local(host: str) -> bool:
    """Whether a user who writes this means one host alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def is_loopback(address: str) -> bool:
    """Whether no other host can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address of this host, of IPv4 or IPv6, and no other; port 0 is any that is free."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(place, family=family, backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise OSError(error.errno, f"cannot listen on {address}:{port} ({reason})") from error


def give_up_after(seconds: float, port: int) -> None:
    """Have this process's connections to a port break where the other host has not answered for so long.

    torch's store waits without end for a host whose network is cut: also after its own limit, when it takes the request
    back. Only the kernel ends that, and only of a connection on which it is to look whether anybody is there.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # not Linux
        return
    seconds = min(seconds, _MOST_S)
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, IndexError):  # it was closed meanwhile, or has no port
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.getpeername()[1] == port:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 2)))
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def is_own(host: str) -> bool:
    """Whether a name or an address is this host's."""
    return bool(_own_addresses(host))


def meeting_address(host: str, alone: bool) -> str:
    """The address of this host at which others look for it by a name; `alone` says that there are no others."""
    ips = _own_addresses(host)
    alone = alone or says_local(host)
    interface = chosen()
    preferred = address_of(interface) if interface is not None else None
    if preferred in ips:
        return preferred
    reached = next((address for address in ips if alone or not is_loopback(address)), preferred)
    if reached is None:
        what = f"{ips[0]} on this host, where other hosts cannot reach it" if ips else "no address of this host"
        raise ConvoyError(
            f"{host}, where the ranks are to meet, is {what}: give the address that the others reach, or name its "
            f"interface by --interface or GLOO_SOCKET_IFNAME ({', '.join(names())})"
        )
    return reached


def _own_addresses(host: str) -> list[str]:
    addresses = []
    for family, _, _, _, (address, *_) in _resolve(host, 0):
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((address, 0))
            addresses.append(str(address))
    return list(dict.fromkeys(addresses))


def _resolve(host: str, port: int) -> list[tuple]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        # A pod's long name is published some seconds after it has begun; it knows itself by the short one.
        host_name = socket.gethostname()
        return _resolve(host_name, port) if host != host_name and host.partition(".")[0] == host_name else []


def _addresses(interface: str) -> list[str]:
    """Addresses of IPv4 (the first one), then of IPv6."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        addresses.append(socket.inet_ntoa(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, _, _, name = line.split()
        if name == interface:
            address = ipaddress.IPv6Address(int(digits, 16))
            addresses.append(f"{address}%{interface}" if address.is_link_local else str(address))
    return addresses
