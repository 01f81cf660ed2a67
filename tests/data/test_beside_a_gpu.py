"""Batches that threads make ahead, or that a GPU cuts out of pictures that lie there, are those of the plain way."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from convoy.data import AugmentConfig, DataConfig, DataSet, Order, loader, training_batches
from convoy.data.batch import BatchMaker, Crops
from convoy.data.loader import bring_to, num_workers
from convoy.data.sources import PixelSource
from convoy.data.transforms import Geometry
from convoy.data.workers import Buffers
from convoy.errors import ConvoyError
from data.made import evaluated, pixels, same, trained

HERE = torch.device("cpu")
CASES: list[tuple[dict[str, Any], int, int, int]] = [
    ({"crop": "none", "flip": True}, 20, 26, 3),
    ({"crop": "pad", "flip": True}, 20, 20, 1),
    ({"crop": "pad", "pad": 2, "flip": True}, 20, 24, 3),
    ({"crop": "pad", "pad": 0}, 20, 24, 3),
]


def made(
    augment: dict[str, Any], side: int, resize: int, channels: int, bad: dict[int, str] | None = None
) -> tuple[DataSet, DataConfig]:
    sources = (PixelSource(pixels(n, resize, resize, channels, n), np.arange(n) % 5, "made", bad) for n in (21, 9))
    data = DataSet("made", list("abcde"), *sources, side, channels, (0.5,) * channels, (0.5,) * channels, resize)
    return data, DataConfig(augment=AugmentConfig(**augment), bad_images="skip")


@pytest.fixture(autouse=True)
def _pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever threads were started have ended after the test."""
    before = threading.active_count()
    monkeypatch.setattr(Buffers, "_pin", lambda self: True)
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("case", range(len(CASES)))
def test_all_ways_make_the_same_batches(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {2: "is black", 3: "is black"} if case % 2 else None
    data, config = made(*CASES[case], bad)
    plain, evaluation = trained(config, data=data), evaluated(config, data=data)
    some = {"first": 4, "num": 5, "positions": range(1, 4)}
    part = trained(config, data=data, **some)
    assert all(isinstance(batch.images, torch.Tensor) for batch in plain + evaluation)
    assert same(trained(config, data=data, pin_memory=True), plain)
    assert same(evaluated(config, data=data, pin_memory=True), evaluation)
    assert bring_to(HERE, data, config, 2**20) == []
    for pin_memory in (False, True):
        there = trained(config, data=data, pin_memory=pin_memory)
        assert all(isinstance(batch.images, Crops) for batch in there) and same(there, plain)
        assert same(evaluated(config, data=data, pin_memory=pin_memory), evaluation)
    assert same(trained(config, data=data, **some), part)
    places = BatchMaker._places
    for column in range(4) if case == 2 else ():  # the control: one picture is cut out, or turned, otherwise

        def shifted(self: BatchMaker, samples: np.ndarray, epoch: int, column: int = column) -> np.ndarray:
            array = places(self, samples, epoch)
            array[0, column] = (array[0, column] + 1) % (2 if column == 3 else 3)
            return array

        monkeypatch.setattr(BatchMaker, "_places", shifted)
        assert not same(trained(config, data=data), plain)


@pytest.mark.parametrize("decoder", ["pillow", "turbo"])
def test_a_center_of_pixels_in_memory_is_what_resizing_makes_of_it(decoder: str) -> None:
    source, samples = PixelSource(pixels(6, 26, 26, 3), np.arange(6), "made"), np.arange(6)
    for interpolation in ("nearest", "bilinear", "bicubic", "lanczos"):
        geometry = Geometry(20, 26, AugmentConfig(interpolation=interpolation))
        fast, slow = (BatchMaker(source, geometry, 3, seed=1, skip_bad=False, decoder=decoder) for _ in range(2))
        slow.central = slow.vectorised = False
        assert fast.central and fast.vectorised
        assert torch.equal(fast.evaluation(samples).images, slow.evaluation(samples).images)
        assert torch.equal(fast.training(samples, 1).images, slow.training(samples, 1).images)
        odd = BatchMaker(source, replace(geometry, image_size=21), 3, seed=1, skip_bad=False)
        assert not odd.central and not odd.vectorised


def test_buffers_are_written_to_anew_when_nobody_has_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data, config = made(*CASES[1])
    order, addresses = Order(21, 5, seed=7), set()
    for batch in training_batches(data, config, order, first_update=0, num_updates=40, seed=7, pin_memory=True):
        addresses.add((batch.images.data_ptr(), batch.labels.data_ptr()))
    assert len(addresses) <= 7
    monkeypatch.setattr(Buffers, "hand_out", lambda self, slot, copied: (self.free.append(slot), self[slot])[1])
    assert not same(trained(config, data=data, pin_memory=True), trained(config, data=data))  # the control


def test_an_error_comes_with_its_batch_and_ends_the_threads() -> None:
    data, config = made(*CASES[1], bad={2: "is black"})
    config = config.model_copy(update={"bad_images": "error"})
    order = Order(len(data.train), 5, seed=7)
    wrong = next(k for k in range(4) if 2 in order.update(k)[1])
    options = {"num_updates": 9, "seed": 7, "pin_memory": True}
    batches = training_batches(data, config, order, first_update=0, **options)
    for _ in range(wrong):
        next(batches)
    with pytest.raises(ConvoyError, match="is black"):
        next(batches)
    batches = training_batches(data, config, order, first_update=4, **options)
    next(batches)
    del batches


def test_what_does_not_fit_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    data, config = made({"crop": "none"}, 20, 20, 3)
    data.train.pixels.flags.writeable = False  # is brought without a warning
    needed = [8 * source.pixels.nbytes for source in (data.train, data.test)]
    assert len(bring_to(HERE, data, config, needed[1] - 1)) == 2
    assert data.train.resident is data.test.resident is None
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_brought", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
        notes = bring_to(HERE, data, config, 2**30)
    assert len(notes) == 2 and "25.2 kB are more than others have left free of the GPU's memory" in notes[0]
    assert data.train.resident is data.test.resident is None
    (note,) = bring_to(HERE, data, config, needed[0])
    assert note.startswith("test pictures stay in the host's memory") and "an eighth of the GPU's memory" in note
    there = data.train.resident
    assert there is not None and data.test.resident is None
    assert bring_to(torch.device("cpu:0"), data, config, sum(needed)) == []  # as cuda and cuda:0 are one device
    assert data.train.resident is there and data.test.resident is not None
    assert num_workers(data, config) == (0, "pictures lie on the GPU (25.2 kB), which cuts them out")
    for options in ({"workers": 2}, {"augment": {"color_jitter": 0.1}}, {"augment": {"crop": "random-resized"}}):
        data, _ = made({"crop": "none"}, 20, 20, 3)
        assert bring_to(HERE, data, DataConfig(**options), 2**30) == [] and data.train.resident is None
        assert (data.test.resident is None) == ("workers" in options)
