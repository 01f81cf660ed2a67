import numpy as np
import pytest
import torch

from convoy.data import AugmentConfig
from convoy.data.batch import BatchMaker
from convoy.data.sources import EncodedSource, PixelSource
from convoy.data.transforms import Geometry
from convoy.errors import ConvoyError
from data.made import encoded, picture, pixels

SAMPLES = np.array([7, 3, 11, 3, 0])


def source(num: int = 12, side: int = 20, channels: int = 3, bad: dict[int, str] | None = None) -> PixelSource:
    return PixelSource(pixels(num, side, side, channels), np.arange(num) % 5, "made", bad)


class Listed(EncodedSource):
    """Picture files in a list; None is an unreadable one."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files
        self.labels = np.arange(len(files))

    def read(self, sample: int) -> bytes:
        return self.files[sample]

    def name(self, sample: int) -> str:
        return f"file {sample}"


def maker(
    data, side: int = 20, resize: int | None = None, channels: int = 3, skip: bool = False, **augment
) -> BatchMaker:
    geometry = Geometry(side, resize or side, AugmentConfig(**augment))
    return BatchMaker(data, geometry, channels, seed=1, skip_bad=skip)


def test_a_plain_batch_is_the_pixels():
    data = source()
    batch = maker(data).training(SAMPLES, epoch=2)
    np.testing.assert_array_equal(batch.images, data.pixels[SAMPLES].transpose(0, 3, 1, 2))
    assert batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous()
    assert batch.labels.tolist() == [2, 3, 1, 3, 0]
    assert batch.labels.dtype == torch.int64
    assert batch.samples.tolist() == SAMPLES.tolist()
    assert (batch.epoch, batch.bad, len(batch)) == (2, [], 5)
    evaluated = maker(data).evaluation(SAMPLES)
    assert torch.equal(evaluated.images, batch.images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augment",
    [
        {"crop": "none", "flip": True},
        {"crop": "pad", "flip": True},
        {"crop": "pad", "pad": 2},
        {"crop": "pad", "pad": 0},
    ],
)
def test_all_at_once_and_one_by_one_make_the_same_batch(channels, augment):
    resize = 24 if augment["crop"] == "pad" else 20
    data = source(side=resize, channels=channels)
    fast = maker(data, resize=resize, channels=channels, **augment)
    slow = maker(data, resize=resize, channels=channels, **augment)
    slow.vectorised = False
    assert fast.vectorised
    for epoch in range(3):
        assert torch.equal(fast.training(SAMPLES, epoch).images, slow.training(SAMPLES, epoch).images)
    files = Listed([encoded(data.open(i)) for i in range(len(data))])
    from_files = maker(files, resize=resize, channels=channels, **augment)
    assert not from_files.vectorised
    assert torch.equal(from_files.training(SAMPLES, 1).images, fast.training(SAMPLES, 1).images)


def test_a_samples_picture_depends_on_seed_epoch_and_sample_only():
    data = source()
    made = maker(data, crop="pad", flip=True)
    alone = made.training(np.array([3]), 4).images[0]
    together = made.training(SAMPLES, 4).images
    assert torch.equal(together[1], alone)
    assert torch.equal(together[3], alone)
    assert not torch.equal(made.training(np.array([3]), 5).images[0], alone)


def test_half_of_the_pictures_are_flipped():
    data = source(num=400, side=4)
    flipped = maker(data, side=4, flip=True).training(np.arange(400), 0).images
    plain = torch.from_numpy(data.pixels.transpose(0, 3, 1, 2).copy())
    turned = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, plain, strict=True)]
    assert all(t or torch.equal(a, b) for t, a, b in zip(turned, flipped, plain, strict=True))
    assert 160 < sum(turned) < 240


def test_a_bad_picture_gives_its_place_to_the_next_good_one():
    files = [encoded(picture(20, 20, seed=i)) for i in range(6)]
    files[2], files[3], files[5] = b"", files[3][:50], b"no picture"
    for data in (Listed(files), source(6, bad={2: "is black", 3: "is black", 5: "is black"})):
        batch = maker(data, skip=True, flip=True).training(np.array([1, 2, 5, 4]), 0)
        assert batch.samples.tolist() == [1, 4, 0, 4]
        assert batch.labels.tolist() == data.labels[[1, 4, 0, 4]].tolist()
        assert sorted(sample for sample, _ in batch.bad) == [2, 3, 5]
        assert torch.equal(batch.images[1], batch.images[3])
        assert torch.equal(batch.images[2], maker(data, skip=True, flip=True).training(np.array([0]), 0).images[0])
        evaluated = maker(data, skip=True).evaluation(np.arange(6))
        assert evaluated.samples.tolist() == [0, 1, 4]
        assert len(evaluated.images) == 3
        assert [sample for sample, _ in evaluated.bad] == [2, 3, 5]


def test_a_bad_picture_is_refused_by_name():
    data = Listed([encoded(picture()), b""])
    for work in (lambda m: m.training(np.array([0, 1]), 0), lambda m: m.evaluation(np.array([0, 1]))):
        with pytest.raises(ConvoyError, match=r"file 1 is an empty file: .*--bad-images skip"):
            work(maker(data))


def test_nothing_but_bad_pictures_ends():
    data = Listed([b""] * 4)
    with pytest.raises(ConvoyError, match="none of the 4 training pictures"):
        maker(data, skip=True).training(np.array([0, 1]), 0)
    empty = maker(data, skip=True).evaluation(np.arange(4))
    assert (len(empty), tuple(empty.images.shape), len(empty.bad)) == (0, (0, 3, 20, 20), 4)


def test_grey_and_color_are_converted():
    grey = Listed([encoded(picture(mode="L"))])
    images = maker(grey, channels=3).evaluation(np.array([0])).images
    assert torch.equal(images[:, 0], images[:, 2])
    color = Listed([encoded(picture())])
    assert maker(color, channels=1, crop="random-resized", color_jitter=0.2).training(
        np.array([0]), 0
    ).images.shape == (
        1,
        1,
        20,
        20,
    )


def test_every_augmentation_together():
    data = Listed([encoded(picture(seed=i), "JPEG") for i in range(4)])
    made = maker(
        data,
        crop="random-resized",
        flip=True,
        color_jitter=0.4,
        pca_noise=0.1,
        rand_augment="n2-m9",
        interpolation="bicubic",
    )
    first, again = made.training(np.arange(4), 0), made.training(np.arange(4), 0)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, made.training(np.arange(4), 1).images)


def test_pixels_of_another_size_are_resized():
    data = source(side=10)
    assert not maker(data, side=20).vectorised
    assert maker(data, side=20).training(SAMPLES, 0).images.shape == (5, 3, 20, 20)
    assert maker(data, side=20, resize=24).evaluation(SAMPLES).images.shape == (5, 3, 20, 20)


def test_channels_of_pixels_follow_pillow():
    data = source(3)
    grey = data.with_channels(1)
    for i in range(3):
        np.testing.assert_array_equal(grey.pixels[i, :, :, 0], data.open(i).convert("L"))
    assert (grey.with_channels(3).pixels[..., 1] == grey.pixels[..., 0]).all()
    assert data.with_channels(3) is data
