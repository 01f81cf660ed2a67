"""A checkpoint that is being written, by one process or by several: they meet through the files of its folder."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from convoy.files import sync
from convoy.training.checkpoints.record import STATE, write_record
from convoy.training.checkpoints.shard import write_shard

_READY = "ready"


@dataclass(frozen=True)
class Draft:
    """The temporary folder of a checkpoint; every writer adds its shard, one of them puts it in its place.

    Attributes:
        folder: no other draft ever had this name.
        step: weight updates done.
        num_shards: files of tensors that it will have.
    """

    folder: Path
    step: int
    num_shards: int

    def add(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write shard `number`, counted from 0, and say that it is there.

        Raises:
            OSError: it cannot be written.
        """
        name = f"shard-{number + 1:05d}-of-{self.num_shards:05d}.safetensors"
        (self.folder / STATE).mkdir(parents=True, exist_ok=True)
        (self.folder / _READY).mkdir(exist_ok=True)
        checksum = write_shard(self.folder / STATE / name, tensors)
        ready = self._ready(number)
        unfinished = ready.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"name": name, "sha256": checksum}), encoding="utf-8")
        unfinished.replace(ready)  # from now on another writer may move or remove the folder

    def complete(self) -> bool:
        """Whether all shards are there."""
        return all(self._ready(number).exists() for number in range(self.num_shards))

    def put(self, place: Path, identity: str, values: Mapping[str, Any]) -> None:
        """Make it a checkpoint, whole or not at all: write the record, sync, and rename.

        Args:
            place: what it is to be called.
            identity: of the run.
            values: all that is no tensor.

        Raises:
            OSError: it cannot be written.
        """
        found = [json.loads(self._ready(number).read_text(encoding="utf-8")) for number in range(self.num_shards)]
        shutil.rmtree(self.folder / _READY)
        sync(self.folder / STATE)
        write_record(self.folder, self.step, identity, values, {each["name"]: each["sha256"] for each in found})
        if place.exists():
            shutil.rmtree(place)
        self.folder.rename(place)
        sync(place.parent)

    def discard(self) -> None:
        """Remove what there is of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ready(self, number: int) -> Path:
        return self.folder / _READY / f"{number}.json"
