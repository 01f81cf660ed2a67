"""Control groups whose processes together get a share of a core: version 1 and version 2 of Linux's."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from convoy.bench.emulated.network import is_left
from convoy.errors import ConvoyError

PERIOD_S = 0.004  # in each period a group may run for its share of it
_LEAST_S = 0.001  # that Linux gives
_PATIENCE_S = 1.0
_MOUNTS = Path("/proc/self/mountinfo")
_OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Hierarchy:
    """Where groups are made."""

    folder: Path  # the group within which others are
    version: int  # of control groups, 1 or 2

    @staticmethod
    def find() -> "Hierarchy":
        """The one that has the controller of processor time."""
        for line in _MOUNTS.read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            place, kind, options = Path(before.split()[4]), after.split()[0], after.split()[-1].split(",")
            if kind == "cgroup" and "cpu" in options:
                return Hierarchy(_own_group(place), 1)
            if kind == "cgroup2" and "cpu" in _words(place / "cgroup.controllers"):
                return Hierarchy(place, 2)
        raise ConvoyError(
            "a device cannot have a share of a core here, because Linux's control groups (cgroups) with the "
            "controller cpu are not mounted: give every device the speed 1, or mount them"
        )

    def make(self, name: str, share: float) -> Path:
        """A group with a share of a core."""
        period = round(max(PERIOD_S, _LEAST_S / share) * 1e6)
        quota = round(period * share)
        group = self.folder / name
        try:
            if self.version == 2 and "cpu" not in _words(self.folder / "cgroup.subtree_control"):
                (self.folder / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
            group.mkdir()
            if self.version == 2:
                (group / "cpu.max").write_text(f"{quota} {period}", encoding="ascii")
            else:
                (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
                (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")
        except OSError as error:
            if group.is_dir():
                group.rmdir()
            raise ConvoyError(
                f"a device cannot have a share of a core here ({error}): run this as root outside of a container, "
                "or give every device the speed 1"
            ) from error
        return group


@contextmanager
def made_groups(prefix: str, shares: Sequence[float]) -> Iterator[list[Path | None]]:
    """A group for each share of a core, gone when the context is left; none for a whole core.

    Processes that are still there then are given back to the group around.
    """
    hierarchy = Hierarchy.find() if any(share < 1 for share in shares) else None
    made: list[Path | None] = []
    try:
        for number, share in enumerate(shares):
            made.append(None if share == 1 or hierarchy is None else hierarchy.make(f"{prefix}device{number}", share))
        yield made
    finally:
        for group in made:
            if group is not None:
                _remove(group)


def sweep() -> None:
    """Remove what a process that was killed has left behind."""
    try:
        hierarchy = Hierarchy.find()
    except ConvoyError:
        return
    for group in hierarchy.folder.glob("convoy-*"):
        if is_left(group.name):
            _remove(group, patience=0.0)


def enter(group: Path) -> None:
    """Give the calling process, and all that it starts, the share of a group."""
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    except OSError as error:
        raise ConvoyError(
            f"the share of an emulated device cannot be taken ({error}): "
            "enter it as root, before its cluster is removed"
        ) from error


def _remove(group: Path, patience: float = _PATIENCE_S) -> None:
    """Remove a group; processes that do not end in time go to the one around."""
    until = time.monotonic() + patience
    while group.is_dir():
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        if time.monotonic() > until + 1:
            return
        if time.monotonic() > until:
            for process in _words(group / "cgroup.procs"):
                with contextlib.suppress(OSError):
                    (group.parent / "cgroup.procs").write_text(process, encoding="ascii")
        time.sleep(0.01)


def _own_group(mount: Path) -> Path:
    """The group of this process in the hierarchy of version 1, so that limits of those around it hold too; that around
    an emulated device where this process is on one."""
    for line in _OWN.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            whole = mount / path.partition("/convoy-")[0].lstrip("/")
            return whole if whole.is_dir() else mount
    return mount


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
