"""Worker processes write to shared buffers: whoever keeps a batch keeps it, and nothing is left of a worker."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convoy.data import loader
from convoy.data.config import DataConfig
from convoy.data.loader import Buffers
from data.made import same, trained

PHOTOS = 30, 1


def section(path: Path, number: int = 2) -> DataConfig:
    augment = {"crop": "random-resized", "flip": True}
    growing = {"from_size": 16, "begin": 0, "end": 2}
    return DataConfig(path=str(path), image_size=24, workers=number, augment=augment, progressive=growing, repeats=2)


def left() -> list[int]:
    """Descriptors, and worker processes, of this process."""
    return [len(list(Path("/proc/self/fd").iterdir())), len(multiprocessing.active_children())]


@pytest.mark.slow
def test_batches_in_pieces_are_the_same_for_any_number_of_workers(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(section(photos, 0), num=7, batch=40)
    for ahead in (512, 1):
        monkeypatch.setattr(loader, "_SAMPLES_AHEAD", ahead)
        assert same(trained(section(photos, 3), num=7, batch=40), plain)
    before = left()
    assert same(trained(section(photos, 2), num=2, batch=40), plain[:2])
    assert [made.images.shape[2] for made in plain] == [16, 16, 24, 24, 24, 24, 24]
    assert left() == before

    def careless(self: Buffers, slot: int, copied: bool) -> np.ndarray:
        self.free.append(slot)
        return self[slot]

    monkeypatch.setattr(Buffers, "hand_out", careless)  # the control: a buffer is free while its batch is kept
    assert not same(trained(section(photos, 2), num=7, batch=40), plain)


SCRIPT = """
import multiprocessing, sys, time
from contextlib import closing
from convoy.data.config import DataConfig
from convoy.data.dataset import open_data
from convoy.data.loader import training_batches
from convoy.data.order import Order

if __name__ == "__main__":
    section = DataConfig(path=sys.argv[1], image_size=24, workers=2)
    data = open_data(section)
    order = Order(len(data.train), 5, seed=7)
    with closing(training_batches(data, section, order, first_update=0, num_updates=400, seed=7)) as made:
        next(made)
        while len(multiprocessing.active_children()) < 2:
            time.sleep(0.05)  # until then this process makes the batches
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
