"""A folder as slow storage would have it: read-only, at so many bytes a second for all readers together.

    python slow_storage.py FOLDER MOUNT_POINT BYTES_PER_SECOND

A file system in user space (FUSE): root, /dev/fuse, libfuse (Debian: libfuse3-3) and the package mfusepy. Nothing stays
in the page cache, so that every epoch reads from the storage. It ends when it is unmounted.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PATIENCE_S = 20.0


def missing() -> str | None:
    """What it would need that is not here."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "root and /dev/fuse are needed"
    if importlib.util.find_spec("mfusepy") is None:
        return "pip install mfusepy"
    try:
        importlib.import_module("mfusepy")
    except OSError:
        return "libfuse is needed (Debian: libfuse3-3)"
    return None


@contextmanager
def slow(folder: Path, mount_point: Path, bytes_per_second: float) -> Iterator[None]:
    """`folder` at `mount_point`, unmounted when the context is left."""
    mount_point.mkdir()
    command = (sys.executable, __file__, str(folder), str(mount_point), str(bytes_per_second))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is not for it
    try:
        until = time.monotonic() + _PATIENCE_S
        while not mount_point.is_mount():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{mount_point} could not be mounted: see what libfuse said")
            time.sleep(0.05)
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(mount_point)), capture_output=True, check=False)
        process.kill()
        process.wait()


def _serve(folder: str, mount_point: str, bytes_per_second: float) -> None:
    mfusepy: Any = importlib.import_module("mfusepy")

    class Storage(mfusepy.Operations):  # type: ignore[misc]
        """Passes everything on to `folder`. One thread serves all, so that a read waits for those before it."""

        use_ns = True
        free_at = 0.0

        def getattr(self, path: str, fh: Any = None) -> dict[str, int]:
            found = Path(folder + path).stat()
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
            return {**{name: getattr(found, name) for name in names}, "st_mtime": found.st_mtime_ns}

        def readdir(self, path: str, fh: Any) -> list[str]:
            return [".", "..", *(entry.name for entry in Path(folder + path).iterdir())]

        def open(self, path: str, flags: int) -> int:
            return os.open(folder + path, os.O_RDONLY)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            content = os.pread(fh, size, offset)
            self.free_at = max(self.free_at, time.perf_counter()) + len(content) / bytes_per_second
            time.sleep(max(self.free_at - time.perf_counter(), 0))
            return content

    mfusepy.FUSE(Storage(), mount_point, foreground=True, nothreads=True, ro=True, direct_io=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], float(sys.argv[3]))
