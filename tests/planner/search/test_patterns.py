"""Plans with as few patterns as can be give every layer what it was given."""

import random

import pytest

from convoy.planner.search.layers import compact
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan

ONE = Mesh(("gpu",), (4,))
TWO = Mesh(("node", "gpu"), (2, 2))


def test_one_strategy_is_one_line():
    assert str(compact(ONE, {"a": ("sample",), "b.c": ("sample",)})) == "sample=4"
    assert str(compact(TWO, {"": ("sample", "filter"), "b": ("sample", "filter")})) == "sample=2,filter=2"
    assert str(compact(TWO, {"a": ("filter", "filter")})) == "filter=2,filter=2"
    assert str(compact(Mesh((), ()), {"a": ()})) == "serial"


def test_modules_that_agree_share_a_pattern():
    layers = {f"features.{i}": ("sample",) for i in range(9)} | {f"classifier.{i}": ("filter",) for i in range(3)}
    plan = compact(ONE, layers)
    assert [pattern for pattern, _ in plan.layers] == ["classifier.*", "*"]
    layers["features.4"] = ("height",)
    assert [pattern for pattern, _ in compact(ONE, layers).layers] == ["features.4", "classifier.*", "*"]


def test_a_layer_that_holds_layers_and_the_network_itself():
    layers = {"": ("filter",), "block": ("sample",), "block.a": ("height",), "block.b": ("height",), "fc": ("filter",)}
    plan = compact(ONE, layers)
    assert all(plan.strategy(layer, "conv") == strategy for layer, strategy in layers.items())
    assert len(plan.layers) == 3


@pytest.mark.parametrize("seed", range(20))
def test_any_plan_goes_through_yaml(seed):
    rng = random.Random(seed)
    names = {".".join(str(rng.randrange(3)) for _ in range(rng.randint(1, 4))) for _ in range(30)}
    layers = {name: (rng.choice(("sample", "filter")), rng.choice(("filter", "replicate"))) for name in sorted(names)}
    plan = Plan.parse(compact(TWO, layers).to_yaml())
    assert {name: plan.strategy(name, "conv") for name in layers} == layers
    assert len(plan.layers) <= len(layers)
