"""What a picture costs: waiting for its bytes is told from work on it, for storage of either kind."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.data.batch import BatchMaker
from convoy.data.config import AugmentConfig, DataConfig
from convoy.data.dataset import DataSet
from convoy.data.decode import turbo_lacks
from convoy.data.sources import EncodedSource
from convoy.doctor import examination
from convoy.doctor.examination import measure_pictures
from convoy.doctor.facts import Pictures
from data.made import encoded, picture
from made_time import MadeTime, made_time

WAIT_S, WORK_S = 0.01, 0.004
"""Seconds that a picture's bytes take, and the work on one."""
SAMPLES = np.arange(32)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MadeTime]:
    """Nothing takes time but what a test says, and no other process has the core."""
    monkeypatch.setattr(examination, "_SCHEDSTAT", tmp_path / "none")
    with made_time(examination) as clock:
        yield clock


def work_on(clock: MadeTime, monkeypatch: pytest.MonkeyPatch, method: str, seconds: Callable[[Any], float]) -> None:
    """A method of what makes batches takes so long, for these samples."""
    make = getattr(BatchMaker, method)

    def working(maker: BatchMaker, *args: Any) -> Any:
        clock.work(seconds((maker, *args)))
        return make(maker, *args)

    monkeypatch.setattr(BatchMaker, method, working)


class Photos(EncodedSource):
    """JPEG files of a side; `arrive` waits for the bytes of one."""

    def __init__(self, arrive: Callable[[], object] = int, side: int = 96) -> None:
        self.labels = np.zeros(len(SAMPLES), np.int64)
        self._file = encoded(picture(width=side, height=side), "JPEG", quality=95)
        self._arrive = arrive

    def read(self, sample: int) -> bytes:
        self._arrive()
        return self._file

    def name(self, sample: int) -> str:
        return f"photo {sample}"


def measured(source: EncodedSource) -> Pictures:
    data = DataSet("photos", ["a", "b"], source, source, 48, 3, (0.5,) * 3, (0.5,) * 3, 56)
    augment = AugmentConfig(crop="random-resized", flip=True)
    facts = measure_pictures(data, DataConfig(path="photos", augment=augment), SAMPLES, 3)
    assert facts is not None
    return facts


def test_waiting_for_bytes_is_told_from_work(clock: MadeTime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def arrive() -> None:
        """For a third of the time another process has the core."""
        clock.sleep(WAIT_S)
        (tmp_path / "none").write_text(f"5 {round(clock.now * 1e9 / 3)} 1")

    assert measured(Photos(arrive)).read_s == pytest.approx(WAIT_S * 2 / 3)
    facts = measured(Photos(partial(clock.work, WAIT_S)))  # a read that computes for as long
    assert (facts.read_s, facts.least_read_s, facts.cpu_s) == pytest.approx((0, 0, WAIT_S))
    # What is packed, and raw, is smaller.
    work_on(clock, monkeypatch, "fill", lambda args: 1e-8 * len(args[0].source.read(int(args[2][0]))))
    facts = measured(Photos(side=480))
    assert facts.packed_s is not None and facts.packed_s < facts.cpu_s and facts.short_side == 56
    assert facts.raw_s is not None and facts.turbo_s == (None if turbo_lacks() else facts.cpu_s)


def test_what_is_slow_to_answer_is_told_from_what_carries_little(clock: MadeTime) -> None:
    """Eight readers ask at once: one storage answers them together, the other one after the other."""
    together = threading.Barrier(8, action=partial(clock.sleep, WAIT_S), timeout=60)

    def answer() -> None:
        if threading.current_thread() is threading.main_thread():
            clock.sleep(WAIT_S)
        else:
            together.wait()

    answers, carries = measured(Photos(answer)), measured(Photos(partial(clock.sleep, WAIT_S)))
    assert [answers.read_s, carries.read_s] == pytest.approx([WAIT_S] * 2)
    assert (answers.least_read_s, carries.least_read_s) == pytest.approx((WAIT_S / 8, WAIT_S))
