"""What a recipe leaves open: settled alike on all ranks, said once, kept in the run, and never anew on the way."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from convoy import processor
from convoy.comm.ranks import Ranks
from convoy.engine.coupling import CPU_SHARE, CUDA_SHARE, Probe
from convoy.errors import ConvoyError
from convoy.models import create
from convoy.progress import Reporter
from convoy.training import Recipe, defaults, load_recipe, train
from convoy.training.build import merged, probed
from convoy.training.defaults import Settled, as_begun, has_bf16, settle
from convoy.training.environment import join_ranks
from convoy.training.finite import FiniteGuard
from convoy.training.parallel import TrainedNetwork
from convoy.training.precision import Scaler, set_numerics
from convoy.training.session import Session
from convoy.training.set_up import set_up
from ranks import run_ranks
from tiny import write_mnist

CPU = torch.device("cpu")
SHAPE = (1, 28, 28)
H100, V100 = ("cuda", "NVIDIA H100", True), ("cuda", "Tesla V100", False)
NEW, OLD = ("cpu", "this CPU", True), ("cpu", "this CPU", False)
GPU_SAYS = [
    "precision bf16: layers compute in bf16, weights stay in fp32 (--precision fp32 turns it off)",
    "channels_last: channels lie innermost, as bf16 convolutions on GPUs take them (--channels-first turns it off)",
    "fused optimizer: the update of all weights is one kernel (--set optimizer.fused=false turns it off)",
]


def recipe_of(*settings: str) -> Recipe:
    return load_recipe("default", ["model.name=tiny:TinyNet", *settings])


def settled_on(patch: pytest.MonkeyPatch, *devices: tuple[str, str, bool], **options: Any) -> Callable[..., Settled]:
    """Settles recipes as the first of ranks with such devices."""
    able = [defaults._Ability(*device) for device in devices]
    patch.setattr(defaults, "_ability", lambda device: able[0])
    ranks = Ranks(num=len(able))
    patch.setattr(Ranks, "gather", lambda self, value: able if self is ranks else [value])
    return lambda *settings: settle(recipe_of(*settings), CPU, ranks, **options)


def chosen(recipe: Recipe) -> tuple[object, ...]:
    return recipe.precision, recipe.channels_last, getattr(recipe.optimizer, "fused", "none")


@pytest.mark.parametrize(
    ("devices", "settings", "want", "said"),
    [
        ([H100], [], ("bf16", True, True), GPU_SAYS),
        ([H100] * 4, ["precision=auto"], ("bf16", True, True), GPU_SAYS),
        ([H100], ["precision=fp32"], ("fp32", False, None), []),
        ([H100], ["channels_last=false"], ("bf16", False, True), [GPU_SAYS[0], GPU_SAYS[2]]),
        ([H100], ["optimizer.fused=false"], ("bf16", True, False), GPU_SAYS[:2]),
        ([H100], ["optimizer.name=lars", "optimizer.lr=1"], ("bf16", True, "none"), GPU_SAYS[:2]),
        (
            [H100],
            ["reproducible=true"],
            ("fp32", False, None),
            [
                "precision fp32: a reproducible run does not follow its device (--precision bf16 is another choice)",
            ],
        ),
        ([H100], ["reproducible=true", "precision=bf16"], ("bf16", True, True), GPU_SAYS[1:]),
        (
            [V100],
            [],
            ("fp32", False, None),
            ["precision fp32: Tesla V100 has no bf16 in hardware (--precision fp16 is another choice)"],
        ),
        (
            [H100, V100],
            [],
            ("fp32", False, None),
            [
                "precision fp32: Tesla V100, the device of rank 1, has no bf16 in hardware "
                "(--precision fp16 is another choice)"
            ],
        ),
        ([V100], ["precision=fp16"], ("fp16", True, True), [GPU_SAYS[1].replace("bf16", "fp16"), GPU_SAYS[2]]),
        ([H100, NEW], [], ("fp32", False, None), []),
        ([NEW], [], ("fp32", False, None), []),
        ([NEW], ["precision=bf16"], ("bf16", False, None), []),
        ([NEW], ["precision=bf16", "channels_last=true"], ("bf16", True, None), []),
        (
            [OLD],
            ["precision=auto"],
            ("fp32", False, None),
            ["precision fp32: this CPU has no bf16 in hardware: neither avx512_bf16 nor amx"],
        ),
    ],
)
def test_what_is_open_follows_the_device_that_can_least(
    monkeypatch: pytest.MonkeyPatch,
    devices: list[tuple[str, str, bool]],
    settings: list[str],
    want: tuple[object, ...],
    said: list[str],
) -> None:
    monkeypatch.setattr(defaults, "has_bf16", lambda device: True)
    found = settled_on(monkeypatch, *devices)(*settings)
    assert chosen(found.recipe) == want
    assert found.notes == said
    assert settle(found.recipe, CPU).recipe == found.recipe


def test_what_was_said_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settled_on(monkeypatch, NEW)
    for settings in (["precision=fp32", "channels_last=true"], ["precision=bf16", "channels_last=false"]):
        recipe = recipe_of(*settings)
        assert asked(*settings).recipe == recipe


def test_on_a_cpu_auto_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    chooses = {device: settled_on(monkeypatch, device, device)("precision=auto") for device in (NEW, OLD)}
    assert {device[2]: chosen(settled.recipe) for device, settled in chooses.items()} == {
        True: ("bf16", False, None),
        False: ("fp32", False, None),
    }
    assert all(settled.notes[0].startswith("precision ") for settled in chooses.values())


def test_reproducible_runs_ask_no_device() -> None:
    with pytest.raises(ConvoyError) as raised:
        recipe_of("reproducible=true", "precision=auto")
    assert str(raised.value) == (
        "reproducible gives the same weights wherever it runs, but precision=auto asks the device: set precision=fp32 "
        "or precision=bf16"
    )


@pytest.mark.parametrize(
    ("text", "able"),
    [
        ("flags\t: fma avx512_bf16 clzero", True),
        ("Features : asimd bf16", True),
        ("flags : avx512f", False),
        (None, False),
    ],
)
def test_cpus_say_what_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, able: bool) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(processor, "CPU_INFO", file)
    assert has_bf16(CPU) == able
    recipe = recipe_of("precision=bf16")
    note = "precision bf16: without hardware for it, this CPU may take longer than in fp32"
    assert settle(recipe, CPU).notes == ([] if able else [note])


@pytest.mark.parametrize(("capability", "able"), [((9, 0), True), ((8, 0), True), ((7, 5), False)])
def test_gpus_since_ampere_have_it_and_multiply_in_tf32(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    device = torch.device("cuda:0")
    assert has_bf16(device) == able
    tf32 = "TF32: convolutions in fp32 multiply in TF32 (NVIDIA_TF32_OVERRIDE=0 in the environment turns it off)"
    assert settle(recipe_of("precision=fp32"), device).notes == ([tf32] if able else [])
    assert tf32 not in settle(recipe_of(), device).notes or not able


# Runs


class Words(Reporter):
    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at

    def advance(self, done: int, text: str | None = None) -> None:
        if done == self.stop_at:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def as_before():
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("defaults") / "data")


def run(data: Path, out: Path, *settings: str, stop_at: int | None = None, resume: bool = False) -> Session:
    """Train; the session."""
    shared = [f"data.path={data}", "batch=24", "epochs=4ba", "log_every=1ba", "threads=1"]
    sessions: list[Session] = []
    train(
        recipe_of(*shared, *settings),
        out,
        resume=resume,
        device=CPU,
        reporter=Words(stop_at),
        on_start=sessions.append,
    )
    return sessions[0]


def config(out: Path) -> dict[str, Any]:
    return yaml.safe_load((out / "config.yaml").read_text())


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "weights.safetensors")


def alike(a: Path, b: Path) -> bool:
    return all(torch.equal(tensor, weights(b)[name]) for name, tensor in weights(a).items())


def test_a_run_keeps_what_was_chosen_and_goes_on_with_it_elsewhere(data: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:  # a GPU, as far as choices go
        patch.setattr(defaults, "_ability", lambda device: defaults._Ability(*H100))
        notes = run(data, tmp_path / "whole").notes
        run(data, tmp_path / "parts", stop_at=2)
    assert [note for note in notes if note in GPU_SAYS] == GPU_SAYS
    kept = config(tmp_path / "parts")
    assert (kept["precision"], kept["channels_last"], kept["optimizer"]["fused"]) == ("bf16", True, True)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert set(GPU_SAYS) <= set(summary["notes"])
    rows = {row["name"]: row["value"] for row in summary["derived"]}
    assert (rows["precision"], rows["memory format"], rows["optimizer"]) == ("bf16", "channels_last", "fused")
    run(data, tmp_path / "parts", resume=True)  # a CPU, by a recipe that leaves all open
    assert alike(tmp_path / "whole", tmp_path / "parts")
    run(data, tmp_path / "cpu", "precision=fp32")
    assert not alike(tmp_path / "whole", tmp_path / "cpu")


def test_on_a_cpu_nothing_changes_and_an_old_run_stays_as_it_is_on_a_gpu(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "said", "precision=fp32", "channels_last=false")
    run(data, tmp_path / "open", stop_at=2)
    kept = config(tmp_path / "open")
    assert (kept["precision"], kept["channels_last"], "fused" in kept["optimizer"]) == ("fp32", False, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "_ability", lambda device: defaults._Ability(*H100))
        run(data, tmp_path / "open", resume=True)
    assert alike(tmp_path / "said", tmp_path / "open")


def test_what_is_said_still_has_to_be_that_of_the_run(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", stop_at=2)
    with pytest.raises(ConvoyError, match="was begun with precision=fp32 and cannot go on with precision=bf16"):
        run(data, tmp_path / "run", "precision=bf16", resume=True)
    run(data, tmp_path / "run", "precision=auto", resume=True)
    assert config(tmp_path / "run")["precision"] == "fp32"


@pytest.mark.parametrize("name", [["optimizer.name=sgd"], ["optimizer.name=adamw", "optimizer.eps=0.001"]])
def test_the_kernels_of_an_optimizer_may_change_on_the_way(data: Path, tmp_path: Path, name: list[str]) -> None:
    settings = [*name, "optimizer.lr=0.01"]
    run(data, tmp_path / "whole", *settings)
    for number, (before, after) in enumerate([("true", "false"), ("false", "true")]):
        out = tmp_path / str(number)
        run(data, out, *settings, f"optimizer.fused={before}", stop_at=2)
        session = run(data, out, *settings, f"optimizer.fused={after}", resume=True)
        assert bool(session.state.optimizer.param_groups[0]["fused"]) == (after == "true")
        for one, tensor in weights(tmp_path / "whole").items():
            assert torch.allclose(weights(out)[one], tensor, rtol=1e-4, atol=1e-6)


def test_as_begun_fills_in_what_is_open_alone() -> None:
    begun = recipe_of("precision=bf16", "channels_last=true", "optimizer.fused=true")
    assert chosen(as_begun(recipe_of(), begun)) == ("bf16", True, True)
    said = recipe_of("precision=fp32", "channels_last=false", "optimizer.fused=false")
    assert as_begun(said, begun) == said


def _settled_here() -> tuple[object, ...]:
    """Of two ranks, the second has a device without bf16."""
    ranks, device = join_ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "_ability", lambda device: defaults._Ability(*(H100, V100)[ranks.rank]))
        return chosen(settle(recipe_of(), device, ranks).recipe)


def test_unlike_ranks_agree() -> None:
    first, second = run_ranks(_settled_here, 2)
    assert first == second == ("fp32", False, None)


# What a device keeps, and what is read of it


def test_what_a_pass_keeps_is_counted_in_its_precision() -> None:
    kept = {}
    for precision in ("fp32", "bf16"):
        recipe = recipe_of(f"precision={precision}", "channels_last=false")
        found = probed(create("resnet18", num_classes=10), recipe, (3, 64, 64), (4,), CPU, "the model")
        assert found.separable
        kept[precision] = found.bytes_per_sample
    assert 0.5 <= kept["bf16"] / kept["fp32"] < 0.6


def test_ranks_share_the_memory_of_a_gpu_or_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr("convoy.training.build.host_memory", lambda: 2**30)
    found, sizes = Probe(True, False, 2**20, False), (1,) * 10**6

    def merge(device: str, on_device: int, *settings: str) -> int:
        return merged(recipe_of(*settings), replace(found, on_device=on_device), sizes, torch.device(device))[0]

    assert [merge("cuda:0", number) for number in (1, 4)] == [CUDA_SHARE * 80 * 1024, CUDA_SHARE * 20 * 1024]
    assert [merge("cpu", number) for number in (1, 4)] == [CPU_SHARE * 1024, CPU_SHARE * 256]
    assert merge("cpu", 1, "parallel.memory_limit=64MB") == 64 * 10**6 * CPU_SHARE // 2**20


class Reads(TorchDispatchMode):
    """Counts numbers that are read from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_guarded_update_is_read_once(bad: float | None) -> None:
    model = create("resnet18", num_classes=10)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)  # finite, though its sum of squares is not
    if bad is not None:
        model.fc.bias.grad[3] = bad
    guard = FiniteGuard(TrainedNetwork(model, None, CPU, model, False), Ranks(), gradients=True)
    with Reads() as reads:
        assert guard.passes([torch.tensor(1.0), torch.tensor(2.0)]) == (bad is None)
    assert reads.count == 1
    assert not guard.passes([torch.tensor(1.0), torch.tensor(float("nan"))])
    model.zero_grad()  # a rank without samples
    assert guard.passes([]) and guard.passes([torch.tensor(1.0)])


@pytest.mark.parametrize("apart", [False, True])
def test_the_scale_of_fp16_is_read_where_ranks_have_other_gradients(apart: bool) -> None:
    weight = torch.ones(2, requires_grad=True)
    scaler, optimizer = Scaler(CPU, "fp16", bool if apart else None), torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    with Reads() as reads:
        scaler.unscale_(optimizer)
    assert reads.count == apart


def test_a_stage_without_the_loss_has_a_scale_of_fp16() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.full_like(weight, 65536.0)  # as the last stage sends it, scaled
    scaler, optimizer = Scaler(CPU, "fp16", bool), torch.optim.SGD([weight], lr=1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]


def test_reproducible_runs_fill_no_memory() -> None:
    set_numerics(recipe_of("reproducible=true"))
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.are_deterministic_algorithms_enabled()


def test_a_cpu_session_is_settled(data: Path) -> None:
    session = set_up(recipe_of(f"data.path={data}", "batch=24", "precision=auto"), CPU, keep=False)
    assert session.recipe.precision in ("fp32", "bf16")
    assert sum(note.startswith("precision ") for note in session.notes) == 1
