"""The folder of a process that starts ranks: for this user alone, and gone with the process, however that ends."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "convoy-launch-"
_SOON_S = 60.0  # a folder that is younger may not be locked yet


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of mode 0700 in the temporary directory; folders of processes that were killed are removed. It stays
    locked while its process lives. That tells the next one which folders are in use, and systemd, which removes what
    has not been touched for ten days, leaves a locked folder alone."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = _locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """A file descriptor that holds the lock of a folder; None where it is not this user's, or another process's."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # it is taken, or the file system has no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid():
            return lock
    os.close(lock)
    return None


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime > _SOON_S and (lock := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
