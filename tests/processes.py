"""Processes as Linux lists them; any of them may end while one reads."""

from contextlib import suppress
from pathlib import Path


def children(parent: int) -> list[int]:
    """Processes that a process has started and that it has not yet waited for."""
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += [int(pid) for pid in task.read_text().split()]
    return found


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    return [pid, *(one for child in children(pid) for one in family(child))]


def variable(pid: int, name: str) -> str | None:
    """A variable of a process's environment."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((e.decode().partition("=")[2] for e in entries if e.startswith(f"{name}=".encode())), None)


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
