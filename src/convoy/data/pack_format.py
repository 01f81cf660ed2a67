"""What a pack is on disk, for those that write and read it.

A pack is a folder of `train-000000.tar`, …, and `test-000000.tar`, … (`data-000000.tar`, … where the data set has no
split of its own), which any reader of WebDataset takes, `classes.txt`, and `index.safetensors`: where every picture
lies, its label, checksum and name. Samples have the numbers that they have in the original, so a run sees them in the
same order.

The index is written last. Until then the folder `.packing` says what is being packed, and keeps what is known of the
shards that are complete, so that a pack that was interrupted goes on where it stopped; nobody reads it before.
"""

import json
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from convoy.data.sources import Source

INDEX, UNFINISHED = "index.safetensors", ".packing"
VERSION = 1
# Names in shards and index. `data` is of an original without a split, so that readers see no split in the name.
SPLITS = (["train", "test"], ["data"])
PER_SHARD = 2048


@dataclass(frozen=True)
class PackOptions:
    """How pictures are stored."""

    short_side: int | None = None  # larger pictures are resized to it, in pixels; None leaves all as they are
    raw: bool = False  # pixels (PPM) instead of picture files
    quality: int = 90  # of JPEG, 1 to 95, for pictures that were resized

    def __str__(self) -> str:
        side = f"short side at most {self.short_side}" if self.short_side else "size as in the original"
        if self.raw:
            return f"raw pixels, {side}"
        return f"{side}, JPEG of quality {self.quality} where resized" if self.short_side else f"files and {side}"


@dataclass(frozen=True)
class Statistics:
    """Sums over the pictures of a split, or of a part of one."""

    images: int = 0
    original_bytes: int = 0  # of the original's files; 0 where it keeps pixels
    stored_bytes: int = 0  # of the pictures in the pack
    smallest: int = 2**31  # short side of the smallest picture of the original
    largest: int = 0  # long side of the largest picture of the original
    pixels: int = 0  # of all stored pictures
    # of the stored pixels, 0 to 255: red, green, blue, which are equal for grey
    sums: tuple[int, int, int] = (0, 0, 0)
    squares: tuple[int, int, int] = (0, 0, 0)  # of the same, squared

    def __add__(self, other: "Statistics") -> "Statistics":
        def added(sums: tuple[int, int, int], other_sums: tuple[int, int, int]) -> tuple[int, int, int]:
            return sums[0] + other_sums[0], sums[1] + other_sums[1], sums[2] + other_sums[2]

        return Statistics(
            self.images + other.images,
            self.original_bytes + other.original_bytes,
            self.stored_bytes + other.stored_bytes,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
            self.pixels + other.pixels,
            added(self.sums, other.sums),
            added(self.squares, other.squares),
        )

    @property
    def channels(self) -> int:
        """1 where all pictures are grey, else 3."""
        return 1 if len(set(self.sums)) == len(set(self.squares)) == 1 else 3

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel, pixels from 0 to 1."""
        return tuple(round(total / max(self.pixels, 1) / 255, 4) for total in self.sums[: self.channels])

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel, pixels from 0 to 1."""
        means = [total / max(self.pixels, 1) for total in self.sums[: self.channels]]
        pairs = zip(self.squares, means, strict=False)
        return tuple(round(max(total / max(self.pixels, 1) - mean**2, 0) ** 0.5 / 255, 4) for total, mean in pairs)


class Known(NamedTuple):
    """The notes on a complete shard: offset, size and CRC-32 of its pictures [n], and their statistics."""

    number: int
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    statistics: Statistics


def shard_name(split: str, number: int) -> str:
    """The file name of a shard."""
    return f"{split}-{number:06d}.tar"


def index_arrays(split: str, source: Source, notes: list[Known]) -> dict[str, NDArray[Any]]:
    """The arrays of a split: where its pictures lie, their labels, checksums and names."""
    names = [source.name(sample).encode("utf-8", "surrogatepass") for sample in range(len(source))]
    shards = np.repeat([shard.number for shard in notes], [len(shard.offsets) for shard in notes])
    return {
        f"{split}.shard": shards.astype(np.int32),
        f"{split}.offset": np.concatenate([shard.offsets for shard in notes]),
        f"{split}.size": np.concatenate([shard.sizes for shard in notes]).astype(np.int32),
        f"{split}.crc32": np.concatenate([shard.crc32 for shard in notes]),
        f"{split}.label": source.labels.astype(np.int32),
        f"{split}.name_end": np.cumsum([len(name) for name in names], dtype=np.int64),
        f"{split}.names": np.frombuffer(b"".join(names), np.uint8),
    }


def index_file(arrays: dict[str, NDArray[Any]], document: dict[str, Any]) -> bytes:
    """The content of an index: its arrays with their checksums, and a document on the whole."""
    checksums = {name: zlib.crc32(array.data) for name, array in arrays.items()}
    return bytes(save(arrays, {"convoy.pack": json.dumps(document | {"index": checksums})}))
