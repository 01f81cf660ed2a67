"""Opens a data set: finds its format, splits it where it has no split, and settles size, channels and statistics."""

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from convoy.data.config import DataConfig
from convoy.data.decode import BadImage, in_channels
from convoy.data.folder import has_classes, open_class, open_folder, subfolders
from convoy.data.order import stratified_split
from convoy.data.packed import Pack, is_pack
from convoy.data.pixels import PixelSource, find_cifar, find_mnist, open_cifar, open_mnist, open_mnist_mini
from convoy.data.sources import EncodedSource, Opened, Progress, Source, check_labels, refusal, shown, spread
from convoy.data.table import TABLE, open_table
from convoy.data.webdataset import open_tars
from convoy.errors import ConvoyError
from convoy.files import MNIST_MINI, existing

DEFAULT_VALIDATION_FRACTION = 0.1
DEFAULT_SPLIT_SEED = 0
PHOTOGRAPH_SIZE = 224

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

# Means and standard deviations of the training pixels, scaled from 0 to 1.
MNIST: Statistics = ((0.1307,), (0.3081,))
CIFAR10: Statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100: Statistics = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_STATISTICS: dict[tuple[tuple[int, int, int] | None, int], Statistics] = {
    ((28, 28, 1), 10): MNIST,
    ((32, 32, 3), 10): CIFAR10,
    ((32, 32, 3), 100): CIFAR100,
}

_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class DataSet:
    """A data set that is ready to be loaded."""

    name: str
    classes: list[str]  # names, by label
    train: Source
    test: Source  # what an evaluation shows: the split that `split` says
    image_size: int  # height and width of the network's input
    channels: int  # 1 or 3, of the network's input
    mean: tuple[float, ...]  # of each channel, pixels from 0 to 1
    std: tuple[float, ...]  # of each channel, pixels from 0 to 1
    resize: int  # short side of a picture before its center is taken
    notes: tuple[str, ...] = ()  # sentences for the user on how it was opened
    format: str = ""  # as `data.format` calls it; "class" is a folder of one class
    # identifies its files (`difference`); empty where there are none
    fingerprint: dict[str, Any] = field(default_factory=dict)
    evaluation_size: int | None = None  # height and width in an evaluation, where that is another
    task: str = "classification"  # that its targets are of
    split: Literal["validation", "test"] = "test"
    final: Source | None = None  # the test split beside a validation split, which nothing is chosen by

    def at_end(self) -> "DataSet":
        """The same data with the test split, if there is one, to be evaluated."""
        return self if self.final is None else replace(self, test=self.final, split="test", final=None)


def open_data(
    config: DataConfig,
    progress: Progress | None = None,
    *,
    to_evaluate: bool = False,
    selects: bool = False,
    check: Callable[[int], None] = lambda most: None,
    task: str = "auto",
) -> DataSet:
    """Open the data set that a recipe's section describes. With `to_evaluate` nothing is to be trained on it: it may
    have a single class, or be the folder of one, and where it has no split of its own, and the section asks for none,
    all samples are the test split (and the training split, which is then the same object). With `selects` something is
    chosen by evaluations, for which training samples are held out where the data have no validation split. `check` may
    refuse the number of samples, at most, that there are to train on, before pictures are decoded, which takes long.
    `task` says what the labels of a CSV file are, and is that of the data."""
    kind, contents = open_files(config, progress, to_evaluate=to_evaluate, task=task)
    if task not in ("auto", contents.task):
        raise ConvoyError(
            f"task={task} needs other labels than {contents.name} has, which are of {contents.task}: name a labels.csv "
            "with --data, or leave --task away"
        )
    if not to_evaluate and len(contents.classes) < 2 and contents.task == "classification":
        only = f" ({contents.classes[0]})" if contents.classes else ""
        raise ConvoyError(
            f"{contents.name} has only {len(contents.classes)} class{only}: a net needs at least two to tell apart, so "
            "set data.path to the folder or file that holds all of them"
            + "".join(f" ({note})" for note in (*contents.notes, *_tables(config.path)))
        )
    check(len(contents.train))
    selects = config.fold is not None or (selects and [*contents.sources] == ["train", "test"])
    has_split = len(contents.sources) > 1
    if has_split and not selects and config.split_seed is not None and config.validation_fraction is None:
        raise ConvoyError(
            f"data.split_seed would be ignored: {contents.name} has a split of its own; leave it out, or hold out "
            "training samples with data.validation_fraction"
        )
    fingerprint = _fingerprint(kind, contents)
    shape = _settle(contents, config.bad_images == "skip", progress)
    notes = list(contents.notes)
    if to_evaluate and not has_split and config.validation_fraction is None and config.split_seed is None:
        contents.sources["test"] = contents.train
    split: Literal["validation", "test"] = "validation"
    train, final = contents.train, contents.sources.get("test")
    if config.validation_fraction is not None or selects or len(contents.sources) == 1:
        last = final or contents.sources.get("validation")
        train, test = _split(contents, config, last, notes)
        final = last if config.fold is None else None  # which folds do not look at
    elif "validation" in contents.sources:
        test = contents.sources["validation"]
    else:
        split, test, final = "test", contents.sources["test"], None
    if untrained := [contents.classes[label] for label in np.setdiff1d(test.labels, train.labels)]:
        more = f" and {len(untrained) - 3:,} more" if len(untrained) > 3 else ""
        notes.append(f"no training picture is of {', '.join(untrained[:3])}{more}, which the {split} split has")
    channels = config.channels or (shape[2] if shape else 3)
    all_train, train = train, _with_channels(train, channels)
    test = train if test is all_train else _with_channels(test, channels)
    final = None if final is None else _with_channels(final, channels)
    image_size, resize = _sizes(config, shape)
    if contents.short_side is not None and contents.short_side < resize:
        notes.append(
            f"pictures are enlarged to {resize} pixels, as the pack keeps short sides of at most {contents.short_side}"
            f": for more of what the original has, pack it with --short-side {resize}"
        )
    mean, std = _statistics(config, contents, shape, channels)
    _check_augmentation(config, contents.name, image_size, resize, channels, shape)
    form = image_size, channels, mean, std, resize
    about = tuple(notes), kind, fingerprint, config.evaluation_size, contents.task
    return DataSet(contents.name, contents.classes, train, test, *form, *about, split=split, final=final)


def _with_channels(source: Source, channels: int) -> Source:
    return source.with_channels(channels) if isinstance(source, PixelSource) else source


def _fingerprint(kind: str, contents: Opened) -> dict[str, Any]:
    """The fingerprint of the samples as they lie in the files: what becomes of them is a function of the recipe."""
    splits = zip(("training", "test", "final"), contents.sources.values(), strict=False)
    classes = zlib.crc32("\n".join(contents.classes).encode("utf-8", "surrogatepass"))
    return {"format": kind, "classes": classes, "test": {}} | {split: source.fingerprint() for split, source in splits}


_MARKS = {
    "samples": "the number of {} samples",
    "names": "the names or the order of the {} samples",
    "labels": "the labels of the {} samples",
    "contents": "the contents of the {} samples",
    "sizes": "the sizes of the {} files",
}


def difference(data: Mapping[str, Any], other: Mapping[str, Any], later: bool = False) -> tuple[str, str, str] | None:
    """The first difference between two fingerprints, in words, and the values on both sides where these say anything.
    With `later`, a run goes on with `data`, which may have become a pack, some of whose pictures may be mended, and on
    whose final test split it may have noted nothing."""
    same_format = data["format"] == other["format"]
    if not same_format and not later:
        return "the format", data["format"], other["format"]
    for key in _MARKS if same_format else ("samples", "labels"):
        for split in ("training", "test", *({"final"} & {*other, *(() if later else data)})):
            mark, other_mark = data.get(split, {}).get(key), other.get(split, {}).get(key)
            is_mended = later and key == "sizes" and 2 * num_changed(mark, other_mark) <= len(other_mark)
            if mark != other_mark and not is_mended:
                numbers = [f"{number or 0:,}" if key == "samples" else "" for number in (mark, other_mark)]
                return _MARKS[key].format(split), numbers[0], numbers[1]
        if key == "names" and data["classes"] != other["classes"]:
            return "the classes", "", ""
    return None


def num_changed(sizes: Sequence[int], old_sizes: Sequence[int]) -> int:
    """The number of files whose sizes differ."""
    return sum(size != old_size for size, old_size in zip(sizes, old_sizes, strict=False))


def _tables(path: str | Path) -> list[str]:
    """A sentence on the first CSV file in a folder, which is read where it is named."""
    return [f"to read {shown(file)}, set data.path to it" for file in sorted(Path(path).glob("*.csv"))[:1]]


def _open_parquet(path: Path, config: DataConfig, progress: Progress | None) -> Opened:
    from convoy.data.parquet import open_parquet  # pyarrow takes a while to import

    return open_parquet(path, config)


def _has(suffix: str) -> Callable[[Path], bool]:
    return lambda path: any(path.glob(f"*{suffix}")) or any(path.glob(f"*/*{suffix}"))


class _Format(NamedTuple):
    is_in_folder: Callable[[Path], object]
    open: Callable[[Path, DataConfig, Progress | None], Opened]
    file_suffix: str = ""  # of a file that may stand for the folder; `open` gets either
    is_split_by_name: bool = False


# In the order in which they are looked for.
FORMATS = {
    "pack": _Format(is_pack, lambda path, *_: Pack.open(path).contents()),
    "mnist": _Format(find_mnist, lambda path, *_: open_mnist(path)),
    "cifar": _Format(find_cifar, lambda path, *_: open_cifar(path)),
    "csv": _Format(lambda path: (path / TABLE).is_file(), open_table, ".csv"),
    "parquet": _Format(_has(".parquet"), _open_parquet, ".parquet", is_split_by_name=True),
    "webdataset": _Format(_has(".tar"), open_tars, ".tar", is_split_by_name=True),
    "folder": _Format(subfolders, lambda path, config, _: open_folder(path, config), is_split_by_name=True),
}


def open_files(
    config: DataConfig, progress: Progress | None = None, *, to_evaluate: bool = False, task: str = "auto"
) -> tuple[str, Opened]:
    """The format and the pictures of a data set as they lie in its files, before anything is split or read."""
    if MNIST_MINI in (config.path, config.format):
        return MNIST_MINI, open_mnist_mini()
    path = existing(config.path)
    if not path.is_dir() and not path.is_file():
        raise ConvoyError(f"data set {shown(path)} is neither a file nor a folder: set data.path to one")
    if to_evaluate and path.is_dir() and config.format == "auto" and (folder := open_class(path)) is not None:
        return "class", folder
    kind = config.format if config.format != "auto" else _detect(path)
    if path.is_file() and not FORMATS[kind].file_suffix:
        raise ConvoyError(
            f"{shown(path)} is a file, but data.format={kind} needs a folder: set data.path to its folder"
        )
    for option in ("train", "test", "image_column", "label_column"):
        is_column = option.endswith("column")
        has_effect = kind == "parquet" if is_column else FORMATS[kind].is_split_by_name and path.is_dir()
        if getattr(config, option) is not None and not has_effect:
            raise ConvoyError(f"data.{option} would be ignored: {shown(path)} is read as {kind}; leave it out")
    if kind == "csv":
        return kind, open_table(path, config, progress, task, 1 if to_evaluate else 2)
    contents = FORMATS[kind].open(path, config, progress)
    if config.classes is not None and list(config.classes) != contents.classes:
        raise ConvoyError(f"data.classes are others than those of {shown(path)}: it names its own, leave them out")
    if contents.task == "classification":
        check_labels(path, contents)
    return kind, contents


def _detect(path: Path) -> str:
    is_file, suffix = path.is_file(), path.suffix.lower()
    for kind, form in FORMATS.items():
        if form.file_suffix == suffix != "" if is_file else form.is_in_folder(path):
            if not is_file and kind in ("parquet", "webdataset") and has_classes(path):
                raise ConvoyError(
                    f"{shown(path)} holds {form.file_suffix} files and folders of pictures: say which to read by --set "
                    f"data.format={kind} or --set data.format=folder"
                )
            return kind
    if is_file:
        is_archive = suffix in (".gz", ".tgz", ".zip", ".xz")
        advice = (
            "unpack it and set data.path to the folder"
            if is_archive
            else "a data set is a folder, a .csv, a .parquet or a .tar"
        )
        raise ConvoyError(f"{shown(path)} is no data set: {advice}")
    if not any(path.iterdir()):
        raise ConvoyError(f"data set {shown(path)} is an empty folder: set data.path to where the data is")
    raise ConvoyError(
        f"{shown(path)} is no data set in a known format: it needs MNIST or CIFAR files, .parquet or .tar files, or a "
        "folder of pictures for each class, or labels.csv" + "".join(f"; {sentence}" for sentence in _tables(path))
    )


def _settle(contents: Opened, skip_bad: bool, progress: Progress | None) -> tuple[int, int, int] | None:
    """Decode small pictures of one size into memory, or choose the source to load from; returns the form of the
    former."""
    if isinstance(contents.train, PixelSource):
        height, width, channels = contents.train.pixels.shape[1:]
        return height, width, channels
    encoded = {split: source for split, source in contents.sources.items() if isinstance(source, EncodedSource)}
    shape, decoded = (None, []) if contents.task == "segmentation" else _in_memory(encoded, skip_bad, progress)
    settled: Sequence[Source] = decoded or [source.settled(progress) for source in encoded.values()]
    contents.sources.update(zip(encoded, settled, strict=True))
    return shape


_MAX_SIDE = 64
_MAX_BYTES = 2**30
_NUM_PROBES = 16
_PROGRESS_EVERY = 2000


def _in_memory(
    sources: dict[str, EncodedSource], skip_bad: bool, progress: Progress | None, least_channels: int = 1
) -> tuple[tuple[int, int, int] | None, list[PixelSource]]:
    """Height, width and channels of the pictures of all splits if they are small, of one size and few enough to keep in
    memory; and the decoded splits, none where pictures that cannot be read are to be skipped."""
    form = _common_form(sources.values(), least_channels)
    decoded, is_whole = [], True
    for split, source in sources.items() if form is not None else ():
        assert form is not None
        pixels = np.zeros((len(source), *form), np.uint8)
        for sample in range(len(source)):
            try:
                image = source.load(sample)
            except BadImage as reason:
                if not skip_bad:
                    raise refusal(reason, source) from None
                is_whole = False  # the others still tell whether all have one size, wherever the bad one lies
                continue
            if image.size != (form[1], form[0]):
                return None, []
            if image.mode == "RGB" and form[2] == 1:  # those looked at first are grey
                return _in_memory(sources, skip_bad, progress, least_channels=3)
            pixels[sample] = np.asarray(in_channels(image, form[2])).reshape(form)
            if progress and (sample % _PROGRESS_EVERY == 0 or sample == len(source) - 1):
                progress(f"decoding the {'training' if split == 'train' else split} pictures", sample + 1, len(source))
        decoded.append(PixelSource(pixels, source.labels, source.name).taking_targets(source))
    return form, decoded if is_whole else []


def _common_form(sources: Collection[EncodedSource], least_channels: int) -> tuple[int, int, int] | None:
    """Height, width and channels by a few pictures of each source; None where they differ or are too large."""
    sizes, modes = set(), set()
    for source in sources:
        for sample in spread(len(source), _NUM_PROBES):
            with suppress(BadImage):
                width, height = source.open(sample).size
                if max(width, height) > _MAX_SIDE:
                    return None
                modes.add(source.load(sample).mode)
                sizes.add((height, width))
    if len(sizes) != 1:
        return None
    form = *sizes.pop(), least_channels if modes == {"L"} else 3
    return form if sum(map(len, sources)) * math.prod(form) <= _MAX_BYTES else None


def _split(contents: Opened, config: DataConfig, last: Source | None, notes: list[str]) -> tuple[Source, Source]:
    fraction = config.validation_fraction or DEFAULT_VALIDATION_FRACTION
    seed = config.split_seed if config.split_seed is not None else DEFAULT_SPLIT_SEED
    source = contents.train
    if len(source) < (config.fold or (1, 2))[1]:
        raise ConvoyError(f"{contents.name} has too few pictures to hold some out for validation: it has {len(source)}")
    train, test = stratified_split(source.labels, fraction, seed, config.fold)
    settings = f"(validation_fraction {fraction:g}, split_seed {seed})"
    if config.fold is not None:
        notes.append(f"fold {config.fold[0]} of {config.fold[1]} (split_seed {seed}): {len(test)} samples are held out")
    elif last is None:
        held_out = f"{len(test)} of its {len(source)} samples are held out for validation"
        notes.append(f"{contents.name} has no split of its own: {held_out} {settings}")
    else:
        notes.append(
            f"{len(test)} of the {len(source)} training samples are held out for validation {settings}; the "
            f"{len(last)} of the test are looked at once, at the end"
        )
    return source.subset(train), source.subset(test)


def _sizes(config: DataConfig, shape: tuple[int, int, int] | None) -> tuple[int, int]:
    """Side of the network's input, and short side before the center is taken."""
    image_size = config.image_size or (PHOTOGRAPH_SIZE if shape is None else min(shape[:2]))
    size, key = (config.evaluation_size, "evaluation_size") if config.evaluation_size else (image_size, "image_size")
    resize = config.resize or (round(size * 8 / 7) if shape is None else size)
    if resize < size:
        raise ConvoyError(
            f"data.resize={resize} is smaller than the image size {size}, so there is no center to take: set "
            f"data.resize to at least {size}, or data.{key} to at most {resize}"
        )
    if config.progressive is not None and config.progressive.from_size > image_size:
        raise ConvoyError(
            f"data.progressive.from_size={config.progressive.from_size} is larger than data.image_size={image_size}, "
            "to which training pictures grow: lower it"
        )
    return image_size, resize


def _statistics(config: DataConfig, contents: Opened, shape: tuple[int, int, int] | None, channels: int) -> Statistics:
    """Mean and standard deviation of each channel: the section's, those of a known data set, else ImageNet's."""
    if config.mean is not None and config.std is not None:
        if len(config.mean) != channels:
            raise ConvoyError(
                f"data.mean and data.std have {len(config.mean)} numbers, but the pictures of {contents.name} have "
                f"{channels} channels: give {channels}, or set data.channels={len(config.mean)}"
            )
        return config.mean, config.std
    table = _STATISTICS.get((shape, len(contents.classes)), IMAGENET)
    if len(table[0]) == channels:
        return table
    if channels == 3:
        return table[0] * 3, table[1] * 3
    mean, std = (round(sum(w * x for w, x in zip(_LUMA, part, strict=True)), 4) for part in table)
    return (mean,), (std,)


def _check_augmentation(
    config: DataConfig, name: str, image_size: int, resize: int, channels: int, shape: tuple[int, int, int] | None
) -> None:
    augment = config.augment
    for option in ("pca_noise", "rand_augment"):
        if getattr(augment, option) and channels == 1:
            raise ConvoyError(
                f"data.augment.{option} needs colors, but the pictures of {name} are grey: leave it out or set "
                "data.channels=3"
            )
    unchanged = shape is not None and shape[:2] == (image_size, image_size) == (resize, resize)
    if augment.interpolation is not None and augment.crop != "random-resized" and unchanged:
        raise ConvoyError(
            f"data.augment.interpolation would be ignored: the pictures of {name} have {image_size}x{image_size} "
            "pixels already; leave it out"
        )
