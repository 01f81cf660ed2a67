"""Runs of networks as people have them: wrapped, unfinished, with norms and weights of other kinds; on every plan."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from convoy.errors import ConvoyError
from convoy.models import load_weights
from ranks import RankFailed, run_ranks
from tiny import write_mnist
from whole_runs import Ended, train_here

SETTINGS = {"epochs": "4ba", "evaluate_every": "2ba", "optimizer.lr": "0.01"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("given") / "data")


def trained(data: Path, out: Path, model: str, plan: str, **settings: str) -> Ended:
    values = SETTINGS | {"model.name": f"tiny:{model}", "parallel.plan": plan} | settings
    found = run_ranks(train_here, 1 if plan == "serial" else 2, data, out, values)[0]
    assert isinstance(found, Ended)
    return found


@pytest.mark.parametrize("model", ["TinyStatless", "TinyByHand", "TinyLazy", "TinyWeighed", "tiny_wrapped"])
def test_any_plan_gives_the_curve_of_one_device(data: Path, tmp_path: Path, model: str) -> None:
    want = trained(data, tmp_path / "serial", model, "serial")
    for plan in ("sample=2", "stage=2"):
        found = trained(data, tmp_path / plan, model, plan)
        assert found.curve == pytest.approx(want.curve, rel=1e-5), plan
    weights = [load_file(tmp_path / name / "weights.safetensors") for name in ("serial", "sample=2", "stage=2")]
    for name, tensor in weights[0].items():
        for other in weights[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)
    assert "module" not in " ".join(weights[0])


@pytest.mark.parametrize("model", ["TinyStatless", "TinyByHand"])
def test_bits_are_the_same(data: Path, tmp_path: Path, model: str) -> None:
    one, two = (trained(data, tmp_path / plan, model, plan, reproducible="true") for plan in ("serial", "sample=2"))
    assert (one.digest, one.curve) == (two.digest, two.curve)


def test_running_statistics_of_one_pass_for_several_microbatches_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="instance_norm in layer norm computes with several samples at once"):
        trained(data, tmp_path / "two", "TinyTracking", "sample=2")
    one, two = (trained(data, tmp_path / plan, "TinyTracking", plan) for plan in ("serial", "filter=2"))
    assert two.curve == pytest.approx(one.curve, rel=1e-5)


def test_gradients_that_are_added_in_another_order_are_refused_where_bits_count(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="weights of tiny:TinyWeighed are computed from others"):
        trained(data, tmp_path / "two", "TinyWeighed", "sample=2", reproducible="true")


def test_a_script_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="the network is TorchScript"):
        trained(data, tmp_path / "one", "tiny_scripted", "serial")


WEIGHT = torch.randn(3, 4)
ODD = {
    "sparse_coo": lambda: WEIGHT.to_sparse(),
    "sparse_csr": lambda: WEIGHT.to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(WEIGHT, 0.1, 0, torch.qint8),
    "on the meta device": lambda: WEIGHT.to("meta"),
    "nested": lambda: torch.nested.nested_tensor([WEIGHT[0], WEIGHT[1]]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_in_a_file_of_weights_are_named(tmp_path: Path, kind: str) -> None:
    torch.save({"weight": ODD[kind](), "bias": torch.zeros(3)}, tmp_path / "odd.pth")
    net = nn.Linear(4, 3)
    before = net.weight.clone()
    with pytest.raises(ConvoyError, match=rf"weight in .*odd\.pth is {kind}, and weights are plain numbers: save "):
        load_weights(net, tmp_path / "odd.pth")
    assert torch.equal(net.weight, before)


@pytest.mark.parametrize("odd", [WEIGHT.to(torch.complex64), WEIGHT.to(torch.int8), WEIGHT > 0])
def test_numbers_of_another_kind_are_named(tmp_path: Path, odd: Tensor) -> None:
    save_file({"weight": odd, "bias": torch.zeros(3)}, tmp_path / "odd.safetensors")
    with pytest.raises(ConvoyError, match=r"weight is 3x4 of .* where the net has 3x4"):
        load_weights(nn.Linear(4, 3), tmp_path / "odd.safetensors")
