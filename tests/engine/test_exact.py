"""Training under a plan is training on one device: every net under every plan, in float64 on real processes."""

import itertools
import os
from typing import Any

import pytest
import torch
from exactness import Distance, rounding_of, run

from convoy.plans.plan import Plan
from ranks import RankFailed, replace_processes, run_ranks
from small_nets import SMALL_NETS

PLANS = [
    "sample=2",
    "sample=3",
    "filter=2",
    "filter=3",
    "channel=2",
    "height=2",
    "height=3",
    "width=2",
    "sample=2,filter=2",
    "sample=2,height=2",
    "owt=2",
]
NETS = ["lenet", "alexnet", "alexnet-2012", "squeezenet1_1", "vgg11_bn", "googlenet", "resnet18", "resnet50"]
REFUSED = {
    ("lenet", "channel=2"): "layer 'features.0' has only 1 input channel",
    ("alexnet-2012", "filter=3"): "in 2 groups, which cannot be divided over the 3 ranks",
}
ROWS = {"height=2", "width=2", "sample=2,height=2"}
SIZES = {(net, plan): 64 for net in ("resnet18", "resnet50") for plan in ROWS}
SIZES |= {(net, "height=3"): 96 for net in ("resnet18", "resnet50", "googlenet", "squeezenet1_1", "vgg11_bn")}

MIXED: dict[str, dict] = {
    "alexnet": {
        "mesh": {"node": 2, "gpu": 2},
        "layers": {
            "features.0": {"node": "sample", "gpu": "height"},
            "features.3": {"node": "sample", "gpu": "filter"},
            "features.6": {"node": "sample", "gpu": "channel"},
            "features.*": {"node": "sample", "gpu": "filter"},
            "classifier.1": {"node": "filter", "gpu": "filter"},
            "classifier.4": {"node": "channel", "gpu": "channel"},
            "classifier.*": {"node": "replicate", "gpu": "filter"},
        },
    },
    "resnet18": {
        "mesh": {"a": 2, "b": 2},
        "layers": {
            "conv1": {"a": "height", "b": "width"},
            "layer1.*": {"a": "sample", "b": "filter"},
            "layer2.0.*": {"a": "filter", "b": "sample"},
            "layer2.1.*": {"a": "height", "b": "channel"},
            "layer3.*": {"a": "channel", "b": "filter"},
            "layer4.*": {"a": "replicate", "b": "sample"},
            "fc": {"a": "filter", "b": "filter"},
        },
    },
    "dense": {
        "mesh": {"a": 2, "b": 2},
        "layers": {
            "stem": {"a": "sample", "b": "height"},
            "convs.0": {"a": "filter", "b": "sample"},
            "convs.1": {"a": "channel", "b": "filter"},
            "convs.2": {"a": "sample", "b": "replicate"},
            "head": {"a": "channel", "b": "filter"},
        },
    },
}


@pytest.fixture
def processes_of_its_own():
    """Processes keep what they free, and AlexNet in float64 is gigabytes."""
    yield
    replace_processes()


def check(net: str, plan, timeout: float = 150, **options) -> None:
    world = Plan.parse(plan).mesh.num_devices
    for found in run_ranks(run, world, net, plan, options, timeout=timeout):
        assert found.ok, found


def slowly(net: str, plan: str) -> bool:
    """Four ranks on two cores take long: of the networks one suffices for the quick tests, and LeNet's 6 channels and
    10 classes over four ranks."""
    return Plan.parse(plan).mesh.num_devices > 2 and net != "dense" and (net, plan) != ("lenet", "filter=4")


@pytest.mark.parametrize(
    ("net", "plan"),
    [
        pytest.param(net, plan, marks=pytest.mark.slow if slowly(net, plan) else ())
        for net in ("lenet", *SMALL_NETS)
        for plan in (*PLANS, "filter=4")
    ],
)
def test_small_nets_are_exact_under_every_plan(net: str, plan: str) -> None:
    exact_or_refused(net, plan)


def as_on_a_gpu(net: str, plan: str, options: dict[str, Any]) -> Distance:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("batch_norm", "shared_batch_norm"):
            patch.setattr(f"convoy.ops.{module}.at_once", lambda x: True)
        return run(net, plan, options)


@pytest.mark.parametrize(
    ("plan", "microbatches"),
    [
        *itertools.product(("sample=3", "height=2"), (1, 3)),
        ("sample=2,filter=2", 3),
        pytest.param("sample=2,filter=2", 1, marks=pytest.mark.slow),
    ],
)
def test_batch_norm_as_on_a_gpu_is_exact(plan: str, microbatches: int) -> None:
    """With the ReLU that follows in the same operation; the reference is the plain layer."""
    world = Plan.parse(plan).mesh.num_devices
    options = {"batches": (8, 7), "microbatches": microbatches}
    for found in run_ranks(as_on_a_gpu, world, "dense", plan, options, timeout=150):
        assert found.ok, found


def through_gloo(net: str, plan: str, options: dict[str, Any]) -> Distance:
    os.environ["CONVOY_SHARED_MEMORY"] = "0"
    return run(net, plan, options)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["filter=4", "sample=2,filter=2"])
@pytest.mark.parametrize("net", ["lenet", "dense"])
def test_channels_in_uneven_parts_are_exact_between_hosts(net: str, plan: str) -> None:
    """LeNet has 6 channels and 10 classes, the other network layers of 5 channels: no number of ranks divides all."""
    for found in run_ranks(through_gloo, 4, net, plan, {"batches": (64, 33)}, timeout=150):
        assert found.ok, found


@pytest.mark.slow
@pytest.mark.parametrize("net", ["squeezenet1_1", "resnet18"])
def test_larger_nets_are_exact(net: str) -> None:
    exact_or_refused(net, "sample=2,filter=2")


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.usefixtures("processes_of_its_own")
def test_matrix(net: str, plan: str) -> None:
    exact_or_refused(net, plan, timeout=500)


def exact_or_refused(net: str, plan: str, timeout: float = 150) -> None:
    """Refused with the sentence of `REFUSED`, or exact."""
    reason = REFUSED.get((net, plan))
    if reason is not None:
        with pytest.raises(RankFailed, match=reason):
            check(net, plan)
        return
    steps = 3 if net in ("resnet50", "googlenet") else 5
    check(net, plan, timeout, size=SIZES.get((net, plan)), steps=steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "net", ["dense", *(pytest.param(net, marks=pytest.mark.matrix) for net in ("alexnet", "resnet18"))]
)
@pytest.mark.usefixtures("processes_of_its_own")
def test_a_mixed_plan_is_exact(net: str) -> None:
    check(net, MIXED[net], timeout=500)


@pytest.mark.parametrize("plan", ["sample=3", "owt=2"])
def test_ranks_without_samples_join_in(plan: str) -> None:
    check("dense", plan, batches=(2, 1, 5))


@pytest.mark.slow
@pytest.mark.parametrize("net", ["dense", "depthwise", "dropping"])
@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "height=2", "width=2", "sample=2,height=2"])
def test_microbatches_have_statistics_of_their_own(net: str, plan: str) -> None:
    check(net, plan, batches=(8, 7), microbatches=3)


@pytest.mark.parametrize(
    ("sabotage", "net", "plan", "options"),
    [
        ("local_batch_norm", "dense", "sample=2", {}),
        ("local_batch_norm", "dense", "sample=2", {"microbatches": 3}),
        ("unweighted_mean", "dense", "sample=2", {}),
        ("missing_gradient_sum", "dense", "sample=2", {}),
        ("missing_gradient_sum", "dense", "height=2", {}),
        *(
            (f"missing_backward_reduction:{which}", "dense", plan, {})
            for plan, count in (("filter=2", 5), ("height=2", 3))
            for which in range(count)
        ),
        ("missing_backward_reduction:1", "dense", "sample=2,filter=2", {}),
        ("missing_backward_reduction:1", "lenet", "filter=4", {}),
        ("wrong_dropout_key", "dropping", "sample=2", {}),
        ("wrong_dropout_key", "dropping", "filter=2", {}),
        ("wrong_dropout_key", "dropping", "height=2", {"microbatches": 3}),
    ],
)
def test_a_broken_engine_is_noticed(sabotage: str, net: str, plan: str, options: dict[str, int]) -> None:
    world = Plan.parse(plan).mesh.num_devices
    found = run_ranks(run, world, net, plan, {"sabotage": sabotage, "batches": (5, 7)} | options, timeout=150)
    assert not any(distance.ok for distance in found)


def test_zero_but_for_rounding_is_told_from_small_and_right() -> None:
    """What a rank sums in another order, as measured of a VGG's bias before batch norm, and gradients that are real."""
    zero, real, largest = torch.tensor([9.6e-16]), torch.tensor([9.6e-11]), 0.6
    scale = 1e-9 * largest
    assert rounding_of(zero + 1e-16, zero, largest) * scale == pytest.approx(9.6e-16, rel=1e-3), "serial itself is off"
    assert rounding_of(zero * (1 + 1e-15), zero, largest) < 1e-10, "tiny, and no rounding"
    assert rounding_of(real + 1e-16, real, largest) * scale == pytest.approx(1e-16, rel=1e-3), "ill-conditioned"
