"""What `benchmarks/stages.py` measures: plans for as many devices as they say, sides that do the same training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from measuring.ranks import Limits, run_ranks
from measuring.sides import Arrangement
from measuring.stage_cases import CASES
from measuring.stage_exactness import SUBJECTS, Distance, _parts, distances, relative, table
from measuring.stage_sides import StageSide, train

from convoy import models
from convoy.plans.plan import Plan

UNET = replace(CASES["unet"], image_size=32, batch=8, updates=1, options={"groups": 4, "width": 8})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plans_and_cuts_are_for_as_many_devices_as_they_say(case) -> None:
    for num in (2, 4):
        for text in (*case.divided[num], *case.staged[num]) if case.divided else case.staged[num]:
            assert Plan.parse(text).mesh.num_devices == num
        with torch.device("meta"):
            names = dict(models.create(case.model, num_classes=10, **case.options).named_modules())
        for cuts in case.cuts[num]:
            assert len(cuts) == num - 1 and all(cut in names for cut in cuts)


def test_parts_are_those_of_every_rank_in_order() -> None:
    assert list(_parts(7, sample_ranks=2, parts=2)) == [range(2), range(2, 4), range(4, 6), range(6, 7)]


def test_a_distance_is_a_part_of_the_largest_element() -> None:
    assert relative(torch.tensor([1.0, 4.1]), torch.tensor([1.0, 4.0])) == pytest.approx(0.025)
    near, far = Distance(), Distance()
    near.note("gradients", "a", 1e-12)
    far.note("gradients", "a", float("nan"))
    assert near.ok and not far.ok


@pytest.mark.slow
def test_lenet_is_exact_and_a_wrong_gradient_is_seen(tmp_path: Path) -> None:
    ((*_, found),) = table(["lenet"], ["stage=2"], ["1f1b"], tmp_path)
    assert isinstance(found, Distance) and found.ok, found
    (file,) = tmp_path.iterdir()
    serial, perturbed = torch.load(file, weights_only=False)
    for each in (serial, perturbed):  # where only one had it, it would pass as what rounding does
        each.gradients[1]["features.3.weight"][0] *= 1 + 1e-6
    torch.save((serial, perturbed), file)
    wrong = run_ranks(distances, 2, SUBJECTS["lenet"], "stage=2", ["1f1b"], file, limits=Limits(90))
    assert not any(found.ok for (found,) in wrong)


def test_more_samples_make_more_passes_and_parts() -> None:
    for case in CASES.values():
        assert case.changed(None, None) == case
    more = CASES["resnet50"].changed(256, None)
    assert (more.batch, more.passes, more.parts) == (256, (8, 16, 32, 64, 128), (2, 4, 8, 16))


@pytest.mark.slow
def test_devices_by_themselves_take_their_own_samples() -> None:
    side = StageSide("", "apart", Arrangement(), samples=(6, 2))
    first, second = run_ranks(train, 2, side, UNET, 0, limits=Limits(90))
    assert first.losses != second.losses


@pytest.mark.slow
def test_all_sides_begin_at_the_same_loss() -> None:
    one = Arrangement()
    (serial,) = run_ranks(train, 1, StageSide("", "serial", one), UNET, 0, limits=Limits(90))
    for side in (
        StageSide("", "convoy", one, Plan.parse("stage=2"), 4, "1f1b"),
        StageSide("", "convoy", one, Plan.parse("stage=2"), 4, "gpipe"),
        StageSide("", "convoy", one, Plan.parse("height=2")),
        StageSide("", "torch", Arrangement(False), None, 4, "gpipe", ("up.1",)),
    ):
        losses = [timing.losses[0] for timing in run_ranks(train, 2, side, UNET, 0, limits=Limits(90))]
        assert losses[-1] == pytest.approx(serial.losses[0], rel=1e-4), side
