"""One process at a time writes in a folder: an advisory lock on a file in it, which ends with its process.

The file stays: a lock on a file that is removed keeps nobody out. It is open for writing, as NFS has it. The file also
says whether the folder is still the same one.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from convoy.errors import ConvoyError, GoneError

NAME = ".lock"
_LOOK_S = 0.5  # a wait: another process may just be looking whether the lock is free


class Lock:
    """The lock that this process has on a folder, by its open file."""

    def __init__(self, file: int, folder: Path) -> None:
        self._file, self._folder = file, folder

    def check(self, done: int) -> None:
        """Refuse to write where the folder is not the one that was locked any more, after so many updates."""
        try:
            if os.path.samestat(os.fstat(self._file), (self._folder / NAME).stat()):
                return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return  # whoever writes next hears what is wrong
        raise GoneError(
            f"{self._folder} is not the folder any more that this run writes to, as was seen after {done:,} updates: "
            f"{self._fate()}"
        )

    def _fate(self) -> str:
        """What became of the folder, and what there is in its place."""
        time.sleep(_LOOK_S)  # somebody may still be removing it
        names = []
        with contextlib.suppress(OSError):
            names = sorted(entry.name for entry in self._folder.iterdir())
        there = f"there is now {', '.join(names[:6])}{', …' * (len(names) > 6)}" if names else "nothing is there now"
        with contextlib.suppress(OSError):
            if os.fstat(self._file).st_nlink == 0:
                return f"{f'its {NAME}' if 'config.yaml' in names else 'it'} was removed; {there}"
            place = Path(f"/proc/self/fd/{self._file}").readlink()
            if os.path.samestat(os.fstat(self._file), place.stat()):
                return f"it was moved; go on with convoy train {place.parent} --resume"
        return f"its disk was unmounted, or another put there; {there}; bring it back, then go on with --resume"


@contextmanager
def locked(
    folder: Path, patience_s: float = 0.0, tell: Callable[[str], None] = lambda sentence: None
) -> Iterator[Lock]:
    """Keep other processes from training in a folder; wait so many seconds for one that is about to end."""
    try:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConvoyError(f"cannot write to {folder} ({error.strerror}): choose another --out") from error
    with contextlib.suppress(OSError):  # that of somebody else stays as it is
        os.fchmod(file, _mode(folder))
    try:
        if _wait_for(file, folder, max(_LOOK_S, patience_s), tell):
            with contextlib.suppress(OSError):  # say whose it is, if there is room
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        else:
            tell(f"the file system of {folder} knows no locks: see to it that no other process trains there")
        yield Lock(file, folder)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would leave it to what was forked meanwhile
        os.close(file)


def _mode(folder: Path) -> int:
    """Of the lock's file: whoever can open it can lock it, so only those may who could train in the folder."""
    mode = folder.stat().st_mode
    return 0o600 | 0o060 * bool(mode & stat.S_IWGRP) | 0o006 * bool(mode & stat.S_IWOTH)


def is_locked(folder: Path) -> bool | None:
    """Whether a process trains in a folder now; None where that cannot be told."""
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        taken = _take(file, fcntl.LOCK_SH)
    finally:
        os.close(file)
    return None if taken is None else not taken


def busy(folder: Path) -> str:
    """What to say where another process trains in a folder."""
    return f"another process is training in {folder}{_holder(folder)}: wait for its end, or choose another --out"


def _wait_for(file: int, folder: Path, patience_s: float, tell: Callable[[str], None]) -> bool:
    """Take the lock; False where there are none."""
    began, told = time.monotonic(), False
    while (is_taken := _take(file, fcntl.LOCK_EX)) is False:
        waited_s = time.monotonic() - began
        if waited_s >= patience_s:
            raise ConvoyError(busy(folder))
        if not told and waited_s > _LOOK_S:
            told = True
            tell(f"waiting for the end of another process that is training in {folder}{_holder(folder)}")
        time.sleep(0.1)
    return is_taken is not None


def _take(file: int, kind: int) -> bool | None:
    """Whether this process has the lock now; None where the file system has none."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _holder(folder: Path) -> str:
    """Who has signed last, in words."""
    try:
        holder = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return f" (process {holder['process']} on host {holder['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
