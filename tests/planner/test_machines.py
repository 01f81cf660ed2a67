"""Plans for machines that are not at hand."""

from dataclasses import replace

import pytest
import torch

from convoy import models
from convoy.errors import ConvoyError, TooLargeError
from convoy.hardware.catalog import machine
from convoy.hardware.speed import OURS
from convoy.planner.machines import PRECISIONS, Prediction, predict
from convoy.planner.workload import Workload, workload_of
from convoy.plans.plan import Plan


def workload(network: str, batch: int, precision: str = "fp32") -> Workload:
    with torch.device("meta"):
        model = models.create(network)
    shape = models.describe(network).input_shape
    assert shape is not None
    return workload_of(model, torch.empty(1, *shape), batch, name=network, precision=PRECISIONS[precision])


def alexnet(on: str, batch: int = 1024) -> Prediction:
    return predict(workload("alexnet", batch), machine(on), "fp32")


def strategies(found: Prediction) -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = {}
    for call in workload("alexnet", 8).graph.calls:
        if call.op in ("conv", "linear"):
            kinds.setdefault(call.op, set()).update(found.plan.strategy(call.layer, call.op))
    return kinds


def test_alexnet_on_eight_p100_is_what_krizhevsky_found() -> None:
    """Data parallelism for convolutions, model parallelism for dense layers (Krizhevsky, 2014)."""
    found = alexnet("8xp100-pcie")
    assert strategies(found)["conv"] == {"sample"}
    assert strategies(found)["linear"] & {"filter", "channel"} and "sample" not in strategies(found)["linear"]
    assert found.gain > 1.02
    control = alexnet("8xp100-pcie:nvswitch5")
    assert control.gain < found.gain and control.images_per_s > found.images_per_s


def test_resnet_is_by_samples_and_faster_on_more_devices() -> None:
    found = predict(workload("resnet18", 256), machine("4xv100-sxm2"), "fp32")
    assert found.plan == Plan.by_samples(4) and found.gain == 1
    rates = [rate for _, rate in found.curve]
    assert rates == sorted(rates) and found.speedup > 3
    assert found.alone < found.best < 4.01 * found.alone
    assert found.best / found.within < found.best < found.best * found.within


def test_unequal_devices_share_by_speed() -> None:
    equal, unequal = alexnet("2xtitan-x", 128), alexnet("2xtitan-x+1xgtx-1080", 192)
    assert unequal.images_per_s > equal.images_per_s and unequal.gain >= 1


def test_half_precision_is_faster_where_there_are_units_for_it() -> None:
    half = predict(workload("resnet18", 512, "fp16"), machine("v100-sxm2"), "fp16", searching=False)
    assert half.images_per_s > 1.3 * predict(workload("resnet18", 512), machine("v100-sxm2"), "fp32").images_per_s


def test_the_speed_up_is_beside_one_device_with_the_same_batch() -> None:
    one, two = (predict(workload("resnet18", 64), machine(text), "fp32") for text in ("t4", "2xt4"))
    assert two.speedup == pytest.approx(two.best / one.best) and one.speedup == pytest.approx(1)
    assert [count for count, _ in two.curve] == [1, 2, 4] and dict(two.curve)[2] == pytest.approx(two.images_per_s)
    unequal = predict(workload("resnet18", 64), machine("2xtitan-x+1xgtx-1080"), "fp32")
    assert dict(unequal.curve)[3] == pytest.approx(unequal.images_per_s) and max(dict(unequal.curve)) == 3
    small = predict(workload("resnet18", 8), machine("8xt4"), "fp32")
    assert (small.speedup < 1) == any("one device alone is faster" in note for note in small.notes)


def test_a_precision_that_a_device_lacks_is_refused() -> None:
    with pytest.raises(ConvoyError, match="k80 does not compute in bf16: choose fp32 or fp16"):
        predict(workload("resnet18", 64), machine("2xk80"), "bf16")


def test_given_plans_are_only_predicted_and_beside_data_parallelism() -> None:
    def gain(text: str) -> float:
        found = predict(workload("resnet18", 64), machine("2xk40"), "fp32", plans=[Plan.parse(text)])
        assert found.plan == Plan.parse(text)
        return found.gain

    assert gain("sample=2") == 1
    assert gain("filter=2") < 0.95  # activations travel in place of a few gradients


def test_a_network_that_no_device_has_room_for_is_cut_into_stages() -> None:
    """Without batch norm over all samples an update can go through stages in several passes."""
    with torch.device("meta"):
        model = models.create("vgg11")
    cut = workload_of(model, torch.empty(1, 3, 224, 224), 64, batch_norm="microbatch", microbatch=8)
    machine_of_two = machine("2xk20")
    assert predict(cut, machine_of_two, "fp32", memory_limit=2.2e9).plan.num_stages == 2
    with pytest.raises(TooLargeError):  # the control: where only the whole batch at once can be computed
        predict(replace(cut, counts=()), machine_of_two, "fp32", memory_limit=2.2e9)


def test_hosts_that_repeat_what_others_do_are_told() -> None:
    """Over 1 Gbit/s the second host is worth nothing: the fastest plan has it do what the first does."""
    found = predict(workload("resnet18", 128), machine("2x(2xv100-sxm2)", "1gbit"), "fp32")
    assert found.gain > 1.03 and "2 of the 4 devices would be as fast" in found.notes[0]
    control = predict(workload("resnet18", 128), machine("2x(2xv100-sxm2)", "100gbit"), "fp32")
    assert control.plan == Plan.by_samples(4) and not control.notes


def test_gpus_without_peers_wait_for_the_memory_of_their_host() -> None:
    assert alexnet("8xrtx-3090").held_back_by == "host memory"
    assert alexnet("8xp100-pcie:pcie3-x1").held_back_by == "pcie3"


def test_what_does_not_fit_is_refused_by_how_much() -> None:
    with pytest.raises(TooLargeError, match="more than the"):
        predict(workload("resnet18", 65536), machine("k20"), "fp32")
    with pytest.raises(ConvoyError, match="too small for the 8 devices of 8x"):
        predict(workload("alexnet", 4), machine("8xt4"), "fp32")


def test_a_slow_input_holds_back() -> None:
    found = predict(workload("resnet18", 256), machine("2xv100-sxm2"), "fp32", images_per_second=100, searching=False)
    assert found.images_per_s == pytest.approx(200) and found.held_back_by == "input"
    assert found.alone == pytest.approx(found.images_per_s / len(found.machine.devices))  # whose input is as slow
    assert not any("alone is faster" in note for note in found.notes)


@pytest.mark.parametrize(("batch", "least", "most"), [(256, 4677 / 1.15, 4677 * 1.15), (8, 300, 473)])
def test_an_h200_does_what_was_measured_on_it(batch: int, least: float, most: float) -> None:
    """4,677 images/s at 256; 300 in one run and 473 in another at 8."""
    software = replace(OURS, channels_last=True)
    found = predict(workload("resnet50", batch, "bf16"), machine("1xh200"), "bf16", software=software)
    assert least < found.best < most
    assert found.best / found.within < least and most < found.best * found.within
    gains = {one.text: one.gain for one in found.changes}
    if batch == 256:
        assert gains[
            "as convoy train by default, updates recorded as CUDA graphs with Convoy's batch norm"
        ] == pytest.approx(6263 / 4729, rel=0.15)
    else:
        assert 1519 / 473 < gains["updates recorded as CUDA graphs"] < 1519 / 300
    assert found.held_back_by == ("launch" if batch == 8 else "memory bandwidth")
