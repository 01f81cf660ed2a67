"""`--reproducible`: the same weights, bit for bit, on any number of sample ranks, through the whole trainer."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from convoy.plans.plan import Plan
from convoy.training import set_up
from convoy.training.division import Division
from convoy.training.parallel import Method
from ranks import RankFailed, run_ranks
from tiny import write_mnist
from whole_runs import Ended, as_before, train_here

SETTINGS = {"reproducible": "true", "epochs": "3ba"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("bitwise") / "data")


@pytest.fixture(scope="module")
def serial(data: Path) -> Ended:
    return run_ranks(train_here, 1, data, data.parent / "serial", SETTINGS)[0]


@pytest.fixture(scope="module")
def divided(data: Path) -> Ended:
    return run_ranks(train_here, 2, data, data.parent / "divided", SETTINGS | {"parallel.plan": "filter=2"})[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "shares"), [(2, None), (3, None), (3, "[3,3,2]"), (3, "[1,6,1]"), (4, None), (8, None)]
)
def test_weights_are_those_of_one_device(
    data: Path, tmp_path: Path, serial: Ended, num: int, shares: str | None
) -> None:
    settings = SETTINGS | ({"parallel.shares": shares} if shares else {})
    for found in run_ranks(train_here, num, data, tmp_path / "run", settings, timeout=120):
        assert (found.digest, found.curve) == (serial.digest, serial.curve)


@pytest.mark.parametrize("num", [1, 2])
def test_weights_do_not_depend_on_what_is_computed_again(data: Path, tmp_path: Path, serial: Ended, num: int) -> None:
    for found in run_ranks(train_here, num, data, tmp_path / "run", SETTINGS | {"recompute": "true"}):
        assert (found.digest, found.curve) == (serial.digest, serial.curve)


@pytest.mark.parametrize(("num", "shares"), [(2, None), pytest.param(4, None, marks=pytest.mark.slow), (2, "[3,1]")])
def test_the_sample_axis_of_a_hybrid_plan_may_have_any_size(
    data: Path, tmp_path: Path, divided: Ended, num: int, shares: str | None
) -> None:
    settings = SETTINGS | {"parallel.plan": f"sample={num},filter=2"} | ({"parallel.shares": shares} if shares else {})
    for found in run_ranks(train_here, 2 * num, data, tmp_path / "run", settings, timeout=120):
        assert (found.digest, found.curve) == (divided.digest, divided.curve)


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("stage=2", {}),
        ("stage=2", {"recompute": "true"}),
        pytest.param("stage=2", {"recompute": "true", "parallel.schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param("stage=2,sample=2", {"recompute": "true"}, marks=pytest.mark.slow),
        pytest.param("stage=2", {"parallel.schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param("stage=3", {}, marks=pytest.mark.slow),
        ("stage=2,sample=2", {"parallel.shares": "[3,1]"}),
    ],
)
def test_stages_give_the_weights_of_one_device(
    data: Path, tmp_path: Path, serial: Ended, plan: str, more: dict[str, str]
) -> None:
    settings = SETTINGS | {"parallel.plan": plan} | more
    for found in run_ranks(train_here, Plan.parse(plan).mesh.num_devices, data, tmp_path / "run", settings):
        assert (found.digest, found.curve) == (serial.digest, serial.curve)


def _from_even_places(data: Path, out: Path) -> Ended:
    """Each part has as many microbatches as its share says, but from where it would begin if all were alike."""

    def microbatches(self: Division, rank: int) -> range:
        start = rank * len(self.sizes) // len(self.counts)
        return range(start, start + self.counts[rank])

    with as_before() as patch:
        patch.setattr(Division, "microbatches", microbatches)
        return train_here(data, out, SETTINGS | {"parallel.plan": "sample=2,filter=2", "parallel.shares": "[3,1]"})


@pytest.mark.slow
def test_parts_that_begin_elsewhere_would_be_noticed(data: Path, tmp_path: Path, divided: Ended) -> None:
    (found, *_) = run_ranks(_from_even_places, 4, data, tmp_path / "run", timeout=120)
    assert found.digest != divided.digest


def _without_the_tree(data: Path, out: Path) -> Ended:
    """Each microbatch by itself, but the gradients in the order of the backend's all-reduce."""
    with as_before() as patch:
        patch.setattr(set_up, "method_of", lambda recipe: Method())
        return train_here(data, out, SETTINGS)


@pytest.mark.parametrize("num", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_another_order_of_additions_would_be_noticed(data: Path, tmp_path: Path, serial: Ended, num: int) -> None:
    (found, *_) = run_ranks(_without_the_tree, num, data, tmp_path / "run", timeout=120)
    assert found.digest != serial.digest
    assert found.curve == pytest.approx(serial.curve, rel=1e-4)


def test_layers_that_the_network_freezes_stay_frozen(data: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"model.name": "tiny:TinyFrozen", "epochs": "2ep"}
    found = [run_ranks(train_here, num, data, tmp_path / f"{num}", settings)[0] for num in (1, 2)]
    assert found[0].digest == found[1].digest
    running = load_file(tmp_path / "1" / "weights.safetensors")["norm.running_mean"]
    assert not running.any()


def test_what_counts_passes_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"it changes passes by itself.*depends on the plan"):
        run_ranks(train_here, 2, data, tmp_path / "run", SETTINGS | {"model.name": "tiny:TinyCounting"})
