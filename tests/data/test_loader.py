"""Worker processes write to shared buffers: whoever keeps a batch keeps it, and nothing is left of a worker."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PHOTOS = 30, 1


SCRIPT = """
import multiprocessing, sys, time
from contextlib import closing
from convoy.data import DataConfig, Order, open_data, training_batches

if __name__ == "__main__":
    section = DataConfig(path=sys.argv[1], image_size=24, workers=2)
    data = open_data(section)
    order = Order(len(data.train), 5, seed=7)
    with closing(training_batches(data, section, order, first_update=0, num_updates=400, seed=7)) as made:
        next(made)
        try:
            print(*(process.pid for process in multiprocessing.active_children()), flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print(sum(len(next(made)) for _ in range(20)), flush=True)
"""


@pytest.mark.slow
def test_by_ctrl_c_the_workers_go_on_for_the_step_to_be_finished_and_nothing_is_left(
    tmp_path: Path, photos: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command, pipe = [sys.executable, str(tmp_path / "script.py"), str(photos)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        maps = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        assert len(pids) == 2 and maps and not [line for line in maps if "/dev/shm/" in line]
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)  # up to the end of the last process that has them
        assert (process.returncode, errors, output.split()) == (0, "", ["100"])
