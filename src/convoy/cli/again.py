"""How ranks that are started again know the run that they began: by what started them, and by the command line."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from convoy.training.storage.run_directory import RunDirectory


def begun(run: RunDirectory, jobs: Iterable[str], command: str) -> bool:
    """Whether a run was begun by these ranks, before they were started again.

    Args:
        run: perhaps one of others.
        jobs: names of what started the ranks (`convoy.launch.place.job`).
        command: the command line.
    """
    by = run.begun_by()
    return bool(set(jobs) & set(by.get("jobs") or ())) and by.get("command") == command


def run_of(out: Path | None, candidates: Iterable[Path], jobs: Sequence[str], command: str) -> tuple[Path, bool]:
    """The folder of the run, and whether it was begun by these ranks.

    Args:
        out: the folder that the user names, if any.
        candidates: folders to choose the first free one from, without end.
    """
    for path in candidates if out is None else [out]:
        if jobs and begun(RunDirectory(path), jobs, command):
            return path, True
        if out is not None or not path.exists():
            return path, False
    raise AssertionError("candidates without end")
