"""Makes small data sets in every format, for tests."""

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from convoy.data import pack
from convoy.data.batch import Batch
from convoy.data.config import DataConfig
from convoy.data.dataset import DataSet, open_data, open_files
from convoy.data.loader import evaluation_batches, training_batches
from convoy.data.order import Order
from convoy.data.packed import PackOptions, Statistics
from convoy.data.sources import EncodedSource, Source


def pixels(num: int, height: int, width: int, channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num, height, width, channels), dtype=np.uint8)


def picture(width: int = 80, height: int = 70, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth random picture, so that JPEG keeps it."""
    small = Image.fromarray(pixels(1, 4, 4, 3, seed)[0])
    return small.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


def write_idx(path: Path, array: np.ndarray) -> None:
    content = b"".join(n.to_bytes(4, "big") for n in (0x800 | array.ndim, *array.shape)) + array.astype("u1").tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, num_train: int = 40, num_test: int = 10, end: str = "") -> None:
    folder.mkdir(exist_ok=True)
    for seed, (split, num) in enumerate((("train", num_train), ("t10k", num_test))):
        write_idx(folder / f"{split}-images-idx3-ubyte{end}", pixels(num, 28, 28, 1, seed)[..., 0])
        write_idx(folder / f"{split}-labels-idx1-ubyte{end}", np.arange(num) % 10)


def dump(path: Path, content: object) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def write_cifar(folder: Path, version: int, binary: bool, num: int = 20) -> Path:
    """CIFAR-10 or -100; returns the folder with the files. Picture i of a file is the same in both kinds."""
    name = {(10, False): "cifar-10-batches-py", (10, True): "cifar-10-batches-bin"}.get((version, binary))
    inner = folder / (name or ("cifar-100-binary" if binary else "cifar-100-python"))
    inner.mkdir(parents=True)
    files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if version == 10 else ["train", "test"]
    classes = [f"class{i}" for i in range(version)]
    for seed, file in enumerate(files):
        data, labels = pixels(num, 3, 32, 32, seed).reshape(num, -1), np.arange(num) % version
        if binary:
            first = [labels[:, None]] if version == 10 else [labels[:, None] // 5, labels[:, None]]
            (inner / f"{file}.bin").write_bytes(np.hstack([*first, data]).astype(np.uint8).tobytes())
        else:
            key = b"labels" if version == 10 else b"fine_labels"
            dump(inner / file, {b"data": data, key: labels.tolist(), b"filenames": []})
    if binary:
        meta = "batches.meta.txt" if version == 10 else "fine_label_names.txt"
        (inner / meta).write_text("\n".join(classes) + "\n")
    else:
        meta, key = ("batches.meta", b"label_names") if version == 10 else ("meta", b"fine_label_names")
        dump(inner / meta, {key: [name.encode() for name in classes]})
    return inner


def write_folder(root: Path, classes: Sequence[str] = ("cat", "dog"), num: int = 4, **size: int) -> Path:
    """Class folders with JPEGs; the pictures of all classes differ."""
    for which, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(num):
            image = picture(seed=100 * which + i, **size)
            (root / name / f"{i:03d}.jpg").write_bytes(encoded(image, "JPEG", quality=95))
    return root


def write_parquet(
    path: Path,
    images: Sequence[bytes | None],
    labels: Sequence[Any],
    names: Sequence[str] | None = None,
    *,
    image: str = "image",
    rows: int = 3,
) -> Path:
    """As on the Hugging Face hub; `names` are the classes in its metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures = pa.array([{"bytes": data, "path": None} for data in images], kind)
    table = pa.table({image: pictures, "label": pa.array(labels)})
    if names is not None:
        features = {image: {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(names)}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=rows)
    return path


def write_columns(path: Path, **columns: Sequence[Any]) -> Path:
    """A parquet file with these columns; bytes are pictures."""
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), path)
    return path


def write_tar(path: Path, members: Mapping[str, bytes], mode: str = "w", **options: Any) -> Path:
    """Attributes of the members stand in `changes`, by their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    changes = options.pop("changes", {})
    with tarfile.open(path, mode, **options) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in changes.get(name, {}).items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    return path


def tar_members(num: int, num_classes: int = 2, seed: int = 0, **size: int) -> dict[str, bytes]:
    members = {}
    for i in range(num):
        members[f"{seed}-{i:04d}.jpg"] = encoded(picture(seed=seed * 1000 + i, **size), "JPEG")
        members[f"{seed}-{i:04d}.cls"] = str(i % num_classes).encode()
    return members


def opened(path: Path | str, **options: Any) -> DataSet:
    """The data set at a path, by keys of the recipe's section `data`."""
    return open_data(DataConfig(path=str(path), **options))


def names(*sources: Source) -> list[str]:
    """Of all samples."""
    return [source.name(sample) for source in sources for sample in range(len(source))]


def packed(source: Path, folder: Path, options: PackOptions | None = None) -> dict[str, Statistics]:
    """Pack a data set; what its pictures are by split."""
    kind, files = open_files(DataConfig(path=str(source)))
    return pack.pack(kind, files, folder, options or PackOptions(), None, processes=1)


class Listed(EncodedSource):
    """Picture files in a list, each a class of its own."""

    def __init__(self, files: Sequence[bytes]) -> None:
        self.files = files
        self.labels = np.arange(len(files))

    def read(self, sample: int) -> bytes:
        return self.files[sample]

    def name(self, sample: int) -> str:
        return f"file {sample}"


def trained(section: DataConfig, first: int = 0, num: int = 12, *, batch: int = 5, **options: Any) -> list[Batch]:
    """The batches that some updates get."""
    data = options.pop("data", None) or open_data(section)
    order = Order(len(data.train), batch, seed=7)
    made = training_batches(data, section, order, first_update=first, num_updates=num, seed=7, **options)
    with closing(made):
        return list(made)


def evaluated(section: DataConfig, batch: int = 4, **options: Any) -> list[Batch]:
    """The batches of an evaluation."""
    data = options.pop("data", None) or open_data(section)
    return list(evaluation_batches(data, section, batch=batch, **options))


def same(left: Iterable[Batch], right: Iterable[Batch]) -> bool:
    """Whether batches have the same pictures, labels and samples."""
    return all(
        torch.equal(one.images.to("cpu"), other.images.to("cpu"))
        and torch.equal(one.targets, other.targets)
        and torch.equal(one.samples, other.samples)
        and (one.epoch, one.bad) == (other.epoch, other.bad)
        for one, other in zip(left, right, strict=True)
    )
