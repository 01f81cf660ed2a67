"""Checkpoints come back bit for bit, through the library of their format too, and are whole or refused by name."""

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from convoy.checkpoint import files
from convoy.checkpoint.files import RECORD, Checkpoint, DamagedCheckpointError, read_shard, write_record, write_shard
from convoy.checkpoint.store import CheckpointStore, sweep
from training.scenarios import put


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    of_types = {str(kind).removeprefix("torch."): torch.arange(7).to(kind) for kind in files.TYPES}
    return of_types | {
        "channels innermost": torch.randn(4, 3, 3, 3, generator=generator).to(memory_format=torch.channels_last),
        "turned": torch.randn(5, 3, generator=generator).t(),
        "one number": torch.tensor(0.1, dtype=torch.float64),
        "nothing": torch.empty(0, 3),
        "ünï\"code'\n": torch.tensor([True, False, True]),
    }


def test_every_tensor_comes_back_bit_for_bit_by_the_library_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PIECE", 5)
    path = tmp_path / "x.safetensors"
    assert write_shard(path, tensors()) == hashlib.sha256(path.read_bytes()).hexdigest()
    for back in (read_shard(path), load_file(path)):
        assert back.keys() == tensors().keys()
        for name, tensor in tensors().items():
            assert torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype, name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def checkpoint(step: int) -> Checkpoint:
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(step))
    state = {"model.weight": weight, "model.count": torch.tensor(step), "model.half": weight[0, 0].bfloat16()}
    return Checkpoint(step, "run", state, {"loss": 0.1 + 0.2, "name": "x", "list": [1, None]})


def of_three(store: CheckpointStore, step: int) -> Path:
    """A checkpoint that three ranks wrote; the last one of them had nothing to write."""
    draft, names = store.draft(step, 3, "token"), list(checkpoint(step).tensors)
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
    newest, refused = store.load_latest("run")
    assert store.steps() == [2, 4, 5] and newest is not None and (newest.step, refused) == (5, [])


def test_one_that_was_changing_its_name_gets_it_back(store: CheckpointStore) -> None:
    for step, its_place_is_free in ((1, True), (2, False)):
        draft = store.draft(step, 1, "killed-1").folder
        put(store, checkpoint(step)).rename(draft.with_name(f"{draft.name}.old"))
        put(store, checkpoint(step)).rename(draft if its_place_is_free else store.place(step))
    sweep(store.folder, "step-*")
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-00000001", "step-00000002"]


SHARD = "state/shard-00002-of-00003.safetensors"


def test_damage_and_foreign_files_are_refused_by_name_and_the_one_before_is_used(store: CheckpointStore) -> None:
    put(store, checkpoint(1))
    place = of_three(store, 2)
    assert of_three(store, 2) == place  # in the place of one
    back, want = store.load(2), checkpoint(2)
    assert back.values == want.values and all(torch.equal(back.tensors[name], x) for name, x in want.tensors.items())

    def refused(words: str) -> None:
        latest, (sentence,) = store.load_latest("run")
        assert latest is not None and latest.step == 1
        assert "step-00000002" in sentence and words in sentence

    for path in (place / RECORD, place / SHARD):
        content = path.read_bytes()
        for damaged in (content[:-1], content + b" ", b""):
            path.write_bytes(damaged)
            refused(path.name)
        for index in [*range(0, len(content), 5), len(content) - 1]:  # every byte counts
            path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
            with pytest.raises(DamagedCheckpointError, match="step-00000002"):
                store.load(2)
        path.unlink()
        refused(path.name)
        path.write_bytes(content)
    for name in ("state/shard-00004-of-00003.safetensors", "state/data.pkl", "more.json"):
        (place / name).write_bytes(b"")
        refused("holds the foreign file")
        (place / name).unlink()
    put(store, checkpoint(3)).rename(store.folder / "step-00000009")
    with pytest.raises(DamagedCheckpointError, match="step-00000009"):
        store.load(9)


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("unpickled",))


def test_right_checksums_of_a_pickle_and_of_files_elsewhere_do_not_help(store: CheckpointStore) -> None:
    place = of_three(store, 3)
    sums = json.loads((place / RECORD).read_text())["sha256"]
    (store.folder.parent / "secret.safetensors").write_bytes(b"")
    for name in ("../../secret.safetensors", "/etc/passwd", "..", ""):
        write_record(place, 3, "run", {}, {name: hashlib.sha256(b"").hexdigest()})
        with pytest.raises(DamagedCheckpointError, match="step-00000003"):
            store.load(3)
    content = pickle.dumps(_Bomb())
    (place / SHARD).write_bytes(content)
    write_record(place, 3, "run", {}, sums | {Path(SHARD).name: hashlib.sha256(content).hexdigest()})
    with pytest.raises(DamagedCheckpointError, match="is no file of tensors"):
        store.load(3)
    with pytest.raises(pytest.fail.Exception, match="unpickled"):
        pickle.loads(content)
