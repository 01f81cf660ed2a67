"""Wakes a core all the time, so that Linux looks how long groups with a share of it have run.

    python pulse.py CORE PARENT

Otherwise Linux looks when its clock ticks, every 4 ms as a rule: a device of half a core would compute for 4 ms or 8 ms
at the speed of a whole one, and then not at all. This takes about one percent of the core.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

INTERVAL_S = 0.001
_PR_SET_PDEATHSIG = 1


@contextmanager
def pulses(cores: Iterable[int]) -> Iterator[None]:
    """A process for each core, which ends with the context, or with this process."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            command = (sys.executable, "-I", "-S", __file__, str(core), str(os.getpid()))
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _beat(core: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, {core})
    with contextlib.suppress(OSError):  # without, it wakes a little late
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while os.getppid() == parent:
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    _beat(int(sys.argv[1]), int(sys.argv[2]))
