"""Batches are the same whatever makes them, and nothing is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from convoy.comm.memory import memory_explained
from convoy.data import (
    AugmentConfig,
    Batch,
    DataConfig,
    Order,
    evaluation_batches,
    num_workers,
    open_data,
    training_batches,
)
from convoy.data.batch import BatchMaker, Filled
from convoy.data.workers import Request, Workers
from convoy.errors import ConvoyError, MachineError
from convoy.launch import cores
from data.made import encoded, picture, tar_members, write_folder, write_mnist, write_parquet, write_tar

ALL = AugmentConfig(crop="random-resized", flip=True, color_jitter=0.4, pca_noise=0.1)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    write_folder(root / "train", ("a", "b", "c"), num=7)
    write_folder(root / "val", ("a", "b", "c"), num=3)
    return root


def config(path, **options) -> DataConfig:
    return DataConfig(**({"path": str(path), "image_size": 24} | options))


def batches(section: DataConfig, first: int = 0, num: int = 12, workers: int = 0, batch: int = 5) -> list[Batch]:
    """By default three epochs of 21 pictures."""
    section = section.model_copy(update={"workers": workers})
    data = open_data(section)
    order = Order(len(data.train), batch, seed=7)
    with closing(training_batches(data, section, order, first_update=first, num_updates=num, seed=7)) as made:
        return list(made)


def evaluated(section: DataConfig, batch: int, workers: int = 0) -> list[Batch]:
    section = section.model_copy(update={"workers": workers})
    return list(evaluation_batches(open_data(section), section, batch=batch))


def same(left: Iterable[Batch], right: Iterable[Batch]) -> bool:
    return all(
        torch.equal(a.images, b.images)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.samples, b.samples)
        and (a.epoch, a.bad) == (b.epoch, b.bad)
        for a, b in zip(left, right, strict=True)
    )


_others: set[int | None] = set()


@pytest.fixture(autouse=True)
def _children_of_other_tests():
    _others.update(process.pid for process in multiprocessing.active_children())


def children() -> list[int]:
    """Worker processes of this one, by any way of starting them."""
    found = {process.pid for process in multiprocessing.active_children()} - _others
    return [pid for pid in found if pid is not None]


@pytest.mark.slow
def test_three_epochs_are_the_same_for_any_number_of_workers_and_after_a_resume(photos):
    section = config(photos, augment=ALL)
    plain = batches(section)
    assert [batch.epoch for batch in plain] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({tuple(batch.samples.tolist()) for batch in plain}) == 12
    for workers in (1, 2):
        assert same(batches(section, workers=workers), plain)
    for first in (1, 5, 8):
        assert same(batches(section, first=first, num=12 - first, workers=first % 3), plain[first:])
    assert not same(batches(section, first=1, num=11), plain[:11])
    assert children() == []


def test_rand_augment_is_the_same_in_workers(photos):
    section = config(photos, image_size=200, augment=AugmentConfig(rand_augment="n2-m9"))
    assert same(batches(section, num=3, workers=2), batches(section, num=3))


def test_the_test_of_sameness_notices_a_generator_with_a_state(photos, monkeypatch):
    """The negative control: random numbers that depend on what was drawn before."""
    section = config(photos, augment=ALL)
    plain = batches(section)
    assert same(batches(section, first=5, num=7), plain[5:])
    random = np.random.default_rng(0)
    for module in ("batch", "transforms"):
        monkeypatch.setattr(
            f"convoy.data.{module}.uniforms",
            lambda seed, purpose, epoch, samples, num: random.random((len(samples), num)),
        )
    assert not same(batches(section, first=5, num=7), plain[5:])
    assert not same(batches(section), batches(section))


@pytest.mark.parametrize("kind", ["parquet", "tar", "pixels"])
def test_the_other_sources_go_to_workers_too(tmp_path, kind):
    if kind == "parquet":
        images = [encoded(picture(seed=i), "JPEG") for i in range(12)]
        write_parquet(tmp_path / "x.parquet", images, [i % 2 for i in range(12)])
    elif kind == "tar":
        write_tar(tmp_path / "x.tar", tar_members(12))
    else:
        write_mnist(tmp_path)
    section = config(tmp_path, augment=AugmentConfig(crop="random-resized"))
    assert same(batches(section, num=6, workers=2), batches(section, num=6))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [1, 4, 9, 50])
def test_evaluation_counts_every_sample_once_and_in_order(photos, workers, batch):
    section = config(photos)
    data = open_data(section)
    found = evaluated(section, batch, workers)
    assert torch.cat([part.samples for part in found]).tolist() == list(range(9))
    assert torch.cat([part.labels for part in found]).tolist() == data.test.labels.tolist()
    assert all(part.images.shape == (len(part), 3, 24, 24) for part in found)
    (whole,) = evaluated(section, 9)
    assert torch.equal(torch.cat([part.images for part in found]), whole.images)


def test_an_evaluation_is_not_augmented(photos):
    (plain,), (augmented,) = (evaluated(config(photos, augment=augment), 9) for augment in (AugmentConfig(), ALL))
    assert torch.equal(plain.images, augmented.images)
    assert len(plain) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pictures_are_skipped_and_reported(tmp_path, workers):
    write_folder(tmp_path / "train", num=6)
    write_folder(tmp_path / "val", num=3)
    (tmp_path / "train" / "cat" / "002.jpg").write_bytes(b"")
    (tmp_path / "val" / "dog" / "001.jpg").write_bytes(b"broken")
    section = config(tmp_path, bad_images="skip", augment=AugmentConfig(flip=True))
    made = batches(section, num=6, batch=4, workers=workers)
    assert [bad for batch in made for bad in batch.bad] == [(2, "is an empty file")] * 2
    assert all(len(batch) == 4 and 2 not in batch.samples for batch in made)
    found = evaluated(section, 2, workers)
    assert torch.cat([batch.samples for batch in found]).tolist() == [0, 1, 2, 3, 5]
    assert [bad for batch in found for bad in batch.bad] == [(4, "is no picture in a known format")]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_picture_is_one_sentence_even_from_a_worker(tmp_path, workers):
    write_folder(tmp_path / "train", num=6)
    write_folder(tmp_path / "val")
    (tmp_path / "train" / "cat" / "002.jpg").write_bytes(b"")
    with pytest.raises(ConvoyError) as error:
        batches(config(tmp_path), workers=workers, batch=6, num=4)
    assert str(error.value) == (
        "train/cat/002.jpg is an empty file: mend or remove it, or set data.bad_images=skip (--bad-images skip); "
        "convoy data PATH --check names all of them"
    )
    assert children() == []


def test_a_file_that_vanishes_is_named(tmp_path):
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "val")
    section = config(tmp_path, workers=0)
    data = open_data(section)
    (tmp_path / "val" / "cat" / "000.jpg").unlink()
    with pytest.raises(ConvoyError, match=r"val/cat/000.jpg cannot be read \(No such file"):
        list(evaluation_batches(data, section, batch=4))


def open_loader(section: DataConfig, num: int = 400):
    section = section.model_copy(update={"workers": 2})
    data = open_data(section)
    order = Order(len(data.train), 5, seed=7)
    return training_batches(data, section, order, first_update=0, num_updates=num, seed=7)


def test_a_loader_that_is_left_half_way_ends_its_workers(photos):
    section = config(photos)
    made = open_loader(section)
    next(made)
    assert len(children()) == 2
    made.close()
    assert children() == []
    made = open_loader(section)
    next(made)
    del made
    assert children() == []


def test_an_exception_in_the_loop_ends_the_workers(photos):
    section = config(photos)
    with pytest.raises(ZeroDivisionError), closing(open_loader(section)) as made:
        for _ in made:
            1 / 0  # noqa: B018
    assert children() == []


def test_a_worker_that_is_killed_ends_in_one_sentence(photos):
    made = open_loader(config(photos))
    next(made)
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(MachineError, match=r"a process that loads pictures died .*data.workers") as error:
        for _ in made:
            pass
    assert "\n" not in str(error.value)
    assert children() == []


@dataclass
class Hungry:
    """Makes batches for which memory lacks."""

    error: Exception
    shape = (3, 8, 8)

    def fill(self, *_) -> Filled:
        raise self.error


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")]
)
def test_a_worker_that_lacks_memory_gets_no_advice_for_gpus(error):
    words = r"^a process that loads pictures ran out of memory: lower data\.workers$"
    with pytest.raises(MachineError, match=words), memory_explained(0, 1):
        next(Workers(Hungry(error), iter([Request(np.arange(2))]), 2, most=1).batches())
    assert children() == []


def test_signals_to_the_whole_group_do_not_reach_the_workers(photos):
    with closing(open_loader(config(photos))) as made:
        next(made)
        deadline = time.monotonic() + 20  # the first batch is one worker's, another may just have begun
        while os.getpgid(0) in (groups := {os.getpgid(pid) for pid in children()}) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert groups and os.getpgid(0) not in groups


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


@contextmanager
def start(folder, photos, stderr=None):
    """A script in a process group of its own that has two workers, and their process numbers."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(photos)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True) as process:
        workers = [int(number) for number in process.stdout.readline().split()]
        assert len(workers) == 2
        yield process, workers
        process.kill()


@pytest.fixture
def started(tmp_path, photos):
    with start(tmp_path, photos) as found:
        yield found


def gone(numbers: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{number}").exists() for number in numbers):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_nothing_outlives_a_killed_training_process(started):
    process, workers = started
    server = int(Path(f"/proc/{workers[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    process.kill()
    process.wait()
    assert gone([*workers, server])


@pytest.mark.slow
def test_a_killed_training_process_leaves_nothing_and_not_a_word(tmp_path, photos):
    with start(tmp_path, photos, stderr=subprocess.PIPE) as (process, workers):
        # Of both: one has made a batch, the other may just have begun.
        maps = [line for worker in workers for line in Path(f"/proc/{worker}/maps").read_text().splitlines()]
        assert maps and not [line for line in maps if "/dev/shm/" in line]
        process.kill()
        assert process.stderr.read() == ""  # up to the end of the last process that has it


@pytest.mark.slow
def test_ctrl_c_leaves_the_workers_to_finish_the_step(started):
    process, workers = started
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert output.split() == ["100"]
    assert process.returncode == 0
    assert gone(workers)


def test_torchs_random_numbers_are_left_alone(photos):
    section = config(photos, augment=ALL)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for workers in (0, 1):
        batches(section, num=2, workers=workers)
        evaluated(section, 4, workers)
    assert torch.equal(torch.get_rng_state(), state)


def test_in_memory_batches_cross_epochs_and_resume(tmp_path):
    write_mnist(tmp_path)
    section = DataConfig(path=str(tmp_path), augment=AugmentConfig(crop="pad", flip=True))
    plain = batches(section, num=9, batch=12)
    assert [batch.epoch for batch in plain] == [0] * 3 + [1] * 3 + [2] * 3
    assert same(batches(section, first=4, num=5, batch=12), plain[4:])
    assert same(batches(section, num=9, batch=12, workers=1), plain)
    assert batches(section, first=3, num=0) == []


def test_the_automatic_number_of_workers(tmp_path, photos, monkeypatch):
    write_mnist(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.setattr(cores, "cores_allowed", lambda: float("inf"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def number(path, **options) -> int:
        section = DataConfig(path=str(path), **options)
        return num_workers(open_data(section), section)[0]

    assert number(tmp_path) == 0
    assert number(tmp_path, augment=AugmentConfig(crop="pad", flip=True)) == 0
    assert number(tmp_path, augment=AugmentConfig(color_jitter=0.1)) == 12
    assert number(tmp_path, image_size=32) == 12
    assert number(photos) == 12
    assert number(photos, workers=5) == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert number(photos) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert number(photos) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(224), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert number(photos) == 28
    monkeypatch.setattr(cores, "cores_allowed", lambda: 40.5)  # of a container, which knows all cores of its host
    assert number(photos) == 5
    monkeypatch.setenv(cores.PINNED, "0,1,2,3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(28), raising=False)
    assert number(photos) == 5
    monkeypatch.setattr(cores, "cores_allowed", lambda: float("inf"))
    assert number(photos) == 28
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(112), raising=False)
    assert number(photos) == 32


def test_a_batch_of_nothing_is_refused_at_once(photos):
    with pytest.raises(ConvoyError, match="at least 1"):
        evaluation_batches(open_data(config(photos)), config(photos), batch=0)


def test_a_batch_in_memory_is_made_at_once(tmp_path, monkeypatch):
    """Neither picture by picture nor by a worker, which would cost more than an update of a small network."""
    write_mnist(tmp_path)
    monkeypatch.setattr(BatchMaker, "fill", lambda *_: pytest.fail("picture by picture"))
    for augment in (AugmentConfig(), AugmentConfig(crop="pad", flip=True)):
        section = DataConfig(path=str(tmp_path), augment=augment)
        assert num_workers(open_data(section), section)[0] == 0
        assert len(batches(section, batch=12)) == 12
    with pytest.raises(pytest.fail.Exception, match="picture by picture"):
        batches(section.model_copy(update={"augment": AugmentConfig(color_jitter=0.1)}), batch=12)
