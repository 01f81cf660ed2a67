"""Fast axes lie inside hosts, and a plan that could do better is told so."""

import pytest

from convoy.plans.fit import across, note_on_hosts
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan


@pytest.mark.parametrize(
    ("sizes", "per_host", "outside"),
    [
        ((2, 2), 2, ("a",)),
        ((2, 2), 4, ()),
        ((2, 2), 1, ("a", "b")),
        ((2, 4), 4, ("a",)),
        ((4, 2), 4, ("a",)),
        ((2, 4), 2, ("a", "b")),
        ((2, 3), 2, ("a", "b")),
    ],
)
def test_the_last_axis_lies_between_neighbours(sizes: tuple[int, ...], per_host: int, outside: tuple[str, ...]) -> None:
    assert across(Mesh(("a", "b"), sizes), per_host) == outside


@pytest.mark.parametrize(
    ("plan", "per_host", "instead"),
    [
        ("filter=2,sample=2", 2, "sample=2,filter=2"),
        ("height=2,sample=4", 4, "sample=4,height=2"),
        ("sample=2,filter=2", 2, None),
        ("filter=2,sample=2", 4, None),  # one host
        ("filter=2,sample=2", 1, None),  # no order helps
        ("sample=4", 2, None),
        ("filter=4", 2, None),
        ("filter=2,height=2", 2, None),  # one of them must
        ("filter=2,sample=3", 4, None),  # unequal hosts
        ("filter=2,stage=2", 2, "stage=2,filter=2"),
        ("stage=2,filter=2", 2, None),
        ("sample=2,filter=2,stage=2", 2, "stage=2,sample=2,filter=2"),
    ],
)
def test_another_order_is_named_where_it_helps(plan: str, per_host: int, instead: str | None) -> None:
    notes = note_on_hosts(Plan.parse(plan), per_host)
    assert len(notes) == (instead is not None)
    for note in notes:
        assert f"of {plan} (" in note
        assert note.endswith(f"as {instead} it would lie inside them")


@pytest.mark.parametrize(
    ("plan", "per_host", "instead"),
    [
        ("sample=2,stage=2", 2, "stage=2,sample=2"),
        ("sample=4,stage=2", 4, "stage=2,sample=4"),
        ("sample=2,filter=2,stage=2", 4, "stage=2,sample=2,filter=2"),
        ("stage=2,sample=2", 2, None),
        ("sample=2,stage=2", 1, None),  # no order helps
        ("sample=2,stage=2", 4, None),  # one host
        ("stage=4", 2, None),
    ],
)
def test_stages_are_the_axis_to_lie_across_hosts(plan: str, per_host: int, instead: str | None) -> None:
    notes = note_on_hosts(Plan.parse(plan), per_host)
    assert len(notes) == (instead is not None)
    for note in notes:
        assert note.startswith(f"axis sample of {plan} lies across hosts of {per_host}, and gradients are added up")
        assert note.endswith(f"would lie across them as {instead}")


def test_stages_keep_their_layers_in_another_order() -> None:
    plan = Plan.parse({"mesh": {"sample": 2, "stage": 2}, "layers": {"*": {"sample": "sample"}}, "stages": ["layer3"]})
    (note,) = note_on_hosts(plan, 2)
    assert note.endswith("would lie across them as stage=2,sample=2; stages begin at layer3")
