"""Checkpoints are whole or refused by name."""

import hashlib
import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from convoy.checkpoint.files import RECORD, Checkpoint, DamagedCheckpointError, as_text, write_record
from convoy.checkpoint.store import CheckpointStore
from training.scenarios import put


def checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model.weight": torch.randn(4, 3, 3, 3, generator=generator).to(memory_format=torch.channels_last),
        "model.count": torch.tensor(step),
        "model.half": torch.randn(5, generator=generator).bfloat16(),
    }
    return Checkpoint(step, "run", tensors, {"loss": 0.1 + 0.2, "name": "x", "list": [1, None]})


def of_three(store: CheckpointStore, step: int) -> Path:
    """A checkpoint that three ranks wrote; the last one of them had nothing to write."""
    draft = store.draft(step, 3, "token")
    names = list(checkpoint(step).tensors)
    for number, mine in enumerate([names[:2], names[2:], []]):
        draft.add(number, {name: checkpoint(step).tensors[name] for name in mine})
    draft.put(store.place(step), "run", checkpoint(step).values)
    return store.place(step)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_the_last_ones_and_the_best_are_kept(store: CheckpointStore) -> None:
    assert store.load_latest("run") == (None, [])
    for step in range(1, 6):
        put(store, checkpoint(step))
        store.prune(step, best_step=2)
    assert store.steps() == [2, 4, 5]
    newest, refused = store.load_latest("run")
    assert newest is not None and (newest.step, refused) == (5, [])


def test_what_several_wrote_is_what_one_would_have_written(store: CheckpointStore) -> None:
    for place in (put(store, checkpoint(6)), of_three(store, 7), of_three(store, 7)):  # also in the place of one
        assert {path.suffix for path in place.rglob("*") if path.is_file()} == {".json", ".safetensors"}  # no pickle
    assert len(list((place / "state").iterdir())) == 3
    for back, want in ((store.load(6), checkpoint(6)), (store.load(7), checkpoint(7))):
        assert back.values == want.values and back.tensors.keys() == want.tensors.keys()
        assert all(torch.equal(back.tensors[name], tensor) for name, tensor in want.tensors.items())
        assert all(back.tensors[name].dtype == tensor.dtype for name, tensor in want.tensors.items())


SHARD = "state/shard-00002-of-00003.safetensors"


def test_damage_and_foreign_files_are_refused_by_name_and_the_one_before_is_used(store: CheckpointStore) -> None:
    of_three(store, 1)
    place = of_three(store, 2)

    def refused(words: str) -> None:
        latest, (sentence,) = store.load_latest("run")
        assert latest is not None and latest.step == 1
        assert "step-00000002" in sentence and words in sentence

    for path in (place / RECORD, place / SHARD):
        content = path.read_bytes()
        for damaged in (content[:-1], content + b" ", b""):
            path.write_bytes(damaged)
            refused(path.name)
        path.unlink()
        refused(path.name)
        path.mkdir()
        refused(path.name)
        path.rmdir()
        for index in [*range(0, len(content), 5), len(content) - 1]:  # every byte counts
            path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
            with pytest.raises(DamagedCheckpointError, match="step-00000002"):
                store.load(2)
        path.write_bytes(content)
    for name in ("state/shard-00004-of-00003.safetensors", "state/data.pkl", "more.json", "state/a/b"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(b"")
        refused("holds the foreign file")
        (place / name).unlink()
    (place / "state/a").rmdir()
    assert store.load(2).step == 2
    put(store, checkpoint(3)).rename(store.folder / "step-00000009")
    with pytest.raises(DamagedCheckpointError, match="step-00000009"):
        store.load(9)
    (store.folder / "step-00000009" / RECORD).write_text(
        json.dumps({"format": "other", "record_sha256": "", "sha256": {}})
    )
    with pytest.raises(DamagedCheckpointError, match="foreign format 'other'"):
        store.load(9)


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("unpickled",))


def test_right_checksums_of_a_pickle_of_files_elsewhere_and_of_other_values_do_not_help(store: CheckpointStore) -> None:
    place = of_three(store, 3)
    whole = json.loads((place / RECORD).read_text())
    (store.folder.parent / "secret.safetensors").write_bytes(b"")
    for name in ("../../secret.safetensors", "/etc/passwd", "..", ""):
        write_record(place, 3, "run", {}, {name: hashlib.sha256(b"").hexdigest()})
        with pytest.raises(DamagedCheckpointError, match="step-00000003"):
            store.load(3)
    for key, value in (("step", "3"), ("identity", None), ("values", []), ("sha256", [])):
        record = {name: each for name, each in whole.items() if name != "record_sha256"} | {key: value}
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()  # it fits
        (place / RECORD).write_text(as_text(record | {"record_sha256": digest}))
        with pytest.raises(DamagedCheckpointError, match="lacks what belongs into it"):
            store.load(3)
    content = pickle.dumps(_Bomb())
    (place / SHARD).write_bytes(content)
    checksums = whole["sha256"] | {Path(SHARD).name: hashlib.sha256(content).hexdigest()}
    write_record(place, 3, "run", whole["values"], checksums)
    with pytest.raises(DamagedCheckpointError, match="is no file of tensors"):
        store.load(3)


def test_a_checkpoint_of_before_shards_is_read(store: CheckpointStore) -> None:
    place = store.place(5)
    (place / "state").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(place / "state"))
        contiguous = {name: tensor.contiguous() for name, tensor in checkpoint(5).tensors.items()}
        state_dict_saver.save(contiguous, storage_writer=writer, no_dist=True)
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (place / "state").iterdir()}
    write_record(place, 5, "run", checkpoint(5).values, sums)
    back = store.load(5)
    assert back.tensors.keys() == checkpoint(5).tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in checkpoint(5).tensors.items())


def test_a_write_that_fails_or_is_killed_leaves_the_one_before(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_three(store, 1)
    unfinished = store.draft(2, 2, "killed")
    unfinished.add(0, checkpoint(2).tensors)
    assert not unfinished.complete()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("convoy.checkpoint.store.write_record", full)
    with pytest.raises(OSError, match="No space"):
        put(store, checkpoint(3))
    assert store.steps() == [1] and store.load(1).step == 1
    store.sweep()
    assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]
