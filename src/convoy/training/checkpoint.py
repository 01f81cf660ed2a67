"""Checkpoints of a run: whole, checked, and free of pickled code.

A checkpoint is a folder `step-00000123` that holds the tensors as safetensors, written through
`torch.distributed.checkpoint`, and `checkpoint.json` with everything else and the SHA-256 of every file. It is written
under another name, synced and then renamed, so it is there whole or not at all.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from convoy.errors import ConvoyError
from convoy.training.files import sync, to_json, write_json

FORMAT = "convoy-checkpoint-1"
_NAME = re.compile(r"step-(\d{8,})")


class DamagedCheckpointError(ConvoyError):
    """A checkpoint that is truncated, altered or not Convoy's; the message names it."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` weight updates.

    Attributes:
        step: weight updates done.
        identity: of the run: checkpoints of others are not taken.
        tensors: everything that is a tensor, by name.
        values: everything else, as JSON can hold it.
    """

    step: int
    identity: str
    tensors: dict[str, Tensor]
    values: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run directory: the last `keep` of them and the best."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in rising order; damaged ones included."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(name[1]) for name in names if name)

    def save(self, checkpoint: Checkpoint, best_step: int | None = None) -> Path:
        """Write a checkpoint, then remove those that are neither among the last ones nor the best.

        Returns:
            Its folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self._place(checkpoint.step)
        temporary = place.with_name(f".{place.name}.tmp")
        for unfinished in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        try:
            self._write(temporary, checkpoint)
            if place.exists():
                shutil.rmtree(place)
            temporary.rename(place)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(self.folder)
        self._prune(checkpoint.step, best_step)
        return place

    def load(self, step: int) -> Checkpoint:
        """Read one checkpoint.

        Raises:
            DamagedCheckpointError: a file is missing, truncated or altered, or this is no checkpoint of Convoy.
        """
        place = self._place(step)
        record = _checked_record(place, step)
        with _quiet_checkpointing():
            reader = HuggingFaceStorageReader(str(place / "state"))
            metadata = reader.read_metadata().state_dict_metadata
            tensors = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype)
                for name, entry in metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
        return Checkpoint(step, record["identity"], tensors, record["values"])

    def load_latest(self, identity: str) -> tuple[Checkpoint | None, list[str]]:
        """Read the newest checkpoint that is whole and of the run with this identity.

        Returns:
            The checkpoint, or None where there is none at all, and a sentence for each damaged one passed over.

        Raises:
            DamagedCheckpointError: there are checkpoints, and every one of them is damaged.
        """
        refused: list[str] = []
        for step in reversed(self.steps()):
            try:
                checkpoint = self.load(step)
                if checkpoint.identity != identity:
                    raise DamagedCheckpointError(f"checkpoint {self._place(step)} is foreign: it is of another run")
                return checkpoint, refused
            except DamagedCheckpointError as error:
                refused.append(str(error))
        if refused:
            raise DamagedCheckpointError(
                f"no checkpoint in {self.folder} can be used ({'; '.join(refused)}): start anew in another folder"
            )
        return None, []

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _write(self, folder: Path, checkpoint: Checkpoint) -> None:
        state = folder / "state"
        state.mkdir(parents=True)
        contiguous = {name: tensor.detach().contiguous() for name, tensor in checkpoint.tensors.items()}
        with _quiet_checkpointing():
            state_dict_saver.save(contiguous, storage_writer=HuggingFaceStorageWriter(str(state)), no_dist=True)
        files = sorted(path for path in state.iterdir())
        for path in files:
            sync(path)
        sync(state)
        record: dict[str, Any] = {
            "format": FORMAT,
            "step": checkpoint.step,
            "identity": checkpoint.identity,
            "values": json.loads(to_json(checkpoint.values)),
            "sha256": {path.name: _sha256(path) for path in files},
        }
        record["record_sha256"] = _record_digest(record)
        write_json(folder / "checkpoint.json", record)

    def _prune(self, newest: int, best_step: int | None) -> None:
        """Keep the last ones up to `newest`; later ones are damaged leftovers of before a resumption."""
        steps = [step for step in self.steps() if step <= newest]
        for step in steps[: -self.keep]:
            if step != best_step:
                shutil.rmtree(self._place(step), ignore_errors=True)


def _checked_record(place: Path, step: int) -> dict[str, Any]:
    path = place / "checkpoint.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        known = record["format"] == FORMAT
        digest = record.pop("record_sha256")
        checksums: dict[str, str] = record["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {place} is damaged or not Convoy's: {path.name} cannot be read"
        ) from error
    if not known:
        raise DamagedCheckpointError(f"checkpoint {place} has the foreign format {record['format']!r}")
    if digest != _record_digest(record) or record["step"] != step:
        raise DamagedCheckpointError(f"checkpoint {place} is damaged: {path.name} does not match its checksum")
    for name, checksum in checksums.items():
        file = place / "state" / name
        if not file.is_file():
            raise DamagedCheckpointError(f"checkpoint {place} is damaged: state/{name} is missing")
        if _sha256(file) != checksum:
            raise DamagedCheckpointError(f"checkpoint {place} is damaged: state/{name} does not match its checksum")
    extra = {path.name for path in (place / "state").iterdir()} - set(checksums)
    if extra:
        raise DamagedCheckpointError(f"checkpoint {place} holds the foreign file state/{min(extra)}")
    return dict(record)


def _record_digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _quiet_checkpointing() -> Iterator[None]:
    """Without torch's remark that a single process saves by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
