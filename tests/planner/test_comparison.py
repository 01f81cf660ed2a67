"""What was predicted of a plan in the words of what is observed, and the text that puts both side by side."""

from dataclasses import replace

import pytest

from convoy.planner.comparison import (
    GRADIENTS,
    Both,
    Comparison,
    comparison_text,
    groups_beside,
    headline,
    parts_beside,
)
from convoy.plans.timeline import PARTS, LayerSeconds, Summary
from planner.test_verdict import costs, explain, with_delay


def seen(factor: float = 1.0) -> Summary:
    layers = {"features.0": LayerSeconds(3e-3 * factor), "classifier.4": LayerSeconds(1e-3 * factor, 2e-3 * factor)}
    return Summary({part: 1e-3 * factor for part in PARTS if part != "stages"}, layers, 4e-3 * factor)


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "stage=2"])
def test_a_prediction_has_the_parts_of_its_update(plan: str) -> None:
    scored = explain(plan, costs(with_delay, gbytes=0.1)).scored
    found = scored.timeline.summary()
    assert sum(found.parts.values()) == pytest.approx(scored.seconds)
    waits = sum(layer.waits for layer in found.layers.values()) + found.gradients
    assert waits == pytest.approx(found.parts["waiting"])
    assert ("stages" in found.parts) == (plan == "stage=2")
    computes = sum(layer.computes for layer in found.layers.values())
    assert computes == pytest.approx(sum(found.parts[part] for part in ("forward", "backward", "packing")))


def test_groups_lose_nothing_of_their_layers() -> None:
    scored = explain("filter=2", costs(with_delay, gbytes=0.1)).scored
    found, after = scored.timeline.summary(), seen()
    groups = groups_beside(scored.placement, found, after)
    assert [group.name for group in groups][-1] == GRADIENTS
    total = sum(group.computes.predicted_s or 0.0 for group in groups)
    assert total == pytest.approx(sum(layer.computes for layer in found.layers.values()))
    assert groups[0].computes.measured_s == pytest.approx(3e-3)
    assert groups[-1].waits == Both(found.gradients, 4e-3)
    assert groups_beside(scored.placement, found, None) == ()
    assert groups_beside(scored.placement, None, after)[0].computes.predicted_s is None


def test_the_middle_is_that_of_every_number() -> None:
    found = Summary.median([seen(1), seen(50), seen(2)])
    assert found.parts["forward"] == pytest.approx(2e-3)
    assert found.layers["classifier.4"].waits == pytest.approx(4e-3)
    assert found.gradients == pytest.approx(8e-3)


def comparison() -> Comparison:
    scored = explain("filter=2", costs(with_delay, gbytes=0.1)).scored
    before, after = scored.timeline.summary(), seen()
    return Comparison(
        model="lenet",
        plan="filter=2",
        devices=2,
        batch=32,
        rank=0,
        timed=9,
        watched=2,
        learned=5,
        update=Both(12e-3, 10e-3),
        parts=parts_beside(before, after),
        groups=groups_beside(scored.placement, before, after),
        notes=("as said",),
    )


def test_text() -> None:
    text = comparison_text(comparison())
    assert text.startswith("an update took 10.0 ms, the median of 9; 12.0 ms were predicted (+20 %)")
    for words in ("exposed communication", "classifier.4", GRADIENTS, "waits: predicted", "as said"):
        assert words in text
    assert "each part the median of 2 other updates; they add up to 7.00 ms" in text
    assert comparison().error == pytest.approx(0.2)


def test_text_of_what_was_only_measured() -> None:
    found = comparison()
    alone = replace(
        found,
        update=Both(None, 10e-3),
        parts=parts_beside(None, seen()),
        groups=tuple(replace(g, computes=Both(None, 1.0), waits=Both(None, 0.0)) for g in found.groups),
    )
    assert headline(alone) == "an update took 10.0 ms, the median of 9"
    assert "predicted" not in comparison_text(alone)
    assert comparison_text(replace(alone, watched=0, update=Both(None, None))) == "as said"
