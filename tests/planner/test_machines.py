"""Plans for machines that are not at hand, by what was published and measured elsewhere."""

from dataclasses import replace

import pytest
import torch

from convoy import models
from convoy.errors import ConvoyError, TooLargeError
from convoy.hardware.catalog import machine
from convoy.planner.machines import Prediction, plan_on, predict
from convoy.planner.workload import PRECISIONS, Workload, workload_of
from convoy.plans.plan import Plan


def workload(network: str, batch: int, precision: str = "fp32") -> Workload:
    with torch.device("meta"):
        model = models.create(network)
    shape = models.describe(network).input_shape
    return workload_of(model, torch.empty(1, *shape), batch, name=network, precision=PRECISIONS[precision])


def on(text: str, network: str, batch: int, precision: str = "fp32", links: str | None = None, **options) -> Prediction:
    return predict(workload(network, batch, precision), machine(text, links), precision, **options)


def test_alexnet_on_eight_p100_is_what_krizhevsky_found() -> None:
    """Data parallelism for convolutions, model parallelism for dense layers (Krizhevsky, 2014)."""
    prediction = on("8xp100-pcie", "alexnet", 1024)
    kinds: dict[str, set[str]] = {"conv": set(), "linear": set()}
    for call in workload("alexnet", 8).graph.calls:
        if call.op in kinds:
            kinds[call.op].update(prediction.plan.strategy(call.layer, call.op))
    assert kinds["conv"] == {"sample"} and kinds["linear"] & {"filter", "channel"} and "sample" not in kinds["linear"]
    control = on("8xp100-pcie:nvswitch5", "alexnet", 1024)
    assert prediction.gain > 1.02 and control.gain < prediction.gain and control.images_per_s > prediction.images_per_s
    equal, unequal = on("2xtitan-x", "alexnet", 128), on("2xtitan-x+1xgtx-1080", "alexnet", 192)  # which share by speed
    assert unequal.images_per_s > equal.images_per_s and unequal.gain >= 1


def test_resnet_is_by_samples_and_the_speed_up_is_beside_one_device_with_the_same_batch() -> None:
    prediction = on("4xv100-sxm2", "resnet18", 256)
    assert prediction.plan == Plan.by_samples(4) and prediction.gain == 1 and prediction.speedup > 3
    assert prediction.best / prediction.within < prediction.best < prediction.best * prediction.within
    one, two = (on(text, "resnet18", 64) for text in ("t4", "2xt4"))
    assert two.speedup == pytest.approx(two.best / one.best) and one.speedup == pytest.approx(1)
    for prediction, cuda in ((one, True), (on("cpu-core", "resnet18", 64), False)):
        assert any("CUDA graphs" in change.text for change in prediction.changes) is cuda


MANY, NOWHERE = "16x(8xa100-sxm4)", Plan.parse({"mesh": {"gpu": 2}, "layers": {"nosuch": {"gpu": "filter"}}})


def test_what_is_asked_for_counts_on_any_number_of_devices_or_is_refused() -> None:
    plan = Plan.parse("sample=16,filter=8")
    assert on(MANY, "resnet18", 1024, plans=[plan]).plan == plan
    for text, options, words in (
        (MANY, {"fixes": ["fc=filter"]}, "up to 64 devices"),
        (MANY, {"memory_limit": 1}, "more than the 1 B"),
        ("t4", {"fixes": ["nosuch=filter"]}, "matches no layer"),
        ("2xt4", {"plans": [NOWHERE]}, "matches no layer"),
    ):
        with pytest.raises(ConvoyError, match=words):
            on(text, "resnet18", 1024, **options)
    asked = {"model": models.create("lenet"), "example": torch.zeros(1, 1, 28, 28), "on": "t4", "global_batch": 8}
    for wrong in {"microbatches": -2}, {"memory_limit": 0}, {"images_per_second": -5}, {"model": on}:
        with pytest.raises(ConvoyError, match=r"above 0|nn\.Module"):
            plan_on(**asked | wrong)


def test_a_plan_is_compared_with_data_parallelism_that_its_microbatches_do_not_allow() -> None:
    divided = replace(workload("lenet", 64), batch_norm="microbatch", microbatch=32)
    prediction = predict(divided, machine("4xt4"), "fp32")
    assert prediction.plan != Plan.by_samples(4) and "without microbatches" in prediction.notes[0]


def test_a_network_that_no_device_has_room_for_is_cut_into_stages_or_refused_by_how_much() -> None:
    """Without batch norm over all samples an update can go through stages in several passes."""
    with torch.device("meta"):
        model = models.create("vgg11")
    cut = workload_of(model, torch.empty(1, 3, 224, 224), 64, batch_norm="microbatch", microbatch=8)
    assert predict(cut, machine("2xk20"), "fp32", memory_limit=2.2e9).plan.num_stages == 2
    with pytest.raises(TooLargeError, match="more than the"):  # the control: only the whole batch at once
        predict(replace(cut, counts=()), machine("2xk20"), "fp32", memory_limit=2.2e9)
