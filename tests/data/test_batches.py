"""Batches are a function of seed, epoch and sample, whatever process makes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from convoy.data.batch import BatchMaker
from convoy.data.config import AugmentConfig, DataConfig
from convoy.data.dataset import open_data
from convoy.data.pixels import PixelSource
from convoy.data.sources import Source
from convoy.data.transforms import Geometry
from convoy.errors import ConvoyError
from data.made import Listed, encoded, evaluated, picture, pixels, same, trained

SAMPLES = np.array([7, 3, 11, 3, 0])
ALL = {"crop": "random-resized", "flip": True, "color_jitter": 0.4, "pca_noise": 0.1}
PHOTOS = 7, 3


def source(num: int = 12, side: int = 20, channels: int = 3) -> PixelSource:
    return PixelSource(pixels(num, side, side, channels, num), np.arange(num) % 5, "made")


def maker(data: Source, side: int = 20, resize: int = 0, channels: int = 3, **options: Any) -> BatchMaker:
    fixed = {"seed": 1, "skip_bad": options.pop("skip", False), "decoder": options.pop("decoder", "pillow")}
    return BatchMaker(data, Geometry(side, resize or side, AugmentConfig(**options)), channels, **fixed)


def config(path: Path, **options: Any) -> DataConfig:
    return DataConfig(**({"path": str(path), "image_size": 24, "workers": 0} | options))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augment", [{"crop": "none"}, {"crop": "pad", "pad": 0}, {"crop": "pad", "padding": "reflect"}]
)
def test_all_at_once_and_one_by_one_make_the_same_batch(channels: int, augment: dict[str, Any]) -> None:
    options = augment | {"channels": channels, "resize": 24, "flip": True}
    data = source(side=24, channels=channels)
    files = Listed([encoded(data.open(i)) for i in range(len(data))])
    fast, slow, from_files = maker(data, **options), maker(data, **options), maker(files, **options)
    slow.vectorised = slow.central = False
    assert fast.vectorised and fast.central and not from_files.vectorised
    for epoch in (0, 1, None):
        images = fast.make(SAMPLES, epoch).images
        assert torch.equal(images, slow.make(SAMPLES, epoch).images)
        assert torch.equal(images, from_files.make(SAMPLES, epoch).images)


def test_alternating_mirrors_show_each_picture_both_ways_in_two_epochs_and_reflected_borders_are_the_pictures() -> None:
    """Jordan, 2024, section 3.6 and listing 4."""
    alternate = maker(source(64), flip="alternate", crop="none")
    epochs = [alternate.make(np.arange(64), epoch).images for epoch in range(3)]
    plain = alternate.make(np.arange(64), None).images
    mirrored = [bool((picture != other).any()) for picture, other in zip(epochs[0], plain, strict=True)]
    assert 16 < sum(mirrored) < 48 and torch.equal(epochs[0], epochs[2]) and torch.equal(epochs[1], epochs[0].flip(3))
    reflect, black = (maker(source(), crop="pad", pad=3, padding=padding) for padding in ("reflect", None))
    corners = reflect.geometry.pad_offsets(20, 20, reflect.geometry.draws(1, 0, SAMPLES))
    for sample, corner, made in zip(SAMPLES, corners, reflect.make(SAMPLES, 0).images, strict=True):
        padded = F.pad(torch.from_numpy(source().pixels[sample]).permute(2, 0, 1).double(), (3, 3, 3, 3), "reflect")
        assert torch.equal(made.double(), padded[:, corner[1] : corner[1] + 20, corner[0] : corner[0] + 20])
    assert not torch.equal(black.make(SAMPLES, 0).images, reflect.make(SAMPLES, 0).images)


def test_further_views_are_of_the_same_sample_with_other_draws() -> None:
    files = Listed([encoded(picture(seed=i), "JPEG") if i != 3 else b"" for i in range(12)])
    for data in (source(), files):
        made = maker(data, skip=True, **ALL)
        one, other = (made.make(SAMPLES + 12 * view, 0) for view in (0, 1))
        assert torch.equal(one.samples, other.samples) and torch.equal(one.targets, other.targets)
        assert one.bad == other.bad
        assert not any(torch.equal(*pair) for pair in zip(one.images, other.images, strict=True))


def test_a_samples_picture_depends_on_seed_epoch_and_sample_only() -> None:
    files = Listed([encoded(picture(seed=i), "JPEG") for i in range(12)])
    for made in (
        maker(source(), crop="pad", flip=True, random_erasing=0.9),
        maker(files, **ALL, rand_augment="n2-m9", interpolation="bicubic"),
        maker(files, **ALL, trivial_augment=True, random_erasing=0.9),
    ):
        alone, together = made.make(np.array([3]), 4).images[0], made.make(SAMPLES, 4).images
        assert torch.equal(together[1], alone) and torch.equal(together[3], alone)
        assert not torch.equal(made.make(np.array([3]), 5).images[0], alone)


@pytest.mark.parametrize("channels", [1, 3])
def test_erasing_makes_noise_of_a_rectangle_of_so_many_pictures_and_trivial_augment_moves_most(channels: int) -> None:
    many, numbers = source(400, 24, channels), np.arange(400)
    plain = maker(many, 24, channels=channels).make(numbers, 0).images
    erased = maker(many, 24, channels=channels, random_erasing=0.25).make(numbers, 0).images
    parts = []
    for before, after in zip(plain, erased, strict=True):
        rows, columns = (((before != after).any(0)).any(dim).nonzero().flatten() for dim in (1, 0))
        if len(rows):
            height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
            piece = after[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert (piece != before[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]).float().mean() > 0.8
            parts.append(height * width / 24**2)
    assert 70 < len(parts) < 130 and 0.01 < min(parts) < max(parts) < 0.37 and np.mean(parts) > 0.1
    trivial = maker(many, 24, channels=channels, trivial_augment=True).make(numbers, 0).images
    assert 200 < (trivial != plain).flatten(1).any(1).sum() < 390  # one operation of 14 is none, a strength of 31 too


def test_a_bad_picture_gives_its_place_to_the_next_good_one() -> None:
    files = [encoded(picture(20, 20, seed=i)) for i in range(6)]
    files[2], files[3], files[5] = b"", files[3][:50], b"no picture"
    data = Listed(files)
    made = maker(data, skip=True, flip=True)
    batch, evaluation = made.make(np.array([1, 2, 5, 4]), 0), made.make(np.arange(6), None)
    assert batch.samples.tolist() == [1, 4, 0, 4] and batch.targets.tolist() == data.labels[[1, 4, 0, 4]].tolist()
    assert sorted(sample for sample, _ in batch.bad) == [2, 3, 5]
    assert torch.equal(batch.images[1], batch.images[3])
    assert torch.equal(batch.images[2], made.make(np.array([0]), 0).images[0])
    assert evaluation.samples.tolist() == [0, 1, 4]
    assert torch.equal(evaluation.images, made.make(np.array([0, 1, 4]), None).images)
    assert [sample for sample, _ in evaluation.bad] == [2, 3, 5]
    with pytest.raises(ConvoyError, match="none of the 4 training pictures"):
        maker(Listed([b""] * 4), skip=True).make(np.array([0]), 0)


def test_three_epochs_are_the_same_for_any_number_of_workers_and_after_a_resume(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, state = config(photos, augment=ALL), torch.get_rng_state()
    plain = trained(section)
    assert [batch.epoch for batch in plain] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({tuple(batch.samples.tolist()) for batch in plain}) == 12
    for first, workers in ((1, 1), (8, 2)):
        assert same(trained(config(photos, augment=ALL, workers=workers), first, 12 - first), plain[first:])
    assert torch.equal(torch.get_rng_state(), state)  # torch's random numbers are left alone
    random = np.random.default_rng(0)  # the control: numbers that depend on what was drawn before
    for module in ("batch", "transforms"):
        draw = lambda seed, purpose, epoch, samples, num: random.random((len(samples), num))  # noqa: E731
        monkeypatch.setattr(f"convoy.data.{module}.uniforms", draw)
    assert not same(trained(section, 5, 2), plain[5:7])


def test_an_evaluation_counts_every_sample_once_in_order_and_is_not_augmented(photos: Path) -> None:
    (whole,) = evaluated(config(photos), 9)
    assert whole.targets.tolist() == open_data(config(photos)).test.labels.tolist()
    parts = evaluated(config(photos, workers=2, augment=ALL), 4)
    assert torch.cat([part.samples for part in parts]).tolist() == list(range(9))
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
