"""Control groups that limit the memory of a rank's process and know the most that it had: Linux, version 1, root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import ConvoyError

_ROOT = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class MemoryGroup:
    """One of them; a process that has more than its limit is killed."""

    path: Path

    @property
    def peak(self) -> int:
        """The most bytes that its processes had together."""
        return int((self.path / "memory.max_usage_in_bytes").read_text())


@contextmanager
def memory_groups(num: int, limit: int | None) -> Iterator[list[MemoryGroup]]:
    """Groups for `num` processes, gone when the context is left; by then the processes must have ended."""
    parent = _own()
    made: list[MemoryGroup] = []
    try:
        for number in range(num):
            path = parent / f"convoy-{os.getpid()}-{number}"
            try:
                path.mkdir()
                made.append(MemoryGroup(path))
                if limit is not None:
                    (path / "memory.limit_in_bytes").write_text(str(limit), encoding="ascii")
            except OSError as error:
                raise ConvoyError(
                    f"the memory of a process cannot be limited here ({error}): run this as root"
                ) from error
        yield made
    finally:
        for group in made:
            group.path.rmdir()


def _own() -> Path:
    """The memory group of this process, within which others are made."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            whole = _ROOT / path.lstrip("/")
            return whole if whole.is_dir() else _ROOT
    raise ConvoyError("the memory of a process cannot be limited here: that needs Linux with control groups version 1")
