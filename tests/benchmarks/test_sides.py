"""The benchmarks' cases and sides: there, and doing the same updates."""

from dataclasses import replace

import pytest
import torch
from measuring.cases import CASES, HELD, MEMORY, STAGED, SUBJECTS, Case
from measuring.ranks import Limits, run_ranks
from measuring.sides import Arrangement, Side, train

from convoy import models
from convoy.plans.plan import Plan

TINY = Case("lenet", "lenet", 28, 8, 2)
UNET = replace(STAGED["unet"], image_size=32, batch=8, updates=1, options={"groups": 4, "width": 8})


def test_networks_plans_and_cuts_of_cases_are_there_and_for_as_many_devices_as_they_say() -> None:
    for case in (*CASES.values(), *STAGED.values(), *HELD.values(), *MEMORY.values(), *SUBJECTS):
        with torch.device("meta"):
            names = dict(models.create(case.model, num_classes=10, **case.options).named_modules())
        assert {Plan.parse(plan).mesh.num_devices for plan in case.plans.values()} <= {2}
        for num, plans in case.divided.items():
            assert {Plan.parse(text).mesh.num_devices for text in plans} <= {num}
            assert all(len(cuts) == num - 1 and set(cuts) <= names.keys() for cuts in case.cuts[num])


@pytest.mark.slow
def test_all_sides_do_the_same_updates() -> None:
    """The losses of one device, where there is no batch norm; of a U-Net the first one, before any update."""
    two = Plan.parse("sample=2")
    passes = [Side("", "serial", Arrangement(True, 4)), Side("", "ddp", Arrangement(True, 2))]
    passes += [Side("", "convoy", Arrangement(True, 2), "owt=2"), Side("", "convoy", plan=two)]
    staged = [Side("", "convoy", plan=Plan.parse("stage=2"), parts=4, schedule="1f1b")]
    staged += [Side("", "torch", Arrangement(False), parts=4, schedule="gpipe", cuts=("up.1",))]
    for case, sides in ((TINY, passes), (UNET, staged)):
        (serial,) = run_ranks(train, 1, Side("", "serial"), case, 0, limits=Limits(90))
        for side in sides:
            timings = run_ranks(train, 1 if side.kind == "serial" else 2, side, case, 0, limits=Limits(90))
            if side.schedule:
                timings = timings[-1:]
            losses = [sum(one.losses[update] for one in timings) / len(timings) for update in range(case.updates)]
            assert losses == pytest.approx(serial.losses, rel=1e-4), side
    first, second = run_ranks(train, 2, Side("", "apart", samples=(6, 2)), UNET, 0, limits=Limits(90))
    assert first.losses != second.losses
