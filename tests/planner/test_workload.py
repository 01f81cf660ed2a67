"""What is planned is what is trained; the plan that races and wins; links of GPUs; predictions beside measurements."""

from collections.abc import Mapping

import pytest
import torch

from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.prediction import RankMemory, Scored
from convoy.planner.cost.simulation import simulate
from convoy.planner.measured import Measurements
from convoy.planner.planner import Planned, _raced
from convoy.planner.workload import workload_of
from convoy.plans.plan import Plan
from convoy.plans.timeline import Task
from small_nets import SMALL_NETS

IMAGES = torch.zeros(2, 3, 16, 16)
WORKLOAD = workload_of(SMALL_NETS["depthwise"](), IMAGES, 8)


PREDICTED = {"width=2": 0.7, "filter=2": 0.8, "height=2": 0.95, "sample=2": 1.0, "replicate=2": 1.5}


def raced(measured: Mapping[str, float], late: bool = False, rival: str = "") -> tuple[list[str], list[str]]:
    """Plans in their order after a race, then those that raced, and the notes; `width` needs more memory than there
    is, and what has no time cannot be run."""
    racers: list[str] = []

    def scored(text: str) -> Scored:
        timeline = simulate([Task(0, "compute", "forward", "", "", PREDICTED[text])])
        kept = RankMemory(1100 if text == "width=2" else 0, 0, 0, 0, 0, 0)
        return Scored(Plan.parse(text), WORKLOAD.place(Plan.parse(text)), timeline, kept)

    def race(planned: Planned, racer: Scored, ranks: Ranks) -> float:
        racers.append(str(racer.plan))
        if str(racer.plan) not in measured:
            raise ConvoyError("it cannot be")
        return measured[str(racer.plan)]

    candidates = tuple(map(scored, PREDICTED))
    planned = Planned(WORKLOAD, 2, candidates, candidates[-1], None, Costs(Calibrated({})))
    rivals = [Plan.parse(rival)] if rival else []
    measurements = Measurements(WORKLOAD, Ranks(), room=1000)
    result = _raced(planned, rivals, Ranks(), race, measurements, lambda seconds: not late)
    return [str(one.plan) for one in result.candidates], [*racers, *result.notes]


@pytest.mark.slow
def test_the_fastest_that_was_measured_is_chosen_and_none_is_predicted_faster_without_having_raced() -> None:
    order, course = raced({"width=2": 0.8, "filter=2": 0.9, "sample=2": 1.0})
    assert order[0] == "filter=2" and course == [
        *("filter=2", "sample=2", "width=2 did not race: 1.1 kB on each device leave too little memory"),
    ]
    order, course = raced(dict.fromkeys(PREDICTED, 3.0) | {"sample=2": 1.0})
    assert order[0] == "sample=2" and course[:3] == ["filter=2", "sample=2", "height=2"]  # predicted to take 0.95
    slow = dict.fromkeys(PREDICTED, 2.0) | {"replicate=2": 1.0}
    assert raced(slow, rival="replicate=2")[0][0] == "replicate=2"
    assert "replicate=2 did not race: there was no more time" in raced(slow, late=True, rival="replicate=2")[1]
    assert "filter=2 left the race: it cannot be" in raced({"sample=2": 1.0})[1]
    assert "updates took 3.4 times as long as predicted" in raced(dict.fromkeys(PREDICTED, 3.0))[1][-1]
    with pytest.raises(ConvoyError, match="it cannot be"):
        raced({})
