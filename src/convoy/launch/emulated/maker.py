"""Names that say which process made something, so that what a killed one left behind can be told and removed."""

import itertools
import os
import re
from pathlib import Path

_NAME = re.compile(r"convoy-(\d+)-(\d+)-\d+-[a-z]+\d*")
_numbers = itertools.count()


def prefix() -> str:
    """Of all names of one emulation of this process; it has the process's number and when it started."""
    pid = os.getpid()
    return f"convoy-{pid}-{_started(pid)}-{next(_numbers)}-"


def is_left(name: str) -> bool:
    """Whether something is Convoy's and the process that made it is gone."""
    match = _NAME.fullmatch(name)
    return match is not None and _started(int(match[1])) != int(match[2])


def _started(pid: int) -> int:
    """When a process started, in ticks since the machine did; -1 where there is none. Numbers of processes recur."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    state, *rest = text.rpartition(")")[2].split()
    return -1 if state == "Z" else int(rest[18])
