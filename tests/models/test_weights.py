"""Weights from files: what loads, what is said about it, and that whatever is refused changes nothing."""

from collections.abc import Callable
from pathlib import Path

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


WRITERS: dict[str, Callable[[State, Path], None]] = {
    "plain.safetensors": save_file,
    "plain.pth": lambda state, path: torch.save(state, path),
    "plain.pt": lambda state, path: torch.save(state, path),
    "legacy.pth": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "entry_state_dict.pth": lambda state, path: torch.save({"epoch": 3, "state_dict": state}, path),
    "entry_model.pth": lambda state, path: torch.save({"model": state, "lr": 0.1}, path),
    "parallel.pth": lambda state, path: torch.save({f"module.{key}": value for key, value in state.items()}, path),
    "compiled.pth": lambda state, path: torch.save(
        {"model": {f"module._orig_mod.{key}": value for key, value in state.items()}}, path
    ),
    "lightning.pth": lambda state, path: torch.save(
        {"state_dict": {f"model.{key}": value for key, value in state.items()}}, path
    ),
    "without_counters.pth": lambda state, path: torch.save(
        {key: value for key, value in state.items() if "num_batches" not in key}, path
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_that_fit(tmp_path: Path, name: str) -> None:
    saved, model = create("cifar-quick"), create("cifar-quick")
    assert not same(state_of(saved), state_of(model))
    WRITERS[name](state_of(saved), tmp_path / name)
    assert load_weights(model, tmp_path / name) == []
    assert same(state_of(saved), state_of(model))


def test_half_precision_becomes_the_networks_own(tmp_path: Path) -> None:
    saved, model = create("lenet"), create("lenet")
    save_file({key: value.half() for key, value in state_of(saved).items()}, tmp_path / "half.safetensors")
    load_weights(model, tmp_path / "half.safetensors")
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, saved.state_dict()[key], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["lenet", "squeezenet1_1-cifar"])
def test_another_number_of_classes_keeps_the_fresh_head(tmp_path: Path, name: str) -> None:
    saved, model = create(name, num_classes=12), create(name, num_classes=7)
    fresh = state_of(model)
    save_file(state_of(saved), tmp_path / "twelve.safetensors")
    (note,) = load_weights(model, tmp_path / "twelve.safetensors")
    head = "classifier.4" if name == "lenet" else "classifier.1"
    assert note == f"twelve.safetensors has 12 classes and this net 7: fresh weights stay in {head}"
    for key, value in model.state_dict().items():
        assert torch.equal(value, fresh[key] if key.startswith(f"{head}.") else saved.state_dict()[key])


def test_auxiliary_heads_may_be_missing_on_either_side(tmp_path: Path) -> None:
    full = create("googlenet-cifar")
    bare = create("googlenet-cifar", aux_logits=False)
    save_file(state_of(full), tmp_path / "full.safetensors")
    assert load_weights(bare, tmp_path / "full.safetensors") == [
        "full.safetensors has auxiliary heads and this net none: they are left out"
    ]
    assert torch.equal(bare.fc.weight, full.fc.weight)

    fresh = state_of(full)
    with torch.no_grad():
        bare.fc.weight.zero_()
    save_file(state_of(bare), tmp_path / "bare.safetensors")
    assert load_weights(full, tmp_path / "bare.safetensors") == [
        "bare.safetensors lacks the auxiliary heads: fresh weights stay in aux1 and aux2"
    ]
    assert torch.equal(full.aux1.fc1.weight, fresh["aux1.fc1.weight"])
    assert full.fc.weight.eq(0).all()


def test_three_heads_of_googlenet_stay_fresh_together(tmp_path: Path) -> None:
    save_file(state_of(create("googlenet-cifar", num_classes=3)), tmp_path / "three.safetensors")
    (note,) = load_weights(create("googlenet-cifar"), tmp_path / "three.safetensors")
    assert note == ("three.safetensors has 3 classes and this net 10: fresh weights stay in aux1.fc2, aux2.fc2 and fc")


def test_published_googlenet_says_what_images_it_wants(tmp_path: Path) -> None:
    path = tmp_path / "googlenet-1378be20.pth"
    torch.save(state_of(create("googlenet-cifar")), path)
    (note,) = load_weights(create("googlenet-cifar"), path)
    assert "set the model's option transform_input=true" in note
    assert load_weights(create("googlenet-cifar", transform_input=True), path) == []


def test_a_run_directory_stands_for_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConvoyError, match=f"has no weights.safetensors yet: finish it with convoy train {tmp_path}"):
        load_weights(create("lenet"), tmp_path)
    trained = create("lenet", num_classes=3)
    save_file(state_of(trained), tmp_path / "weights.safetensors")
    (note,) = load_weights(fresh := create("lenet"), tmp_path)
    assert note.startswith("weights.safetensors has 3 classes and this net 10: fresh weights stay in ")
    first = "features.0.weight"
    assert torch.equal(fresh.state_dict()[first], trained.state_dict()[first])


class Malicious:
    """A pickle that would run a command when it is read."""

    def __reduce__(self) -> tuple:
        return print, ("this must never run",)


def truncated(write: Callable[[State, Path], None]) -> Callable[[State, Path], None]:
    def write_half(state: State, path: Path) -> None:
        write(state, path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return write_half


def without(state: State, *keys: str) -> State:
    return {key: value for key, value in state.items() if key not in keys}


save = WRITERS["plain.pth"]
REFUSED: dict[str, tuple[str, Callable[[State, Path], None], str]] = {
    "missing": ("no.pth", lambda state, path: None, "no.pth does not exist"),
    "folder": ("folder", lambda state, path: path.mkdir(), "folder are a folder and no run directory: name the"),
    "empty": (
        "empty.pth",
        lambda state, path: path.write_bytes(b""),
        "empty.pth cannot be read as weights (it is empty)",
    ),
    "empty safetensors": ("e.safetensors", lambda state, path: path.write_bytes(b""), "cannot be read as weights"),
    "a web page": ("w.pth", lambda state, path: path.write_text("<!DOCTYPE html>"), "it is not what torch.save writes"),
    "a pickle's letter": ("i.pth", lambda state, path: path.write_text("i\n"), "it is not what torch.save writes"),
    "text": (
        "t.safetensors",
        lambda state, path: path.write_text("not weights at all"),
        "it is no safetensors file, or",
    ),
    "torch's as safetensors": ("t.safetensors", save, "but what torch.save writes: let its name end in .pth"),
    "half a file": ("half.pth", truncated(save), "half.pth cannot be read as weights"),
    "half a legacy file": ("half.pth", truncated(WRITERS["legacy.pth"]), "half.pth cannot be read as weights"),
    "half safetensors": ("half.safetensors", truncated(save_file), "half.safetensors cannot be read as weights"),
    "other suffix": ("s.pth", save_file, "but a safetensors file: let its name end in .safetensors"),
    "code": ("code.pth", lambda state, path: torch.save({"a": Malicious()}, path), "it holds Python code or objects"),
    "a whole module": (
        "m.pth",
        lambda state, path: torch.save(nn.Linear(2, 2), path),
        "torch.nn.modules.linear.Linear",
    ),
    "a list": ("l.pth", lambda state, path: torch.save([1, 2], path), "l.pth holds no state dict"),
    "numbers": ("n.pth", lambda state, path: torch.save({"a": 1}, path), "n.pth holds no state dict"),
    "nothing": ("n.pth", lambda state, path: torch.save({}, path), "n.pth holds no state dict"),
    "another net": (
        "other.pth",
        lambda state, path: save(state_of(create("squeezenet1_1-cifar")), path),
        "other.pth does not fit LeNet: it lacks features.3.weight, features.3.bias, classifier.0.weight and 5 more; "
        "it has features.3.squeeze.weight",
    ),
    "one less": (
        "less.pth",
        lambda state, path: save(without(state, "classifier.0.bias"), path),
        "less.pth does not fit LeNet: it lacks classifier.0.bias; give",
    ),
    "no head": (
        "bare.pth",
        lambda state, path: save(without(state, "classifier.4.weight", "classifier.4.bias"), path),
        "it lacks classifier.4.weight, classifier.4.bias; give",
    ),
    "one more": (
        "more.pth",
        lambda state, path: save(state | {"extra.weight": torch.zeros(1)}, path),
        "it has extra.weight, which the net has not; give",
    ),
    "other channels": (
        "rgb.pth",
        lambda state, path: save(state_of(create("lenet", in_channels=3)), path),
        "features.0.weight is 6x3x5x5 where the net has 6x1x5x5",
    ),
    "wider head": (
        "wide.pth",
        lambda state, path: save(state | {"classifier.4.weight": torch.zeros(12, 85)}, path),
        "classifier.4.weight is 12x85 where the net has 10x84",
    ),
    "integers": (
        "int8.pth",
        lambda state, path: save({key: value.to(torch.int8) for key, value in state.items()}, path),
        "features.0.weight is 6x1x5x5 of int8 where the net has 6x1x5x5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_files_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    name, write, words = REFUSED[case]
    write(state_of(create("lenet")), tmp_path / name)
    model = create("lenet")
    before = state_of(model)
    with pytest.raises(ConvoyError) as caught:
        load_weights(model, tmp_path / name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert same(before, state_of(model))
    assert "never run" not in capsys.readouterr().out
