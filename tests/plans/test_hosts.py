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
    ],
)
def test_another_order_is_named_where_it_helps(plan: str, per_host: int, instead: str | None) -> None:
    notes = note_on_hosts(Plan.parse(plan), per_host)
    assert len(notes) == (instead is not None)
    for note in notes:
        assert f"of {plan} (" in note
        assert note.endswith(f"as {instead} it would lie inside them")
