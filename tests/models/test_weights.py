"""Weights from files: what loads, what is said about it, and that whatever is refused changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from convoy.errors import ConvoyError
from convoy.models import create, load_weights

State = dict[str, Tensor]


def state_of(model: nn.Module) -> State:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def prefixed(state: State, prefix: str) -> State:
    return {f"{prefix}{key}": value for key, value in state.items()}


def lacking(part: str) -> Callable[[State], State]:
    return lambda state: {key: value for key, value in state.items() if part not in key}


def saved(change: Callable[[State], object], **options: Any) -> Callable[[State, Path], None]:
    return lambda state, path: torch.save(change(state), path, **options)


WRITERS: dict[str, Callable[[State, Path], None]] = {
    "plain.safetensors": save_file,
    "plain.pth": saved(dict),
    "legacy.pth": saved(dict, _use_new_zipfile_serialization=False),
    "entry_state_dict.pth": saved(lambda state: {"epoch": 3, "state_dict": state}),
    "compiled.pth": saved(lambda state: {"model": prefixed(state, "module._orig_mod.")}),
    "lightning.pth": saved(lambda state: {"state_dict": prefixed(state, "model.")}),
    "without_counters.pth": saved(lacking("num_batches")),
}


def test_files_that_fit_are_loaded_whatever_wrote_them(tmp_path: Path) -> None:
    state = state_of(create("cifar-quick"))
    for name, write in WRITERS.items():
        model = create("cifar-quick")
        assert not same(state, state_of(model))
        write(state, tmp_path / name)
        assert load_weights(model, tmp_path / name) == []
        assert same(state, state_of(model)), name


def test_another_number_of_classes_keeps_the_fresh_heads(tmp_path: Path) -> None:
    for name, heads, words in (
        ("lenet", ["classifier.4"], "classifier.4"),
        ("googlenet-cifar", ["aux1.fc2", "aux2.fc2", "fc"], "aux1.fc2, aux2.fc2 and fc"),
    ):
        state, model = state_of(create(name, num_classes=12)), create(name, num_classes=7)
        fresh = state_of(model)
        save_file(state, tmp_path / "twelve.safetensors")
        (note,) = load_weights(model, tmp_path / "twelve.safetensors")
        assert note == f"twelve.safetensors has 12 classes and this net 7: fresh weights stay in {words}"
        for key, value in model.state_dict().items():
            kept = key.rpartition(".")[0] in heads
            assert torch.equal(value, fresh[key] if kept else state[key]), key


def test_a_run_directory_stands_for_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConvoyError, match=f"has no weights.safetensors yet: finish it with convoy train {tmp_path}"):
        load_weights(create("lenet"), tmp_path)
    trained = create("lenet", num_classes=3)
    save_file(state_of(trained), tmp_path / "weights.safetensors")
    (note,) = load_weights(fresh := create("lenet"), tmp_path)
    assert note.startswith("weights.safetensors has 3 classes and this net 10: fresh weights stay in ")
    assert torch.equal(fresh.state_dict()["features.0.weight"], trained.state_dict()["features.0.weight"])


class Malicious:
    """A pickle that would run a command when it is read."""

    def __reduce__(self) -> tuple:
        return print, ("this must never run",)


def truncated(state: State, path: Path) -> None:
    save_file(state, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


REFUSED: dict[str, tuple[str, Callable[[State, Path], None]]] = {
    "no.pth does not exist": ("no.pth", lambda state, path: None),
    "half.safetensors cannot be read as weights": ("half.safetensors", truncated),
    "it holds Python code or objects": ("code.pth", saved(lambda state: {"a": Malicious()})),
    "it is no whole file of torch.save, or holds": ("bad.py", lambda state, path: path.write_text("print(1)")),
    "less.pth does not fit LeNet: it lacks classifier.0.bias; give": ("less.pth", saved(lacking("classifier.0.bias"))),
    "it has extra.weight, which the net has not": ("more.pth", saved(lambda s: s | {"extra.weight": torch.zeros(1)})),
    "is 6x3x5x5 where the net has 6x1x5x5": ("rgb.pth", saved(lambda state: state_of(create("lenet", in_channels=3)))),
}


def test_refused_files_change_nothing_and_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, (name, write) in REFUSED.items():
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        model = create("lenet")
        before = state_of(model)
        write(before, folder / name)
        with pytest.raises(ConvoyError) as caught:
            load_weights(model, folder / name)
        assert words in str(caught.value) and "\n" not in str(caught.value)
        assert same(before, state_of(model)), name
    assert "never run" not in capsys.readouterr().out
