"""Checkpoints are whole or refused by name."""

import json
from pathlib import Path

import pytest
import torch

from convoy.training.checkpoints.checkpoint import Checkpoint, DamagedCheckpointError
from convoy.training.checkpoints.store import CheckpointStore


def checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model.weight": torch.randn(4, 3, 3, 3, generator=generator).to(memory_format=torch.channels_last),
        "model.count": torch.tensor(step),
        "model.half": torch.randn(5, generator=generator).bfloat16(),
    }
    return Checkpoint(step, "run", tensors, {"loss": 0.1 + 0.2, "name": "x", "list": [1, None]})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_what_is_saved_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    store.save(checkpoint(7))
    back = store.load(7)
    assert back.values == checkpoint(7).values
    assert back.tensors.keys() == checkpoint(7).tensors.keys()
    for name, tensor in checkpoint(7).tensors.items():
        assert torch.equal(back.tensors[name], tensor)
        assert back.tensors[name].dtype == tensor.dtype


def test_the_last_ones_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step in range(1, 6):
        store.save(checkpoint(step), best_step=2)
    assert store.steps() == [2, 4, 5]


def test_nothing_is_pickled(store: CheckpointStore) -> None:
    place = store.save(checkpoint(1))
    assert {path.suffix for path in place.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def files(store: CheckpointStore) -> list[Path]:
    return [path for path in (store.folder / "step-00000002").rglob("*") if path.is_file()]


@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("damage", ["truncated", "one bit", "missing", "empty"])
def test_damage_is_refused_by_name_and_the_one_before_is_used(store: CheckpointStore, index: int, damage: str) -> None:
    store.save(checkpoint(1))
    store.save(checkpoint(2))
    path = sorted(files(store))[index]
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"truncated": content[:middle], "one bit": flipped, "empty": b""}[damage])
    found, refused = store.load_latest("run")
    assert found is not None
    assert found.step == 1
    assert len(refused) == 1
    assert "step-00000002" in refused[0]
    assert path.name in refused[0]


def test_without_damage_the_newest_is_used(store: CheckpointStore) -> None:
    store.save(checkpoint(1))
    store.save(checkpoint(2))
    found, refused = store.load_latest("run")
    assert found is not None
    assert (found.step, refused) == (2, [])


def test_foreign_folder_is_refused(store: CheckpointStore) -> None:
    place = store.save(checkpoint(3))
    (place / "checkpoint.json").write_text(json.dumps({"format": "other", "record_sha256": "", "sha256": {}}))
    with pytest.raises(DamagedCheckpointError, match="foreign format 'other'"):
        store.load_latest("run")


def test_a_file_that_was_put_in_is_refused(store: CheckpointStore) -> None:
    place = store.save(checkpoint(3))
    (place / "state" / "model-00002.safetensors").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="foreign file state/model-00002"):
        store.load(3)


def test_a_renamed_checkpoint_is_refused(store: CheckpointStore) -> None:
    store.save(checkpoint(3)).rename(store.folder / "step-00000009")
    with pytest.raises(DamagedCheckpointError, match="step-00000009"):
        store.load(9)


def test_a_write_that_fails_leaves_the_one_before(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(checkpoint(1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("convoy.training.checkpoints.record.write_json", full)
    with pytest.raises(OSError, match="No space"):
        store.save(checkpoint(2))
    assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]
    assert store.load(1).step == 1


def test_no_checkpoint_at_all(store: CheckpointStore) -> None:
    assert store.load_latest("run") == (None, [])
