"""The benchmarks' cases and sides: there, and doing the same updates."""

from dataclasses import replace

import pytest
from measuring.cases import STAGED, Case
from measuring.ranks import run_ranks
from measuring.sides import Arrangement, Side, train

from convoy.plans.plan import Plan

TINY = Case("lenet", "lenet", 28, 8, 2)
UNET = replace(STAGED["unet"], image_size=32, batch=8, updates=1, options={"groups": 4, "width": 8})


@pytest.mark.slow
def test_all_sides_do_the_same_updates() -> None:
    """The losses of one device, where there is no batch norm; of a U-Net the first one, before any update."""
    two = Plan.parse("sample=2")
    passes = [Side("", "serial", Arrangement(True, 4)), Side("", "ddp", Arrangement(True, 2))]
    passes += [Side("", "convoy", Arrangement(True, 2), "owt=2"), Side("", "convoy", plan=two)]
    staged = [Side("", "convoy", plan=Plan.parse("stage=2"), parts=4, schedule="1f1b")]
    staged += [Side("", "torch", Arrangement(False), parts=4, schedule="gpipe", cuts=("up.1",))]
    for case, sides in ((TINY, passes), (UNET, staged)):
        (serial,) = run_ranks(train, 1, Side("", "serial"), case, 0, seconds=90)
        for side in sides:
            timings = run_ranks(train, 1 if side.kind == "serial" else 2, side, case, 0, seconds=90)
            if side.schedule:
                timings = timings[-1:]
            losses = [sum(one.losses[update] for one in timings) / len(timings) for update in range(case.updates)]
            assert losses == pytest.approx(serial.losses, rel=1e-4), side
    first, second = run_ranks(train, 2, Side("", "apart", samples=(6, 2)), UNET, 0, seconds=90)
    assert first.losses != second.losses
