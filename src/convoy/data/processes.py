"""Worker processes: where they come from, and how they end."""

import multiprocessing
import os
import tempfile
import threading
from contextlib import suppress
from multiprocessing import util
from multiprocessing.context import ForkServerContext

from convoy.launch.rank import end_with_parent


def forkserver(module: str) -> ForkServerContext:
    """A server process without threads that forks workers: forking this one, which has some, could deadlock. The server
    imports `module`, so that workers begin at once and share its memory."""
    # A socket's path has 107 characters at most, its 32 below the temporary directory. Python asks for that once, and
    # makes a folder there for this user alone.
    if len(os.fsencode(directory := tempfile.gettempdir())) > 107 - 32:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()
        tempfile.tempdir = directory
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["convoy.data.worker_server", module])
    return context


def follow_parent() -> None:
    """In a worker: end with the process that asked for it, however that ended, and not by a signal to its group. The
    process that workers are forked from has left the group, unless another library had started it before."""
    end_with_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(OSError):
        os.setpgid(0, 0)

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
