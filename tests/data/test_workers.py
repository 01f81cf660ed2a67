"""Worker processes write to shared buffers: whoever keeps a batch keeps it, and their number follows the need."""

import errno
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
import torch

from convoy.comm.position import current
from convoy.data import AugmentConfig, DataConfig, Order, open_data, training_batches, workers
from convoy.data.batch import Batch, Filled
from convoy.data.buffers import Buffers
from convoy.data.memory import SharedNumbers
from convoy.data.sources import PixelSource
from convoy.data.workers import Request, Workers
from convoy.errors import ConvoyError, MachineError
from data.made import pixels, write_folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    write_folder(root / "train", ("a", "b", "c"), num=30)
    write_folder(root / "val", ("a", "b", "c"), num=1)
    return root


def images(photos, num_workers: int, batch: int = 40, num: int = 12) -> torch.Tensor:
    """Of batches that are all kept."""
    augment = AugmentConfig(crop="random-resized", flip=True)
    section = DataConfig(path=str(photos), image_size=24, workers=num_workers, augment=augment)
    data = open_data(section)
    order = Order(len(data.train), batch, seed=7)
    with closing(training_batches(data, section, order, first_update=0, num_updates=num, seed=7)) as made:
        return torch.stack([one.images for one in list(made)])


@pytest.mark.parametrize("ahead", [1, 512])
def test_batches_in_pieces_are_the_same_for_any_number_of_workers(photos, monkeypatch, ahead):
    monkeypatch.setattr(workers, "_SAMPLES_AHEAD", ahead)
    plain = images(photos, 0)
    for number in (1, 3):
        assert torch.equal(images(photos, number), plain)


def test_the_comparison_notices_buffers_that_are_written_to_too_early(photos, monkeypatch):
    """The negative control: a buffer is free again while its batch is kept."""

    def careless(self, slot: int, copied: bool) -> tuple[np.ndarray, np.ndarray]:
        self.free.append(slot)
        return self[slot]

    plain = images(photos, 0)
    monkeypatch.setattr(workers, "_SAMPLES_AHEAD", 1)
    monkeypatch.setattr(Buffers, "hand_out", careless)
    assert not torch.equal(images(photos, 2), plain)


def test_an_error_comes_with_its_batch(tmp_path):
    write_folder(tmp_path / "train", num=20)
    write_folder(tmp_path / "val")
    section = DataConfig(path=str(tmp_path), image_size=24, workers=2)
    data = open_data(section)
    order = Order(len(data.train), 4, seed=1)
    bad = int(order.update(7)[1][2])
    (tmp_path / data.train.name(bad)).write_bytes(b"")
    made = training_batches(data, section, order, first_update=0, num_updates=9, seed=1)
    assert len([next(made) for _ in range(7)]) == 7
    with pytest.raises(ConvoyError, match="is an empty file"):
        next(made)


@dataclass
class Slow:
    """Takes its time for every sample."""

    seconds: float
    shape = (1, 2, 2)

    def fill(self, images: np.ndarray, samples: np.ndarray, epoch: int | None) -> Filled:
        time.sleep(self.seconds * len(samples))
        images[: len(samples)] = (samples % 256)[:, None, None, None]
        return Filled(samples)

    def batch(self, images: np.ndarray, filled: Filled, epoch: int, labels: np.ndarray) -> Batch:
        labels[:] = filled.samples
        return Batch(torch.from_numpy(images), torch.from_numpy(labels), torch.from_numpy(filled.samples), epoch)


@pytest.mark.parametrize(("seconds", "expected"), [(0.002, [2]), (0.0, [])])
def test_others_start_where_batches_are_waited_for(seconds, expected, monkeypatch):
    monkeypatch.setattr(workers, "_WAITED", 0.4)  # machines that test are busy
    told: list[int] = []
    requests = (Request(np.arange(k, k + 8), 0) for k in range(40))
    crew = Workers(Slow(seconds), requests, 8, most=2, first=1, told=told.append)
    with closing(crew.batches()) as made:
        for k, batch in enumerate(made):
            assert k or crew.num == 1
            assert batch.images[:, 0, 0, 0].tolist() == list(range(k, k + 8))
            time.sleep(0.001 if expected else 0.03)
    assert told == expected


def test_a_worker_gets_no_copy_of_what_grows_with_the_data(photos):
    data = open_data(DataConfig(path=str(photos)))
    pieces = []
    for source in (data.train, data.train.subset(np.arange(80))):
        state = source.__getstate__()
        assert state["labels"] == range(len(source))
        pieces.append(len(pickle.dumps({key: value for key, value in state.items() if key in ("labels", "_root")})))
    assert max(pieces) < 300
    numbers = SharedNumbers(np.arange(10))
    assert numbers.array.tolist() == list(range(10))


def test_pixels_in_memory_are_not_copied_into_every_worker():
    source = PixelSource(pixels(300, 32, 32, 3), np.arange(300) % 10, "made")
    before = source.pixels.copy()
    state = source.__getstate__()
    assert state["pixels"] is None and len(pickle.dumps({k: v for k, v in state.items() if k != "_shared"})) < 500
    assert source.__getstate__()["_shared"] is state["_shared"] and np.array_equal(source.pixels, before)
    assert np.array_equal(source.subset(np.arange(5)).pixels, before[:5])


def test_pieces_on_their_way_fit_into_the_smallest_pipe():
    """Or the training process could wait for a worker to take one, and that for its answer to be read."""
    assert workers._MOST_SENT * workers._TASK.size <= 4096


def test_many_workers_take_every_piece_once():
    """They read from one pipe without a lock, whose pages end within a task."""
    requests = [Request(np.arange(k, k + 600), 0) for k in range(60)]
    with closing(Workers(Slow(0), iter(requests), 600, most=6).batches()) as made:
        for request, batch in zip(requests, made, strict=True):
            assert np.array_equal(batch.images[:, 0, 0, 0], request.samples % 256)


def now() -> list[int]:
    """Descriptors, and worker processes, of this process."""
    return [len(list(Path("/proc/self/fd").iterdir())), len(multiprocessing.active_children())]


def test_nothing_is_left_of_workers_that_have_ended(photos):
    images(photos, 2, num=2)
    before = now()
    for _ in range(4):
        images(photos, 2, num=2)
    assert now() == before


class Deaf(Slow):
    """Its worker hears no SIGTERM."""

    def fill(self, images: np.ndarray, samples: np.ndarray, epoch: int | None) -> Filled:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().fill(images, samples, epoch)


def test_workers_that_ignore_signals_end_too():
    before, began = now()[1], time.monotonic()
    made = Workers(Deaf(0), (Request(np.arange(4), 0) for _ in range(1000)), 4, most=1).batches()
    next(made)
    made.close()
    assert now()[1] == before and time.monotonic() - began < 20


def test_a_second_worker_that_cannot_be_started_leaves_no_first_one(monkeypatch):
    own, started = ForkServerProcess.start, []

    def start(self) -> None:
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        own(self)
        started.append(self)

    monkeypatch.setattr(ForkServerProcess, "start", start)
    before = now()[1]
    with pytest.raises(MachineError, match=r"died .*Resource temporarily unavailable.*lower data.workers"):
        next(Workers(Slow(0), iter([Request(np.arange(4), 0)]), 4, most=2).batches())
    assert started and now()[1] == before


def test_who_holds_a_batch_up_is_named_with_its_samples(photos):
    section = DataConfig(path=str(photos), image_size=24, workers=2)
    data, order = open_data(section), Order(90, 40, seed=7)
    with closing(training_batches(data, section, order, first_update=0, num_updates=9, seed=7)) as made:
        next(made)
        stopped = {child.pid for child in multiprocessing.active_children() if child.name == "convoy-pictures"}
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        late: list[str] = []

        def look() -> None:
            while not late or late[-1].count("stopped") < 2:
                time.sleep(0.05)
                with suppress(TypeError):  # nothing is waited for yet, or any more
                    late.append(current.late())
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=look)
        thread.start()
        batches = list(made)
        thread.join()
    assert len(batches) == 8 and current.late is None
    form = r"process (\d+), which is stopped, has not (?:delivered|taken) (?:train/\w/\d+\.jpg,? ){3}and \d+ more"
    found = [re.fullmatch(form, words) for words in late[-1].split("; ")]
    assert {int(each[1]) for each in found if each} == stopped, late[-1]
