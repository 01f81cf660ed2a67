"""The `parallel` section of a recipe on another number of devices."""

from convoy.training.parallel_config import ParallelConfig, fitted


def test_shares_for_other_devices_are_dropped_with_a_note() -> None:
    section, notes = ParallelConfig(devices=3, shares=(3, 3, 2.5)), []
    assert fitted(section, 2, False, False, notes).shares is None
    assert notes == ["the shares 3,3,2.5 are for 3 devices, not 2: they are left out"]
    assert fitted(section, 3, False, False, notes).shares == fitted(section, 2, False, True, notes).shares
    assert len(notes) == 1
