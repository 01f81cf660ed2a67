"""What couples the samples of a microbatch is not computed together with those of other devices, also where the network
draws random numbers besides."""

from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import Ended, train_here

SETTINGS = {"epochs": "3ba"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("coupled") / "data")


def _refusal(data: Path, out: Path, settings: dict[str, str]) -> str:
    with pytest.raises(ConvoyError) as error:
        train_here(data, out, settings)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["TinyCoupled", "TinyAsleep", "TinyDrawing", "TinyTraining"])
def test_microbatches_of_several_devices_are_not_coupled(data: Path, tmp_path: Path, model: str) -> None:
    settings = SETTINGS | {"model.name": f"tiny:{model}"}
    for sentence in run_ranks(_refusal, 2, data, tmp_path / "refused", settings):
        assert sentence.startswith("mean in the network itself computes with several samples at once"), sentence
    (serial,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    for found in run_ranks(train_here, 2, data, tmp_path / "run", settings | {"parallel.plan": "filter=2"}):
        assert found.curve == pytest.approx(serial.curve, rel=1e-4)


@pytest.mark.slow
def test_a_network_that_draws_alone_may_be_divided_by_samples(data: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"model.name": "tiny:TinyDepth"}
    found: list[Ended] = [run_ranks(train_here, num, data, tmp_path / str(num), settings)[0] for num in (1, 2)]
    assert found[1].curve == pytest.approx(found[0].curve, rel=1e-4)
