"""A file of tensors comes back bit for bit, through the library of its format."""

import hashlib
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from convoy.checkpoint import files
from convoy.checkpoint.files import DamagedCheckpointError, in_file, read_shard, sha256, write_shard, write_tensors


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


@pytest.mark.parametrize("piece", [5, 1 << 22])
def test_every_tensor_comes_back_bit_for_bit_by_the_library_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(files, "_PIECE", piece)
    path = tmp_path / "x.safetensors"
    checksum = write_shard(path, tensors())
    assert checksum == sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    for back in (read_shard(path), load_file(path)):
        assert back.keys() == tensors().keys()
        for name, tensor in tensors().items():
            assert torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype, name
    write_shard(tmp_path / "empty", {})
    assert load_file(tmp_path / "empty") == {}
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_are_written_one_after_the_other(tmp_path: Path) -> None:
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors().items()}
    alive: list[weakref.ref[torch.Tensor]] = []

    def one_by_one() -> Iterator[torch.Tensor]:
        for name in in_file(kinds):
            assert all(before() is None for before in alive)
            whole = tensors()[name].clone()
            alive.append(weakref.ref(whole))
            yield whole
            del whole

    write_tensors(tmp_path / "one by one", kinds, one_by_one())
    write_shard(tmp_path / "at once", tensors())
    assert (tmp_path / "one by one").read_bytes() == (tmp_path / "at once").read_bytes()


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("unpickled",))


def test_what_is_pickled_is_refused_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(DamagedCheckpointError, match="is no file of tensors"):
        read_shard(path)
    torch.save({"w": _Bomb()}, path)
    with pytest.raises(DamagedCheckpointError, match="is no file of tensors"):
        read_shard(path)
    with pytest.raises(pytest.fail.Exception, match="unpickled"):
        torch.load(path.rename(tmp_path / "x.pt"), weights_only=False)
