"""What Linux's control groups (cgroups), versions 1 and 2, leave of the machine to this process."""

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
"""The file that says which groups the process is in."""
ROOT = Path("/sys/fs/cgroup")
"""Where their file systems are."""


def folders(controller: str, membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """The folder of each group of a controller that the process is in, and of all around it, with the version."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        version = 2 if controllers == "" else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        mount = root if version == 2 else root / controller
        parts = [part for part in path.split("/") if part and part != ".."]
        for length in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:length]), version


def cores_allowed(membership: Path = MEMBERSHIP, root: Path = ROOT) -> float:
    """The number of cores whose time the process may use in a period; infinite where nobody says."""
    found = float("inf")
    for folder, version in folders("cpu", membership, root):
        if version == 2:
            words = _text(folder / "cpu.max").split()
        else:
            words = [_text(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            found = min(found, int(words[0]) / int(words[1]))
    return found


def memory_limits(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[int]:
    """Bytes that each of the groups may have."""
    for folder, version in folders("memory", membership, root):
        text = _text(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if text.isdecimal():
            yield int(text)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
