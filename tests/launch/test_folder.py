"""The folder of a launcher: nobody else's, locked as long as it lives, and swept by the next one when it is gone."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from convoy.launch.rank import private_folder

LAUNCHER = """
import signal
from convoy.launch.rank import private_folder
with private_folder() as folder:
    (folder / "pid-0").touch()
    print(folder, flush=True)
    signal.pause()
"""


def aged(folder: Path) -> Path:
    then = time.time() - 3600
    os.utime(folder, (then, then))
    return folder


def test_what_launchers_leave_is_swept_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    launchers = [subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) for _ in "ab"]
    try:
        living, killed = (aged(Path(each.stdout.readline().strip())) for each in launchers if each.stdout is not None)
        launchers[1].send_signal(signal.SIGKILL)
        launchers[1].wait(10)
        victim = tmp_path / "victim"
        young, theirs = tmp_path / "convoy-launch-young", tmp_path / "convoy-launch-theirs"
        for folder in (victim, young, theirs):
            folder.mkdir()
        aged(victim)
        aged(theirs)
        if os.geteuid() == 0:
            os.chown(theirs, 65534, 65534)
        link = tmp_path / "convoy-launch-link"
        link.symlink_to(victim)
        os.utime(link, (0, 0), follow_symlinks=False)
        with private_folder() as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            left = {living, victim, young, link, folder} | ({theirs} if os.geteuid() == 0 else set())
            assert set(tmp_path.iterdir()) == left and killed not in left
        assert not folder.exists()
    finally:
        for each in launchers:
            each.kill()
            each.communicate()
