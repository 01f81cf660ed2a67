"""What is planned is what is trained; the plan that races and wins; links of GPUs; predictions beside measurements."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convoy.comm import collectives
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.models import create
from convoy.planner import Planned, link_probe, workload_of
from convoy.planner.comparison import (
    GRADIENTS,
    MOST,
    Both,
    Comparison,
    comparison_text,
    groups_beside,
    headline,
    layer_groups,
    parts_beside,
)
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.prediction import RankMemory, Scored
from convoy.planner.cost.simulation import simulate
from convoy.planner.link_probe import _Probe
from convoy.planner.measured import Measurements
from convoy.planner.planner import _raced
from convoy.plans.plan import Plan
from convoy.plans.timeline import PARTS, LayerSeconds, Summary, Task
from gpu_clock import FakeGpu
from planner.test_verdict import costs, explain, with_delay
from plans.made_graph import Does
from small_nets import SMALL_NETS

IMAGES = torch.zeros(2, 3, 16, 16)
WORKLOAD = workload_of(SMALL_NETS["depthwise"](), IMAGES, 8)


def test_a_pass_has_its_part_of_the_batch_in_whole_microbatches_and_the_network_is_left_alone() -> None:
    model = SMALL_NETS["depthwise"]().eval()
    before = copy.deepcopy(model.state_dict())
    result = workload_of(model, IMAGES, 64, passes=4)
    assert not model.training and all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert (result.samples, result.parts(3)) == (16, (range(6), range(6, 11), range(11, 16)))
    whole = workload_of(model, IMAGES, 20, microbatch=8)
    assert (whole.sizes, whole.parts(2)) == ((8, 8, 4), (range(16), range(16, 20)))
    branching = Does(lambda x: x * 2 if x.sum() > 0 else x)
    for words, call in {
        "4 ranks cannot share 3 microbatches": lambda: whole.parts(4),
        "must be at least 1": lambda: workload_of(model, IMAGES, 0),
        "needs the network as one graph, but .*: write a plan yourself": lambda: workload_of(branching, IMAGES, 8),
    }.items():
        with pytest.raises(ConvoyError, match=words):
            call()


PREDICTED = {"filter=2": 0.8, "height=2": 0.9, "width=2": 0.95, "sample=2": 1.0, "replicate=2": 1.5}


def raced(
    measured: Mapping[str, float], memory: Mapping[str, int] = {}, late: bool = False, rivals: Sequence[Plan] = ()
) -> tuple[list[str], list[str], list[str]]:
    """Plans in their order after a race, those that raced, and the notes."""
    racers: list[str] = []

    def scored(text: str) -> Scored:
        timeline = simulate([Task(0, "compute", "forward", "", "", PREDICTED[text])])
        kept = RankMemory(memory.get(text, 0), 0, 0, 0, 0, 0)
        return Scored(Plan.parse(text), WORKLOAD.place(Plan.parse(text)), timeline, kept)

    def race(planned: Planned, racer: Scored, ranks: Ranks) -> float:
        racers.append(str(racer.plan))
        if str(racer.plan) not in measured:
            raise ConvoyError("it cannot be")
        return measured[str(racer.plan)]

    candidates = tuple(map(scored, PREDICTED))
    planned = Planned(WORKLOAD, 2, candidates, candidates[-1], None, Costs(Calibrated({})))
    measurements = Measurements(WORKLOAD, Ranks(), room=1000)
    result = _raced(planned, rivals, Ranks(), race, measurements, lambda what: None, lambda seconds: not late)
    return [str(one.plan) for one in result.candidates], racers, list(result.notes)


def test_the_fastest_that_was_measured_is_chosen_and_none_is_predicted_faster_without_having_raced() -> None:
    order, racers, notes = raced({"filter=2": 0.8, "height=2": 0.7, "sample=2": 1.0})
    assert order[:3] == ["height=2", "filter=2", "sample=2"]
    assert racers == ["filter=2", "height=2", "sample=2"] and notes == []
    order, racers, _ = raced({"filter=2": 3.0, "height=2": 3.0, "width=2": 3.0, "sample=2": 1.0})
    assert racers == ["filter=2", "height=2", "sample=2", "width=2"] and order[0] == "sample=2"
    slow = dict.fromkeys(PREDICTED, 2.0) | {"replicate=2": 1.0}
    assert raced(slow, rivals=[Plan.parse("replicate=2")])[0][0] == "replicate=2"
    order, racers, notes = raced({"filter=2": 0.1, "sample=2": 1.0}, {"filter=2": 1100})
    assert "filter=2" not in racers and order[0] == "sample=2"
    assert "filter=2 did not race: 1.1 kB on each device leave too little memory" in notes
    assert "height=2 left the race: it cannot be" in notes
    assert "sample=2 did not race: there was no more time" in raced(slow, late=True)[2]
    with pytest.raises(ConvoyError, match="it cannot be"):
        raced({})


def test_collectives_of_gpus_are_timed_by_events_and_slow_kernels_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated GPU; another rank that has begun before this one and waited for it takes no longer."""
    gpu, cpu = FakeGpu(), torch.device("cpu")
    gpu.install(monkeypatch)
    message_s, kernel_s, until, sent = 4e-3, 1e-3, [0.0], []
    probe = _Probe(None, None, cpu, gpu.clock)
    assert probe._time(lambda x: gpu.launch(30e-6, 300e-6), 8) == pytest.approx(300e-6)
    assert probe._issuing == [pytest.approx(30e-6)]

    def start(x: torch.Tensor, group: object) -> Any:
        sent.append(1)
        until[0] = max(until[0], gpu.host) + message_s
        return SimpleNamespace(wait=lambda: None)

    def product(beside: float) -> Any:
        def run(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
            gpu.launch(1e-6, kernel_s * (beside if max(gpu.free, gpu.host) < until[0] else 1.0))

        return run

    monkeypatch.setattr(collectives, "start_all_reduce", start)
    monkeypatch.setattr(link_probe, "_SIDE", 4)
    for beside, result in ((1.25, 1.25), (0.98, 1.0)):
        monkeypatch.setattr(torch, "mm", product(beside))
        assert _Probe(None, None, cpu, gpu.clock)._slowdown(message_s, 64) == pytest.approx(result, rel=1e-3)
    sent.clear()  # all ranks send as many, though one is slower: otherwise the others would wait for ever
    monkeypatch.setattr(link_probe, "gather_ints", lambda numbers, group: [list(numbers), [99 for _ in numbers]])
    _Probe(None, None, cpu, gpu.clock)._slowdown(message_s, 64)
    assert len(sent) == 99


def test_layers_are_grouped_so_that_there_are_few_and_none_is_lost() -> None:
    def groups(name: str, size: int, channels: int = 3, most: int = MOST) -> dict[str, str]:
        workload = workload_of(create(name), torch.empty(1, channels, size, size), 2)
        return layer_groups(workload.place(Plan.parse("serial")), most)

    result = groups("lenet", 28, 1)
    assert set(result.values()) == {"features.0", "features.3", "classifier.0", "classifier.2", "classifier.4"}
    assert result["features.1"] == "features.0"
    blocks = {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}
    assert set(groups("resnet18", 64, most=8).values()) == blocks


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    layers = {"features.0": LayerSeconds(3e-3), "classifier.4": LayerSeconds(1e-3, 2e-3)}
    after = Summary({part: 1e-3 for part in PARTS if part != "stages"}, layers, 4e-3)
    scored = explain("filter=2", costs(with_delay, gbytes=0.1)).scored
    before = scored.timeline.summary()
    assert sum(before.parts.values()) == pytest.approx(scored.seconds)
    groups = groups_beside(scored.placement, before, after)
    total = sum(group.computes.predicted_s or 0.0 for group in groups)
    assert total == pytest.approx(sum(layer.computes for layer in before.layers.values()))
    assert groups[0].computes.measured_s == pytest.approx(3e-3)
    assert (groups[-1].name, groups[-1].waits) == (GRADIENTS, Both(before.gradients, 4e-3))
    update, parts = Both(12e-3, 10e-3), parts_beside(before, after)
    one = Comparison(timed=9, watched=2, update=update, parts=parts, groups=groups, notes=("as said",))
    text = comparison_text(one)
    assert text.startswith("an update took 10.0 ms, the median of 9; 12.0 ms were predicted (+20 %)")
    for words in ("exposed communication", "classifier.4", GRADIENTS, "waits: predicted", "as said"):
        assert words in text
    assert "each part the median of 2 other updates; they add up to 7.00 ms" in text and one.error == pytest.approx(0.2)
    measured = replace(one, update=Both(None, 10e-3), parts=parts_beside(None, after), groups=())
    assert headline(measured) == "an update took 10.0 ms, the median of 9"
    assert "predicted" not in comparison_text(measured)
