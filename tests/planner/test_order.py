"""The plan that is chosen: measured to be fastest, and no other is predicted to be faster without having raced."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.planner import Planned, workload_of
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.memory import RankMemory
from convoy.planner.cost.prediction import Scored
from convoy.planner.cost.simulation import simulate
from convoy.planner.measured import Measurements
from convoy.planner.planner import _raced
from convoy.plans.plan import Plan
from convoy.plans.timeline import Task
from small_nets import SMALL_NETS

WORKLOAD = workload_of(SMALL_NETS["depthwise"](), torch.zeros(8, 3, 16, 16), 8)
PREDICTED = {"filter=2": 0.8, "height=2": 0.9, "width=2": 0.95, "sample=2": 1.0, "replicate=2": 1.5}


def scored(text: str, seconds: float, memory: int) -> Scored:
    plan = Plan.parse(text)
    timeline = simulate([Task(0, "compute", "forward", "", "", seconds)])
    return Scored(plan, WORKLOAD.place(plan), timeline, RankMemory(memory, 0, 0, 0, 0, 0))


def raced(
    measured: Mapping[str, float], memory: Mapping[str, int] = {}, late: bool = False, rivals: Sequence[Plan] = ()
) -> tuple[list[str], list[str], list[str]]:
    """Plans in their order after a race, those that raced, and the notes."""
    asked: list[str] = []
    candidates = tuple(scored(text, seconds, memory.get(text, 0)) for text, seconds in PREDICTED.items())
    planned = Planned(WORKLOAD, 2, candidates, candidates[-1], None, Costs(Calibrated({})))

    def race(planned: Planned, racer: Scored, ranks: Ranks) -> float:
        asked.append(str(racer.plan))
        if str(racer.plan) not in measured:
            raise ConvoyError("it cannot be")
        return measured[str(racer.plan)]

    measurements = Measurements(WORKLOAD, Ranks(), room=1000)
    found = _raced(planned, rivals, Ranks(), race, measurements, lambda what: None, lambda seconds: not late)
    return [str(one.plan) for one in found.candidates], asked, list(found.notes)


def test_the_fastest_that_was_measured_is_chosen_and_sample_is_among_them() -> None:
    order, asked, notes = raced({"filter=2": 0.8, "height=2": 0.7, "sample=2": 1.0})
    assert order[:3] == ["height=2", "filter=2", "sample=2"]
    assert asked == ["filter=2", "height=2", "sample=2"] and notes == []


def test_what_is_predicted_to_be_faster_than_the_winner_races_too() -> None:
    order, asked, _ = raced({"filter=2": 3.0, "height=2": 3.0, "width=2": 3.0, "sample=2": 1.0})
    assert asked == ["filter=2", "height=2", "sample=2", "width=2"]
    assert order[0] == "sample=2"
    assert "replicate=2" not in asked  # predicted to be slower
    order, asked, _ = raced(dict.fromkeys(PREDICTED, 2.0) | {"replicate=2": 1.0}, rivals=[Plan.parse("replicate=2")])
    assert order[0] == "replicate=2"


def test_who_lacks_memory_or_fails_or_comes_too_late_is_told() -> None:
    order, asked, notes = raced({"filter=2": 0.1, "sample=2": 1.0}, {"filter=2": 900})
    assert "filter=2" not in asked and order[0] == "sample=2"
    assert "filter=2 did not race: 900 B on each device leave too little memory" in notes
    assert "height=2 left the race: it cannot be" in notes
    _, asked, notes = raced({"filter=2": 3.0, "height=2": 3.0, "sample=2": 1.0}, late=True)
    assert asked == ["filter=2", "height=2"] and "sample=2 did not race: there was no more time" in notes


def test_where_none_can_be_run_it_says_why() -> None:
    with pytest.raises(ConvoyError, match="it cannot be"):
        raced({})
