"""The checkpoints of one run directory: which there are, reading the newest that is whole, removing old ones.

A checkpoint is a folder `step-00000123` that holds the tensors as safetensors, in as many files as ranks wrote it, and
`checkpoint.json` with everything else and the SHA-256 of every file. It is written under another name, synced and then
renamed, so it is there whole or not at all.
"""

import re
import shutil
import uuid
from pathlib import Path

from torch import Tensor

from convoy.training.checkpoints.checkpoint import Checkpoint, DamagedCheckpointError
from convoy.training.checkpoints.draft import Draft
from convoy.training.checkpoints.record import STATE, checked_record
from convoy.training.checkpoints.shard import read_shard

_NAME = re.compile(r"step-(\d{8,})")


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

    def place(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.folder / f"step-{step:08d}"

    def draft(self, step: int, num_shards: int, token: str) -> Draft:
        """A new checkpoint to be written; `token` is the same on all who write it, and never used again."""
        return Draft(self.folder / f".step-{step:08d}.{token}.tmp", step, num_shards)

    def save(self, checkpoint: Checkpoint, best_step: int | None = None) -> Path:
        """Write a checkpoint from this process alone, then remove old ones.

        Returns:
            Its folder.

        Raises:
            OSError: it cannot be written; the others are as they were.
        """
        draft = self.draft(checkpoint.step, 1, uuid.uuid4().hex)
        try:
            draft.add(0, {name: tensor.detach().cpu() for name, tensor in checkpoint.tensors.items()})
            draft.put(self.place(checkpoint.step), checkpoint.identity, checkpoint.values)
        except BaseException:
            draft.discard()
            raise
        self.prune(checkpoint.step, best_step)
        return self.place(checkpoint.step)

    def load(self, step: int) -> Checkpoint:
        """Read one checkpoint, by however many ranks it was written.

        Raises:
            DamagedCheckpointError: a file is missing, truncated or altered, or this is no checkpoint of Convoy.
        """
        place = self.place(step)
        record = checked_record(place, step)
        tensors: dict[str, Tensor] = {}
        for name in record["sha256"]:
            if name.endswith(".safetensors"):
                tensors |= read_shard(place / STATE / name)
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
                    raise DamagedCheckpointError(f"checkpoint {self.place(step)} is foreign: it is of another run")
                return checkpoint, refused
            except DamagedCheckpointError as error:
                refused.append(str(error))
        if refused:
            raise DamagedCheckpointError(
                f"no checkpoint in {self.folder} can be used ({'; '.join(refused)}): start anew in another folder"
            )
        return None, []

    def sweep(self) -> None:
        """Remove what killed processes left half-written; nobody may be writing."""
        for unfinished in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def prune(self, newest: int, best_step: int | None) -> None:
        """Keep the last ones up to `newest`; later ones are damaged leftovers of before a resumption."""
        steps = [step for step in self.steps() if step <= newest]
        for step in steps[: -self.keep]:
            if step != best_step:
                shutil.rmtree(self.place(step), ignore_errors=True)
