"""One case of `stages.py`: predictions, trials that choose how each side goes through the batch, rounds in turn."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from convoy.plans.plan import Plan
from measuring.case_runs import Runs
from measuring.ranks import Limits, run_ranks
from measuring.results import SERIAL, Results, Row
from measuring.sides import Arrangement
from measuring.stage_sides import Predicted, StageSide, predict, train
from measuring.training import Timing

WARM_UP = 4
"""Updates that do not count: memory still grows in the first three, in which Convoy also compares the ranks."""
SLOW = 3.0
"""Seconds of an update from which one is enough."""


@dataclass
class StageRun(Runs):
    """A case on emulated devices, of which the first is one device by itself."""

    speeds: Sequence[float] = ()  # of the devices
    profile: Path | None = None  # folder of the planner's measurements on them; None to go without the planner
    _slow: set[str] = field(default_factory=set)  # sides, as is predicted

    def __call__(self) -> Results:
        """Predictions, trials, then rounds."""
        results, one = self.results, self.one_device(True)
        results.share = self.speeds[0]
        serial, predictions = self._predict(one)
        expected = {f"Convoy {each.name}": each for each in predictions}
        self._slow.update(label for label, each in expected.items() if each.seconds and each.seconds > SLOW)
        sides = [StageSide(SERIAL, "serial", one), self._apart(one), *self._convoy(predictions, one), *self._torch()]
        for side in sides:
            seconds = expected[side.label].of(side) if side.label in expected else None
            seconds = serial if side.label == SERIAL else seconds
            results.rows.append(Row(side.label, side.how, plan=str(side.plan or ""), predicted=seconds))
        return self.take_turns(sides)

    def measure(self, side: StageSide, number: int, trial: bool = False) -> list[Timing]:
        """On the devices; a single update in a trial."""
        places = self.places[:1] if side.kind == "serial" else self.places
        case = replace(self.case, updates=1 if trial else self.case.updates)
        warm_up = 1 if any(side.label.startswith(label) for label in self._slow) else WARM_UP
        return run_ranks(train, len(places), side, case, warm_up, places=places, limits=Limits(self.seconds))

    def _apart(self, one: Arrangement) -> StageSide:
        """All devices at once, each by itself with samples by its speed: a bound, and no training of one network."""
        own = [round(self.case.batch * speed / sum(self.speeds)) for speed in self.speeds]
        own[0] += self.case.batch - sum(own)
        return StageSide("no exchange", "apart", one.for_batch(max(own)), samples=tuple(own))

    def _predict(self, one: Arrangement) -> tuple[float | None, list[Predicted]]:
        """Seconds of one device, and what is to be measured."""
        num = len(self.places)
        plans = (f"sample={num}", *self.case.divided.get(num, ()), *self.case.staged.get(num, ()))
        if self.profile is None:
            return None, [Predicted(text, Plan.parse(text)) for text in plans]
        given, limits = (self.case, plans, one, self.profile), Limits(5 * self.seconds)
        serial, found = run_ranks(predict, num, *given, places=self.places, limits=limits)[0]
        for each in found:
            others = "".join(f", {how} {seconds:.3f} s" for how, seconds in each.others.items())
            self.say(f"predicted: {each.name}, {each.plan}, {each.parts} parts: {each.seconds:.3f} s{others}")
        return serial, found

    def _convoy(self, predictions: Sequence[Predicted], one: Arrangement) -> list[StageSide]:
        """A side for each plan, arranged as is best for it. A plan that comes twice is measured once."""
        sides: list[StageSide] = []
        known: set[str] = set()
        for each in sorted(predictions, key=lambda each: each.name.startswith("auto")):
            if str(each.plan) in known:
                continue
            known.add(str(each.plan))
            label, way = f"Convoy {each.name}", Arrangement(one.channels_last)
            if each.plan.mesh.stage_axis is None:
                ways = dict.fromkeys([one.for_batch(self.case.batch // each.plan.parts), way])
                best = self.best([StageSide(label, "convoy", tried, each.plan) for tried in ways])
            else:
                numbers = sorted({*self.case.parts, *([each.parts] if each.parts > 1 else [])})
                tried = itertools.product(numbers, ("1f1b", "zero-bubble"))
                best = self.best([StageSide(label, "convoy", way, each.plan, *one) for one in tried])
                best += [replace(side, label=f"{label}, plain loop", schedule="gpipe") for side in best]
            sides += best
            if best and not self.case.dense:  # the trainer is for images with a class each
                sides.append(replace(best[0], label=f"{label}, trainer", kind="trainer"))
        return sides

    def _torch(self) -> list[StageSide]:
        """Its best cut and number of parts under GPipe, and the same under 1F1B.

        It refuses to receive what lies channels_last: "input tensor has to be contiguous" (torch 2.13).
        """
        found: list[StageSide] = []
        if "torch" in self.peers:
            tried = [
                StageSide("torch, gpipe", "torch", Arrangement(False), None, parts, "gpipe", cuts)
                for cuts, parts in itertools.product(self.case.cuts.get(len(self.places), ()), self.case.parts)
            ]
            found = self.best(tried)
            found += self.best([replace(side, label="torch, 1f1b", schedule="1f1b") for side in found])
        return found
