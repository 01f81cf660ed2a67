"""Training under a plan is training on one device: networks, plans and features, in float64 on real processes."""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exactness import Distance, build, distance, rounding_of
from odd_nets import BIASED, CALLS, COUPLINGS, GIVEN, OVERWRITING, STAGED, UNSEEN

from convoy.engine.program import overwriting
from convoy.ops.memory import Readers
from convoy.planner import workload_of
from convoy.plans.plan import Plan
from convoy.plans.traffic import transfer_traffic
from ranks import RankFailed, replace_processes, run_ranks
from small_nets import SMALL_NETS

SMALL = ("lenet", *SMALL_NETS)
PLANS = ["sample=2", "sample=3", "filter=2", "filter=3", "channel=2", "height=2", "height=3", "width=2"]
PLANS += ["sample=2,filter=2", "sample=2,height=2", "owt=2"]
LARGE = ["alexnet", "alexnet-2012", "squeezenet1_1", "vgg11_bn", "googlenet", "resnet18", "resnet50"]
REFUSED = {
    ("lenet", "channel=2"): "layer 'features.0' has only 1 input channel",
    ("alexnet-2012", "filter=3"): "in 2 groups, which cannot be divided over the 3 ranks",
}
SIZES = {(net, plan): 64 for net in ("resnet18", "resnet50") for plan in ("height=2", "width=2", "sample=2,height=2")}
SIZES |= {(net, "height=3"): 96 for net in ("resnet18", "resnet50", "googlenet", "squeezenet1_1", "vgg11_bn")}
MIXED: dict[str, dict[str, Any]] = {
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
STAGES_AT = {"two heads": "last", "complex": "last", "nine dimensions": "last"}
"""Where the second of two stages begins."""

SPARSE, PARTS = {"batches": (2, 1, 5)}, {"batches": (8, 7), "microbatches": 3}
"""Ranks without samples, and statistics of microbatches."""
ODD = {"steps": 3, "batches": (5, 4)}
TURNS = ODD | {"turns": True}
Case = tuple[str, dict[str, Any]]
CASES: dict[str, list[Case]] = {
    "serial": [(kind, ODD) for kind in (*GIVEN, "dropping", "two heads", "unseen part")],
    "sample=2": [
        *((net, {}) for net in ("dense", "dropping")),
        ("dense", PARTS),
        *((f"calls {kind}", ODD) for kind in (*CALLS, *BIASED)),
        *((net, TURNS) for net in ("permuted", "unseen choice", "training heads")),
    ],
    "sample=2 and coupled samples": [
        *((f"coupled by {kind}", ODD) for kind in COUPLINGS),
        *((f"unseen {kind}", ODD) for kind in UNSEEN),
        *((f"{net}, gives {gives}", ODD) for net in ("coupled", "unseen") for gives in ("scalar", "vector")),
    ],
    "sample=2 and networks as people have them": [(kind, ODD) for kind in (*GIVEN, *OVERWRITING)],
    "sample=3": [("shuffle", {}), ("depthwise", SPARSE), ("dense", SPARSE), ("calls a bias", SPARSE)],
    "filter=2": [
        *((net, {}) for net in SMALL),
        *((f"calls {kind}", ODD) for kind in (*CALLS, *BIASED)),
        *((kind, ODD) for kind in ("weight", "spectral beside weight", "instance norm that tracks", "by hand")),
        *((kind, ODD) for kind in ("relu of joined", "read twice", "relu of a view", "unseen part", "unseen choice")),
        *((net, TURNS) for net in ("dense", "training heads", "shuffle")),
    ],
    "filter=3": [("dense", {}), ("lenet", {}), ("shuffle", {})],
    "filter=4": [("lenet", {})],
    "channel=2": [(net, {}) for net in SMALL[1:]] + [(kind, ODD) for kind in ("relu of sum", "relu of relu")],
    "height=2": [
        *((net, {}) for net in SMALL),
        ("dropping", PARTS),
        *((f"calls {kind}", ODD) for kind in ("attention", "a bias", "cumsum", "patches", "normalize")),
        *((kind, ODD) for kind in ("traced by fx", "spectral, asking", "sum with a vector", "relu of the images")),
    ],
    "height=3": [("dense", {}), ("depthwise", {})],
    "width=2": [("dense", {}), ("depthwise", PARTS)],
    "sample=2,filter=2": [("dense", {}), ("coupled, gives scalar", ODD), ("unseen, gives vector", ODD)],
    "sample=2,height=2": [("dropping", PARTS)],
    "owt=2": [("lenet", {}), ("squeeze-excite", {}), ("dense", SPARSE), ("unseen mean", ODD)],
    "stage=2": [
        *((net, {}) for net in SMALL),
        ("dense", PARTS),
        *((kind, ODD) for kind in (*STAGED, "gives weight", *STAGES_AT)),
    ],
    "stage=2,sample=2": [("dropping", PARTS), ("dense", SPARSE)],
    "stage=2,filter=2": [("dense", {})],
    "sample=2,stage=2": [("dense", {})],
    "stage=3": [("dense", {})],
}


def plan_of(title: str, net: str) -> Any:
    plan = title.partition(" ")[0]
    return {"mesh": {"stage": 2}, "stages": [STAGES_AT[net]]} if plan == "stage=2" and net in STAGES_AT else plan


def distances(title: str) -> list[Distance]:
    found = []
    for net, options in CASES[title]:
        try:
            found.append(distance(net, plan_of(title, net), **options))
        except BaseException as error:
            error.add_note(f"{net}, {options}")
            raise
    return found


@pytest.mark.parametrize("title", CASES)
def test_training_under_a_plan_is_that_of_one_device(title: str) -> None:
    world = Plan.parse(title.partition(" ")[0]).mesh.num_devices
    for rank in run_ranks(distances, world, title, timeout=150):
        cases = list(zip(CASES[title], rank, strict=True))
        assert not {str(case): found for case, found in cases if not found.ok}
        for (net, _), found in cases:
            is_whole = net.startswith(("unseen", "spectral"))
            is_seen = not found.captured.startswith("whole on every rank")
            assert title == "serial" or is_seen != is_whole, (net, found.captured)


def run(net: str, plan: Any, options: dict[str, Any]) -> Distance:
    return distance(net, plan, **options)


def check(net: str, plan: Any, timeout: float = 150, **options: Any) -> None:
    for found in run_ranks(run, Plan.parse(plan).mesh.num_devices, net, plan, options, timeout=timeout):
        assert found.ok, found


def test_a_plan_that_mixes_all_strategies_is_exact() -> None:
    check("dense", MIXED["dense"])


def as_on_a_gpu(net: str, plan: str, options: dict[str, Any]) -> Distance:
    always = {"new": lambda x: True}
    with patch("convoy.ops.batch_norm.at_once", **always), patch("convoy.ops.shared_batch_norm.at_once", **always):
        return run(net, plan, options)


@pytest.mark.parametrize(("plan", "microbatches"), [("sample=3", 3), ("height=2", 1), ("sample=2,filter=2", 3)])
def test_batch_norm_as_on_a_gpu_is_exact(plan: str, microbatches: int) -> None:
    """With the ReLU that follows in the same operation; the reference is the plain layer."""
    options = {"batches": (8, 7), "microbatches": microbatches}
    for found in run_ranks(as_on_a_gpu, Plan.parse(plan).mesh.num_devices, "dense", plan, options, timeout=150):
        assert found.ok, found


def through_gloo(net: str, plan: str, options: dict[str, Any]) -> Distance:
    os.environ["CONVOY_SHARED_MEMORY"] = "0"
    return run(net, plan, options)


def test_channels_in_uneven_parts_are_exact_between_hosts() -> None:
    """Layers of 5 and 6 channels over four ranks, without the memory that ranks of a host share."""
    for found in run_ranks(through_gloo, 4, "dense", "filter=4", {"batches": (64, 33), "steps": 2}, timeout=150):
        assert found.ok, found


SABOTAGED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("local_batch_norm", "dense", "sample=2", {}),
    ("local_batch_norm", "dense", "sample=2", {"microbatches": 3}),
    ("unweighted_mean", "dense", "sample=2", {}),
    ("missing_gradient_sum", "dense", "sample=2", {}),
    ("missing_gradient_sum", "dense", "height=2", {}),
    *((f"missing_backward_reduction:{which}", "dense", "filter=2", {}) for which in range(5)),
    *((f"missing_backward_reduction:{which}", "dense", "height=2", {}) for which in range(3)),
    ("wrong_dropout_key", "dropping", "sample=2", {}),
    ("wrong_dropout_key", "dropping", "filter=2", {}),
    ("wrong_dropout_key", "dropping", "height=2", {"microbatches": 3}),
    ("careless_overwriting", "read twice", "sample=2", {}),
]


def noticed() -> list[bool]:
    """Whether each sabotage shows in the numbers, or in images that are overwritten."""
    found = []
    for sabotage, net, plan, options in SABOTAGED:
        careless = sabotage == "careless_overwriting"
        with patch.object(Readers, "is_spare", (lambda *_: True) if careless else Readers.is_spare):
            options = {"batches": (5, 7), "steps": 2, "sabotage": None if careless else sabotage} | options
            try:
                found.append(not distance(net, plan, **options).ok)
            except (AssertionError, RuntimeError):  # of autograd, where a value that it needs is overwritten
                found.append(careless)
    return found


def test_every_sabotage_is_noticed_on_every_rank() -> None:
    for found in run_ranks(noticed, 2, timeout=150):
        assert [case for case, seen in zip(SABOTAGED, found, strict=True) if not seen] == []


def test_samples_that_a_rank_would_couple_by_itself_are_noticed() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64)
    for kind, couple in [*COUPLINGS.items(), *((k, c) for k, c in UNSEEN.items() if k != "choice")]:
        assert (torch.cat([couple(x[:3]), couple(x[3:])]) - couple(x)).abs().max() > 1e-3, kind


def test_zero_but_for_rounding_is_told_from_small_and_right() -> None:
    """What a rank sums in another order, as measured of a VGG's bias before batch norm, and gradients that are real."""
    zero, real, largest = torch.tensor([9.6e-16]), torch.tensor([9.6e-11]), 0.6
    scale = 1e-9 * largest
    assert rounding_of(zero + 1e-16, zero, largest) * scale == pytest.approx(9.6e-16, rel=1e-3), "serial itself is off"
    assert rounding_of(zero * (1 + 1e-15), zero, largest) < 1e-10, "tiny, and no rounding"
    assert rounding_of(real + 1e-16, real, largest) * scale == pytest.approx(1e-16, rel=1e-3), "ill-conditioned"


def placement_of(net: str, plan: str) -> Any:
    model, shape = build(net)
    return workload_of(model, torch.zeros(4, *shape, dtype=torch.float64), 4).place(Plan.parse(plan))


ALONG_CHANNELS = {"flip", "cumsum", "roll", "sort", "topk", "std", "repeat", "windows", "attention", *BIASED}


@pytest.mark.parametrize("plan", ["sample=2", "filter=2"])
def test_a_call_without_a_rule_moves_nothing_along_dimensions_that_it_does_not_mix(plan: str) -> None:
    for kind in (*CALLS, *BIASED):
        placement = placement_of(f"calls {kind}", plan)
        opaque = {call.name for call in placement.graph.calls if call.op == "opaque"}
        assert opaque, kind
        sent = [each for each in transfer_traffic(placement) if each.call in opaque]
        is_silent = not sum(rank.forward for each in sent for rank in each.ranks)
        assert is_silent == (plan == "sample=2" or kind in ALONG_CHANNELS), kind


def test_calls_overwrite_what_nobody_else_reads_and_only_that() -> None:
    for kind, (_, number) in OVERWRITING.items():
        placement = placement_of(kind, "serial")
        readers = Readers(placement.graph, placement.outputs)
        assert sum(overwriting(placed, readers) is not None for placed in placement.calls) == number, kind


@pytest.fixture
def processes_of_its_own():
    """Processes keep what they free, and AlexNet in float64 is gigabytes."""
    yield
    replace_processes()


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", [*PLANS, "stage=2"])
@pytest.mark.parametrize("net", [*SMALL, *LARGE])
@pytest.mark.usefixtures("processes_of_its_own")
def test_every_network_is_exact_under_every_plan(net: str, plan: str) -> None:
    reason = REFUSED.get((net, plan))
    steps = 3 if net in ("resnet50", "googlenet") else 5
    if reason is None:
        check(net, plan, 500, size=SIZES.get((net, plan)), steps=steps)
    else:
        with pytest.raises(RankFailed, match=reason):
            check(net, plan)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", ["sample=2,filter=2", "stage=2", "mixed"])
@pytest.mark.usefixtures("processes_of_its_own")
def test_a_larger_network_is_exact(plan: str) -> None:
    check("resnet18", MIXED["resnet18"] if plan == "mixed" else plan, timeout=500)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("processes_of_its_own")
def test_a_mixed_plan_of_alexnet_is_exact() -> None:
    check("alexnet", MIXED["alexnet"], timeout=500)
