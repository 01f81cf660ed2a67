"""Batches are a function of seed, epoch and sample, whatever makes them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convoy import resources
from convoy.data import AugmentConfig, DataConfig, evaluation_batches, num_workers, open_data
from convoy.data.batch import BatchMaker
from convoy.data.sources import PixelSource, Source
from convoy.data.transforms import Geometry
from convoy.errors import ConvoyError
from data.made import (
    Listed,
    encoded,
    evaluated,
    opened,
    picture,
    pixels,
    same,
    tar_members,
    trained,
    write_folder,
    write_mnist,
    write_parquet,
    write_tar,
)

SAMPLES = np.array([7, 3, 11, 3, 0])
ALL = {"crop": "random-resized", "flip": True, "color_jitter": 0.4, "pca_noise": 0.1}


def source(num: int = 12, side: int = 20, channels: int = 3, bad: dict[int, str] | None = None) -> PixelSource:
    return PixelSource(pixels(num, side, side, channels), np.arange(num) % 5, "made", bad)


def maker(
    data: Source, side: int = 20, resize: int = 0, channels: int = 3, skip: bool = False, **augment: Any
) -> BatchMaker:
    geometry = Geometry(side, resize or side, AugmentConfig(**augment))
    return BatchMaker(data, geometry, channels, seed=1, skip_bad=skip)


def test_a_plain_batch_is_the_pixels() -> None:
    data = source()
    batch = maker(data).training(SAMPLES, epoch=2)
    np.testing.assert_array_equal(batch.images, data.pixels[SAMPLES].transpose(0, 3, 1, 2))
    assert (batch.images.dtype, batch.labels.dtype) == (torch.uint8, torch.int64) and batch.images.is_contiguous()
    assert batch.labels.tolist() == [2, 3, 1, 3, 0] and batch.samples.tolist() == SAMPLES.tolist()
    assert (batch.epoch, batch.bad, len(batch)) == (2, [], 5)
    assert torch.equal(maker(data).evaluation(SAMPLES).images, batch.images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", [{"crop": "none"}, {"crop": "pad"}, {"crop": "pad", "pad": 0}])
def test_all_at_once_and_one_by_one_make_the_same_batch(channels: int, augment: dict[str, Any]) -> None:
    resize = 24 if augment["crop"] == "pad" else 20
    data = source(side=resize, channels=channels)
    fast, slow = (maker(data, resize=resize, channels=channels, flip=True, **augment) for _ in range(2))
    slow.vectorised = False
    assert fast.vectorised
    for epoch in range(3):
        assert torch.equal(fast.training(SAMPLES, epoch).images, slow.training(SAMPLES, epoch).images)
    files = Listed([encoded(data.open(i)) for i in range(len(data))])
    from_files = maker(files, resize=resize, channels=channels, flip=True, **augment)
    assert not from_files.vectorised
    assert torch.equal(from_files.training(SAMPLES, 1).images, fast.training(SAMPLES, 1).images)


def test_a_samples_picture_depends_on_seed_epoch_and_sample_only() -> None:
    files = Listed([encoded(picture(seed=i), "JPEG") for i in range(12)])
    for made in (
        maker(source(), crop="pad", flip=True),
        maker(files, **ALL, rand_augment="n2-m9", interpolation="bicubic"),
    ):
        alone, together = made.training(np.array([3]), 4).images[0], made.training(SAMPLES, 4).images
        assert torch.equal(together[1], alone) and torch.equal(together[3], alone)
        assert not torch.equal(made.training(np.array([3]), 5).images[0], alone)


def test_half_of_the_pictures_are_flipped() -> None:
    data = source(num=400, side=4)
    flipped = maker(data, side=4, flip=True).training(np.arange(400), 0).images
    plain = torch.from_numpy(data.pixels.transpose(0, 3, 1, 2).copy())
    turned = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, plain, strict=True)]
    assert all(t or torch.equal(a, b) for t, a, b in zip(turned, flipped, plain, strict=True))
    assert 160 < sum(turned) < 240


def test_a_bad_picture_gives_its_place_to_the_next_good_one_or_is_refused_by_name() -> None:
    files = [encoded(picture(20, 20, seed=i)) for i in range(6)]
    files[2], files[3], files[5] = b"", files[3][:50], b"no picture"
    for data in (Listed(files), source(6, bad={2: "is black", 3: "is black", 5: "is black"})):
        batch = maker(data, skip=True, flip=True).training(np.array([1, 2, 5, 4]), 0)
        assert batch.samples.tolist() == [1, 4, 0, 4]
        assert batch.labels.tolist() == data.labels[[1, 4, 0, 4]].tolist()
        assert sorted(sample for sample, _ in batch.bad) == [2, 3, 5]
        assert torch.equal(batch.images[1], batch.images[3])
        assert torch.equal(batch.images[2], maker(data, skip=True, flip=True).training(np.array([0]), 0).images[0])
        evaluation = maker(data, skip=True).evaluation(np.arange(6))
        assert evaluation.samples.tolist() == [0, 1, 4] and len(evaluation.images) == 3
        assert [sample for sample, _ in evaluation.bad] == [2, 3, 5]
    data = Listed([files[0], b""])
    for refused in (lambda: maker(data).training(np.array([0, 1]), 0), lambda: maker(data).evaluation(np.array([1]))):
        with pytest.raises(ConvoyError, match=r"file 1 is an empty file: .*--bad-images skip"):
            refused()
    data = Listed([b""] * 4)
    with pytest.raises(ConvoyError, match="none of the 4 training pictures"):
        maker(data, skip=True).training(np.array([0, 1]), 0)
    empty = maker(data, skip=True).evaluation(np.arange(4))
    assert (len(empty), tuple(empty.images.shape), len(empty.bad)) == (0, (0, 3, 20, 20), 4)


def test_colors_and_sizes_are_converted_as_pillow_does() -> None:
    images = maker(Listed([encoded(picture(mode="L"))])).evaluation(np.array([0])).images
    assert torch.equal(images[:, 0], images[:, 2])
    color = maker(Listed([encoded(picture())]), channels=1, crop="random-resized", color_jitter=0.2)
    assert color.training(np.array([0]), 0).images.shape == (1, 1, 20, 20)
    data = source(3)
    grey = data.with_channels(1)
    for i in range(3):
        np.testing.assert_array_equal(grey.pixels[i, :, :, 0], data.open(i).convert("L"))
    assert (grey.with_channels(3).pixels[..., 1] == grey.pixels[..., 0]).all() and data.with_channels(3) is data
    small = source(side=10)
    assert not maker(small).vectorised
    assert maker(small).training(SAMPLES, 0).images.shape == (5, 3, 20, 20)
    assert maker(small, resize=24).evaluation(SAMPLES).images.shape == (5, 3, 20, 20)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    write_folder(root / "train", ("a", "b", "c"), num=7)
    write_folder(root / "val", ("a", "b", "c"), num=3)
    return root


def config(path: Path, **options: Any) -> DataConfig:
    return DataConfig(**({"path": str(path), "image_size": 24, "workers": 0} | options))


def test_three_epochs_are_the_same_for_any_number_of_workers_and_after_a_resume(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, state = config(photos, augment=ALL), torch.get_rng_state()
    plain = trained(section)
    assert [batch.epoch for batch in plain] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({tuple(batch.samples.tolist()) for batch in plain}) == 12
    assert same(trained(config(photos, augment=ALL, workers=1)), plain)
    for first in (1, 8):
        assert same(trained(config(photos, augment=ALL, workers=first % 3), first, 12 - first), plain[first:])
    assert not same(trained(section, 1, 11), plain[:11])
    assert torch.equal(torch.get_rng_state(), state)  # torch's random numbers are left alone
    random = np.random.default_rng(0)  # the control: numbers that depend on what was drawn before
    for module in ("batch", "transforms"):
        draw = lambda seed, purpose, epoch, samples, num: random.random((len(samples), num))  # noqa: E731
        monkeypatch.setattr(f"convoy.data.{module}.uniforms", draw)
    assert not same(trained(section, 5, 7), plain[5:])


@pytest.mark.parametrize("kind", ["parquet", "tar", "pixels", "rand_augment"])
def test_all_sources_and_augmentations_go_to_workers(tmp_path: Path, photos: Path, kind: str) -> None:
    path, options = tmp_path, {"augment": {"crop": "random-resized"}}
    if kind == "parquet":
        images = [encoded(picture(seed=i), "JPEG") for i in range(12)]
        write_parquet(tmp_path / "x.parquet", images, [i % 2 for i in range(12)])
    elif kind == "tar":
        write_tar(tmp_path / "x.tar", tar_members(12))
    elif kind == "pixels":
        write_mnist(tmp_path)
    else:
        path, options = photos, {"augment": {"rand_augment": "n2-m9"}}
    assert same(trained(config(path, **options, workers=2), num=4), trained(config(path, **options), num=4))


def test_an_evaluation_counts_every_sample_once_in_order_and_is_not_augmented(photos: Path) -> None:
    (whole,) = evaluated(config(photos), 9)
    assert whole.labels.tolist() == open_data(config(photos)).test.labels.tolist()
    for batch, workers in ((1, 0), (4, 2), (50, 1)):
        parts = evaluated(config(photos, workers=workers, augment=ALL), batch)
        assert torch.cat([part.samples for part in parts]).tolist() == list(range(9))
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
        assert max(map(len, parts)) == min(batch, 9)
    with pytest.raises(ConvoyError, match="at least 1"):
        evaluation_batches(open_data(config(photos)), config(photos), batch=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pictures_are_skipped_and_reported_or_one_sentence(tmp_path: Path, workers: int) -> None:
    write_folder(tmp_path / "train", num=6)
    write_folder(tmp_path / "val", num=3)
    (tmp_path / "train" / "cat" / "002.jpg").write_bytes(b"")
    (tmp_path / "val" / "dog" / "001.jpg").write_bytes(b"broken")
    section = config(tmp_path, workers=workers, bad_images="skip", augment={"flip": True})
    made = trained(section, num=6, batch=4)
    assert [bad for batch in made for bad in batch.bad] == [(2, "is an empty file")] * 2
    assert all(len(batch) == 4 and 2 not in batch.samples for batch in made)
    parts = evaluated(section, 2)
    assert torch.cat([batch.samples for batch in parts]).tolist() == [0, 1, 2, 3, 5]
    assert [bad for batch in parts for bad in batch.bad] == [(4, "is no picture in a known format")]
    with pytest.raises(ConvoyError) as error:
        trained(config(tmp_path, workers=workers), batch=6, num=4)
    assert str(error.value) == (
        "train/cat/002.jpg is an empty file: mend or remove it, or set data.bad_images=skip (--bad-images skip); "
        "convoy data PATH --check names all of them"
    )
    data = opened(tmp_path, image_size=24)
    (tmp_path / "val" / "cat" / "000.jpg").unlink()
    with pytest.raises(ConvoyError, match=r"val/cat/000.jpg cannot be read \(No such file"):
        evaluated(config(tmp_path, workers=workers), data=data)


def test_batches_in_memory_are_made_at_once_cross_epochs_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither picture by picture nor by a worker, which would cost more than an update of a small network."""
    write_mnist(tmp_path)
    section = DataConfig(path=str(tmp_path), augment={"crop": "pad", "flip": True})
    by_worker = trained(section.model_copy(update={"workers": 1}), num=9, batch=12)
    monkeypatch.setattr(BatchMaker, "fill", lambda *_: pytest.fail("picture by picture"))
    plain = trained(section, num=9, batch=12)
    assert [batch.epoch for batch in plain] == [0] * 3 + [1] * 3 + [2] * 3 and same(by_worker, plain)
    assert same(trained(section, 4, 5, batch=12), plain[4:]) and trained(section, 3, 0) == []
    assert num_workers(open_data(section), section)[0] == 0
    with pytest.raises(pytest.fail.Exception, match="picture by picture"):
        trained(DataConfig(path=str(tmp_path), workers=0, augment={"color_jitter": 0.1}), batch=12)


def test_the_automatic_number_of_workers(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)

    def number(path: Path, **options: Any) -> int:
        section = DataConfig(path=str(path), **options)
        return num_workers(open_data(section), section)[0]

    def machine(affinity: int, allowed: float = float("inf"), ranks: str = "1", pinned: str = "") -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(affinity), raising=False)
        monkeypatch.setattr(resources, "cores_allowed", lambda: allowed)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        monkeypatch.setenv(resources.PINNED, pinned) if pinned else monkeypatch.delenv(resources.PINNED, raising=False)

    machine(12)
    assert number(tmp_path) == number(tmp_path, augment={"crop": "pad", "flip": True}) == 0
    assert number(tmp_path, augment={"color_jitter": 0.1}) == number(tmp_path, image_size=32) == 12
    assert (number(photos), number(photos, workers=5)) == (12, 5)
    for count, *limits in (
        (3, 12, float("inf"), "4"),
        (1, 12, float("inf"), "64"),
        (28, 224, float("inf"), "8"),
        (5, 224, 40.5, "8"),  # of a container, which knows all cores of its host
        (5, 28, 40.5, "8", "0,1,2,3"),
        (28, 28, float("inf"), "8", "0,1,2,3"),
        (32, 112, float("inf"), "8", "0,1,2,3"),
    ):
        machine(*limits)
        assert number(photos) == count, limits
