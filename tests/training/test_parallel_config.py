"""The `parallel` section of a recipe on another number of devices."""

import pytest

from convoy.plans.plan import Plan
from convoy.training.parallel_config import ParallelConfig, fitted


def test_shares_for_other_devices_are_dropped_with_a_note() -> None:
    section, notes = ParallelConfig(devices=3, shares=(3, 3, 2.5)), []
    assert fitted(section, 2, False, False, notes).shares is None
    assert notes == ["the shares 3,3,2.5 are for 3 parts of the batch, not 2: they are left out"]
    assert fitted(section, 3, False, False, notes).shares == fitted(section, 2, False, True, notes).shares
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("plan", "shares", "devices", "kept"),
    [
        ("sample=2,filter=2", (3, 1), 4, True),
        ("sample=2,filter=4", (3, 1), 6, True),  # sample=2,filter=3
        ("sample=2,filter=2", (3, 1), 2, False),  # sample=1,filter=2
        ("sample=2,filter=2", (3, 1), 6, False),  # sample=3,filter=2
        ("sample=2,filter=2", (3, 1, 1), 3, True),  # sample=3,filter=1: as if they had been for it
        ("sample=2,filter=2", (3, 3, 2, 2), 4, False),
        ("filter=2,owt=2", (3, 1), 4, True),
        ("filter=4", (3, 3, 2, 2), 4, False),
        ("sample=4", (3, 3, 2, 2), 4, True),
        ("sample=4", (3, 3, 2, 2), 1, False),
        ("serial", (3, 1), 2, True),
        (None, (3, 1), 2, True),
        ("auto", (3, 1), 2, True),
        ("auto", (3, 1), 4, True),  # of the planner's choices those with two parts
        ("auto", (3, 2, 1), 4, False),
        ("auto", (3, 2, 1), 2, False),
        ("auto", (1,), 4, False),
    ],
)
def test_shares_belong_to_the_parts_of_the_batch(
    plan: str | None, shares: tuple[float, ...], devices: int, kept: bool
) -> None:
    notes: list[str] = []
    found = fitted(ParallelConfig(devices=4, plan=plan, shares=shares), devices, False, False, notes)
    assert (found.shares == shares) is kept
    assert any("left out" in note for note in notes) is not kept


@pytest.mark.parametrize(
    ("plan", "shares", "kept"),
    [
        ("sample=2,filter=2", (3, 1), True),
        ("sample=2,filter=2", (3, 3, 2, 2), False),
        ("filter=4", (3, 3, 2, 2), False),
    ],
)
def test_shares_of_devices_would_be_noticed(
    plan: str, shares: tuple[float, ...], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_shares_belong_to_the_parts_of_the_batch(plan, shares, 4, kept)
    monkeypatch.setattr(Plan, "parts", property(lambda self: self.mesh.num_devices))
    with pytest.raises(AssertionError):
        test_shares_belong_to_the_parts_of_the_batch(plan, shares, 4, kept)


def test_the_planner_is_not_bound_by_shares_of_other_devices() -> None:
    assert fitted(ParallelConfig(devices=2, plan="auto", shares=(3, 1)), 4, False, False).shares is None
