"""Batches that threads make ahead, or that a GPU cuts out of pictures that lie there, are those of the plain way."""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from convoy.data import AugmentConfig, Batch, DataConfig, DataSet, Order, evaluation_batches, loader, training_batches
from convoy.data.batch import BatchMaker
from convoy.data.buffers import Buffers
from convoy.data.crops import Crops
from convoy.data.loader import bring_to, num_workers
from convoy.data.sources import PixelSource
from convoy.data.transforms import Geometry
from convoy.errors import ConvoyError
from data.made import pixels

HERE = torch.device("cpu")
CASES = [
    ({"crop": "none"}, 20, 20, 3),
    ({"crop": "none", "flip": True}, 20, 26, 3),
    ({"crop": "pad", "flip": True}, 20, 20, 1),
    ({"crop": "pad", "pad": 2, "flip": True}, 20, 24, 3),
    ({"crop": "pad", "pad": 0}, 20, 24, 3),
]


def made(augment: dict, side: int, resize: int, channels: int, bad: dict[int, str] | None = None):
    sources = (PixelSource(pixels(n, resize, resize, channels, n), np.arange(n) % 5, "made", bad) for n in (21, 9))
    data = DataSet("made", list("abcde"), *sources, side, channels, (0.5,) * channels, (0.5,) * channels, resize)
    return data, DataConfig(augment=AugmentConfig(**augment), bad_images="skip")


@pytest.fixture(autouse=True)
def _pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = threading.active_count()
    monkeypatch.setattr(Buffers, "_pin", lambda self: True)
    yield
    assert threading.active_count() == before


def training(data: DataSet, config: DataConfig, *, first: int = 0, num: int = 9, **options) -> list[Batch]:
    order = Order(len(data.train), 5, seed=7)
    batches = training_batches(data, config, order, first_update=first, num_updates=num, seed=7, **options)
    with closing(batches):
        return list(batches)


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.images.to("cpu"), other.images.to("cpu"))
        assert torch.equal(one.labels, other.labels) and torch.equal(one.samples, other.samples)
        assert (one.epoch, one.bad) == (other.epoch, other.bad)


@pytest.mark.parametrize("bad", [None, {2: "is black", 3: "is black"}])
@pytest.mark.parametrize(("augment", "side", "resize", "channels"), CASES)
def test_all_ways_make_the_same_batches(augment, side, resize, channels, bad):
    data, config = made(augment, side, resize, channels, bad)
    plain, evaluated = training(data, config), list(evaluation_batches(data, config, batch=4))
    assert all(isinstance(batch.images, torch.Tensor) for batch in plain + evaluated)
    assert_same(training(data, config, pin_memory=True), plain)
    assert_same(list(evaluation_batches(data, config, batch=4, pin_memory=True)), evaluated)
    assert bring_to(HERE, data, config, 2**20) == []
    for pin_memory in (False, True):
        there = training(data, config, pin_memory=pin_memory)
        assert all(isinstance(batch.images, Crops) for batch in there)
        assert_same(there, plain)
        assert_same(list(evaluation_batches(data, config, batch=4, pin_memory=pin_memory)), evaluated)
    assert_same(
        training(data, config, first=4, num=5, positions=range(1, 4)),
        training(made(augment, side, resize, channels, bad)[0], config, first=4, num=5, positions=range(1, 4)),
    )


@pytest.mark.parametrize("column", [0, 1, 2, 3])
def test_the_comparison_notices_a_wrong_place(column, monkeypatch):
    """The negative control."""
    data, config = made(*CASES[3])
    plain = training(data, config)
    places = BatchMaker._places

    def shifted(self, samples, epoch):
        found = places(self, samples, epoch)
        found[0, column] = (found[0, column] + 1) % 2 if column == 3 else (found[0, column] + 1) % 3
        return found

    monkeypatch.setattr(BatchMaker, "_places", shifted)
    bring_to(HERE, data, config, 2**20)
    with pytest.raises(AssertionError):
        assert_same(training(data, config), plain)


@pytest.mark.parametrize("decoder", ["pillow", "turbo"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_a_center_of_pixels_in_memory_is_what_resizing_makes_of_it(interpolation, decoder):
    source = PixelSource(pixels(6, 26, 26, 3), np.arange(6), "made")
    geometry = Geometry(20, 26, AugmentConfig(interpolation=interpolation))
    fast, slow = (BatchMaker(source, geometry, 3, seed=1, skip_bad=False, decoder=decoder) for _ in range(2))
    slow.central = slow.vectorised = False
    assert fast.central and fast.vectorised
    assert torch.equal(fast.evaluation(np.arange(6)).images, slow.evaluation(np.arange(6)).images)
    assert torch.equal(fast.training(np.arange(6), 1).images, slow.training(np.arange(6), 1).images)
    odd = BatchMaker(source, replace(geometry, image_size=21), 3, seed=1, skip_bad=False)
    assert not odd.central and not odd.vectorised


def test_buffers_are_written_to_anew_when_nobody_has_their_batch(monkeypatch):
    data, config = made(*CASES[2])
    order = Order(len(data.train), 5, seed=7)
    addresses = set()
    with closing(
        training_batches(data, config, order, first_update=0, num_updates=40, seed=7, pin_memory=True)
    ) as batches:
        for batch in batches:
            addresses.add((batch.images.data_ptr(), batch.labels.data_ptr()))
    assert len(addresses) <= 7
    monkeypatch.setattr(Buffers, "hand_out", lambda self, slot, copied: (self.free.append(slot), self[slot])[1])
    with pytest.raises(AssertionError):
        assert_same(training(data, config, num=12, pin_memory=True), training(data, config, num=12))


def test_an_error_comes_with_its_batch_and_ends_the_threads(monkeypatch):
    data, config = made(*CASES[2], bad={2: "is black"})
    config = config.model_copy(update={"bad_images": "error"})
    order = Order(len(data.train), 5, seed=7)
    wrong = next(k for k in range(4) if 2 in order.update(k)[1])
    batches = training_batches(data, config, order, first_update=0, num_updates=9, seed=7, pin_memory=True)
    for _ in range(wrong):
        next(batches)
    with pytest.raises(ConvoyError, match="is black"):
        next(batches)
    batches = training_batches(data, config, order, first_update=wrong + 1, num_updates=9, seed=7, pin_memory=True)
    if wrong < 3:
        next(batches)
    del batches  # threads end: see _pinned


def test_what_does_not_fit_stays_where_it_is():
    data, config = made(*CASES[0])
    needed = [8 * source.pixels.nbytes for source in (data.train, data.test)]
    assert len(bring_to(HERE, data, config, needed[1] - 1)) == 2
    assert data.train.resident is data.test.resident is None
    (note,) = bring_to(HERE, data, config, needed[0])
    assert note.startswith("test pictures stay in the host's memory") and "an eighth of the GPU's memory" in note
    assert data.train.resident is not None and data.test.resident is None
    there = data.train.resident
    assert bring_to(torch.device("cpu:0"), data, config, sum(needed)) == []  # as cuda and cuda:0 are one device
    assert data.train.resident is there and data.test.resident is not None
    assert num_workers(data, config) == (0, "pictures lie on the GPU (25.2 kB), which cuts them out")


def test_pictures_stay_where_others_have_taken_the_memory(monkeypatch):
    data, config = made(*CASES[0])

    def full(source, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "_brought", full)
    notes = bring_to(HERE, data, config, 2**30)
    assert len(notes) == 2 and "25.2 kB are more than others have left free of the GPU's memory" in notes[0]
    assert data.train.resident is data.test.resident is None


@pytest.mark.filterwarnings("error")
def test_pictures_that_are_not_to_be_written_to_are_brought_without_a_warning():
    data, config = made(*CASES[0])
    data.train.pixels.flags.writeable = False
    assert bring_to(HERE, data, config, 2**30) == []


@pytest.mark.parametrize(
    "options", [{"workers": 2}, {"augment": {"color_jitter": 0.1}}, {"augment": {"crop": "random-resized"}}]
)
def test_pictures_that_workers_make_stay_with_them(options):
    data, _ = made(*CASES[0])
    config = DataConfig(**options)
    assert bring_to(HERE, data, config, 2**30) == []
    assert data.train.resident is None
    assert (data.test.resident is None) == ("workers" in options)
