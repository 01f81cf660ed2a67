"""Strategies that a person has given."""

import pytest

from convoy.errors import ConvoyError
from convoy.planner.search import search
from convoy.plans.mesh import Mesh
from planner.search.nets import Chain, Residual, captured
from planner.search.synthetic import Roofline, brute_force

COSTS = Roofline(flops=1e9, rate=3e8, latency=1e-5)
ONE = Mesh(("gpu",), (2,))


def _strategies(plan, *layers):
    return [plan.strategy(layer, "conv") for layer in layers]


def test_fixed_layers_keep_their_strategy_and_the_others_are_chosen_for_it():
    graph = captured(Residual())
    found = search(graph, 2, COSTS, on=[ONE], fixes=["block*=height"], top=1, tolerance=0.0)
    for candidate in found.candidates:
        assert _strategies(candidate.plan, "block1.0", "block2.0") == [("height",), ("height",)]
    free = [(s,) for s in ("sample", "filter", "channel", "height", "width", "replicate")]
    domains = {"stem": free, "block1.0": [("height",)], "block2.0": [("height",)], "project": free}
    assert found.best.seconds == pytest.approx(min(brute_force(graph, ONE, COSTS, domains).values()), rel=1e-12)


def test_the_first_fix_that_matches_counts():
    found = search(captured(Residual()), 2, COSTS, fixes=["block1.*=filter", "*=sample"])
    assert _strategies(found.best.plan, "block1.0", "stem") == [("filter",), ("sample",)]


def test_one_strategy_for_each_axis():
    found = search(captured(Chain()), 4, COSTS, fixes=["fc=sample,filter"])
    assert found.best.plan.strategy("fc", "linear") == ("sample", "filter")


def test_owt():
    found = search(captured(Chain()), 2, COSTS, fixes=["*=owt"])
    assert found.best.plan.strategy("fc", "linear") == ("filter",)
    assert found.best.plan.strategy("features.0", "conv") == ("sample",)


@pytest.mark.parametrize(
    ("fix", "sentence"),
    [
        ("feature.*=filter", "matches no layer of this network: did you mean features.*"),
        ("features=filter", r"did you mean features\.\*"),
        ("fc=model", "model is no strategy: did you mean filter"),
        ("fc", "fixes nothing: write a pattern and a strategy"),
        ("fc=sample,filter,height", "no mesh that was searched has as many axes"),
        ("features.2=height,height,height,height", "no mesh that was searched has as many axes"),
    ],
)
def test_refused(fix, sentence):
    with pytest.raises(ConvoyError, match=sentence):
        search(captured(Chain()), 4, COSTS, fixes=[fix])


def test_what_cannot_be_is_refused_with_the_sentence_of_the_rule():
    with pytest.raises(ConvoyError, match=r"features\.0.* has only 3 input channels for the 4 ranks"):
        search(captured(Chain()), 4, COSTS, on=[Mesh(("gpu",), (4,))], fixes=["features.0=channel"])
