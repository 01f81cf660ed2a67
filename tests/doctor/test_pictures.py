"""What a picture costs: waiting for its bytes is told from work on it, for storage of either kind."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from convoy.data import AugmentConfig, DataConfig, open_data, turbo
from convoy.data.dataset import DataSet
from convoy.data.decode import BadImage
from convoy.data.sources import EncodedSource
from convoy.doctor import pictures
from convoy.doctor.facts import Pictures
from convoy.doctor.pictures import measure_pictures
from data.made import encoded, picture
from tiny import write_mnist

WAIT_S = 0.01
SAMPLES = np.arange(32)


class Photos(EncodedSource):
    """JPEG files whose bytes have to be waited for, one after another or several at once."""

    def __init__(self, wait_s: float = 0.0, at_once: bool = True, bad: int = -1, side: int = 96) -> None:
        self.labels = np.zeros(len(SAMPLES), np.int64)
        self._file = encoded(picture(width=side, height=side), "JPEG", quality=95)
        self._wait_s, self._bad, self._line = wait_s, bad, None if at_once else threading.Lock()

    def read(self, sample: int) -> bytes:
        if sample == self._bad:
            raise BadImage("photo", "is cut off")
        if self._line is None:
            time.sleep(self._wait_s)
        else:
            with self._line:
                time.sleep(self._wait_s)
        return self._file

    def name(self, sample: int) -> str:
        return f"photo {sample}"


def measured(source: EncodedSource, samples: NDArray[np.int64] = SAMPLES, side: int = 48) -> Pictures | None:
    data = DataSet("photos", ["a", "b"], source, source, side, 3, (0.5,) * 3, (0.5,) * 3, side + 8)
    config = DataConfig(path="photos", augment=AugmentConfig(crop="random-resized", flip=True))
    return measure_pictures(data, config, samples, seed=3)


def test_waiting_for_bytes_is_no_work() -> None:
    slow, fast = measured(Photos(WAIT_S)), measured(Photos())
    assert slow is not None and fast is not None
    assert slow.read_s == pytest.approx(WAIT_S, rel=0.5)
    assert fast.read_s < WAIT_S / 4
    assert fast.cpu_s / 4 < slow.cpu_s < WAIT_S


def test_work_of_reading_is_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a read that computes for as long."""

    def compute(seconds: float) -> None:
        ends = time.thread_time() + seconds
        while time.thread_time() < ends:
            pass

    monkeypatch.setattr(time, "sleep", compute)
    found = measured(Photos(WAIT_S))
    assert found is not None and found.read_s < WAIT_S / 5 and found.least_read_s < 0.8 * WAIT_S


def test_what_is_slow_to_answer_is_told_from_what_carries_little() -> None:
    answers, carries = measured(Photos(WAIT_S)), measured(Photos(WAIT_S, at_once=False))
    assert answers is not None and carries is not None
    assert answers.read_s == pytest.approx(carries.read_s, rel=0.5)
    assert answers.least_read_s < 0.4 * WAIT_S  # eight readers
    assert carries.least_read_s == pytest.approx(WAIT_S, rel=0.5)


def test_large_photographs_are_cheaper_once_they_are_packed() -> None:
    found = measured(Photos(side=480))
    assert found is not None and found.packed_s is not None and found.raw_s is not None
    assert found.raw_s < found.packed_s < 0.6 * found.cpu_s
    assert found.short_side == 56
    assert (found.turbo_s is None) == bool(turbo.missing())


def test_packing_what_is_packed_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Photos()
    monkeypatch.setattr(pictures, "packed_picture", lambda source, sample, options: Stored(source.read(sample)))
    found = measured(source)
    assert found is not None and found.packed_s is None and found.raw_s is None


class Stored:
    def __init__(self, data: bytes) -> None:
        self.data = data


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_few_pictures_suffice(number: int) -> None:
    found = measured(Photos(), SAMPLES[:number])
    assert found is not None and found.cpu_s > 0
    assert all(np.isfinite(each) for each in (found.read_s, found.least_read_s, found.packed_s))


def test_it_does_not_take_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MOST_S", 0.05)
    began = time.perf_counter()
    found = measured(Photos(0.04, at_once=False))
    assert found is not None and found.read_s == pytest.approx(0.04, rel=0.5)
    assert time.perf_counter() - began < 1.5  # of 2.5 for all of them


@pytest.mark.parametrize("bad", [0, 20])
def test_a_picture_that_cannot_be_read_is_no_measurement(bad: int) -> None:
    assert measured(Photos(bad=bad)) is None


def test_pictures_in_memory(tmp_path: Path) -> None:
    data = open_data(DataConfig(path=str(write_mnist(tmp_path / "data"))))
    plain = measure_pictures(data, DataConfig(path="data"), SAMPLES, seed=3)
    assert plain is not None and plain.in_memory
    assert 0 < plain.cpu_s < 1e-3
    assert plain.read_s == 0 and plain.packed_s is None and plain.turbo_s is None
    cut = DataConfig(path="data", augment=AugmentConfig(crop="random-resized"))
    resized = measure_pictures(replace(data, resize=32), cut, SAMPLES, seed=3)
    assert resized is not None and not resized.in_memory and resized.cpu_s > plain.cpu_s
