"""One case of `stages.py`: predictions, trials that choose how each side goes through the batch, rounds in turn."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from convoy.bench.emulated import EmulatedDevice
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan
from measuring.case_runs import slowest
from measuring.ranks import Limits, RankFailed, run_ranks
from measuring.results import SERIAL, Results, Row
from measuring.sides import Arrangement
from measuring.stage_cases import StageCase
from measuring.stage_sides import Predicted, StageSide, predict, train
from measuring.training import Timing, try_arrangements

WARM_UP = 4
"""Updates that do not count: memory still grows in the first three, in which Convoy also compares the ranks."""
SLOW = 3.0
"""Seconds of an update from which one is enough."""


@dataclass
class StageRun:
    """Measures a case."""

    case: StageCase
    rounds: int
    places: Sequence[EmulatedDevice]  # of the ranks on emulated devices; one device is the first of them by itself
    speeds: Sequence[float]  # of these devices
    peers: Sequence[str]  # `torch`, `rows`
    seconds: float  # after which a side is given up
    profile: Path | None  # folder of the planner's measurements on these devices; None to go without the planner
    say: Callable[[str], None]  # is told what is going on
    results: Results = field(init=False)
    _slow: set[str] = field(default_factory=set)  # sides, as is predicted

    def __post_init__(self) -> None:
        self.results = Results(self.case.name, self.case.batch, f"{self.case.model}, {self.case.image_size} px")

    def __call__(self) -> Results:
        """Predictions, trials, then rounds."""
        results, one = self.results, self._one_device()
        results.share = self.speeds[0]
        serial, predicted = self._predict(one)
        expected = {f"Convoy {each.name}": each for each in predicted}
        self._slow.update(label for label, each in expected.items() if each.seconds and each.seconds > SLOW)
        sides = [StageSide(SERIAL, "serial", one), self._apart(one), *self._own(predicted, one)]
        sides += [*self._torch(one), *self._rows(one)]
        for side in sides:
            said = expected[side.label].of(side) if side.label in expected else None
            seconds = serial if side.label == SERIAL else said
            results.rows.append(Row(side.label, side.how, plan=str(side.plan or ""), predicted=seconds))
        for number in range(self.rounds):
            for side in sides if number % 2 == 0 else list(reversed(sides)):
                timings = self._measure(side) if side.label not in results.skipped else None
                if timings is not None:
                    losses = [timing.losses[0] for timing in timings if timing.losses[0] == timing.losses[0]]
                    results.row(side.label).add(slowest(timings), sum(losses) / len(losses), timings[0].busy)
                    self.say(f"round {number + 1}: {side.label} {slowest(timings):.3f} s")
        results.rows = [row for row in results.rows if row.seconds and row.label not in results.skipped]
        return results

    def _one_device(self) -> Arrangement:
        found: dict[Arrangement, float]
        limits = Limits(self.seconds)
        found = run_ranks(try_arrangements, 1, self.case, True, places=self.places[:1], limits=limits)[0]
        for arrangement, seconds in found.items():
            self._note(f"one device, {arrangement}", seconds)
        return min(found, key=lambda arrangement: found[arrangement])

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

    def _own(self, predicted: Sequence[Predicted], one: Arrangement) -> list[StageSide]:
        """A side for each plan, arranged as is best for it. A plan that comes twice is measured once."""
        sides: list[StageSide] = []
        known: set[str] = set()
        for each in sorted(predicted, key=lambda each: each.name.startswith("auto")):
            if str(each.plan) in known:
                continue
            known.add(str(each.plan))
            label, way = f"Convoy {each.name}", Arrangement(one.channels_last)
            if each.plan.mesh.stage_axis is None:
                ways = dict.fromkeys([one.for_batch(self.case.batch // each.plan.parts), way])
                best = self._best([StageSide(label, "convoy", tried, each.plan) for tried in ways])
            else:
                numbers = sorted({*self.case.parts, *([each.parts] if each.parts > 1 else [])})
                tried = itertools.product(numbers, ("1f1b", "zero-bubble"))
                best = self._best([StageSide(label, "convoy", way, each.plan, *one) for one in tried])
                best += [replace(side, label=f"{label}, plain loop", schedule="gpipe") for side in best]
            sides += best
            if best and not self.case.dense:  # the trainer is for images with a class each
                sides.append(replace(best[0], label=f"{label}, trainer", kind="trainer"))
        return sides

    def _torch(self, one: Arrangement) -> list[StageSide]:
        """Its best cut and number of parts under GPipe, and the same under 1F1B.

        It refuses to receive what lies channels_last: "input tensor has to be contiguous" (torch 2.13).
        """
        found: list[StageSide] = []
        if "torch" in self.peers:
            tried = [
                StageSide("torch, gpipe", "torch", Arrangement(False), None, parts, "gpipe", cuts)
                for cuts, parts in itertools.product(self.case.cuts.get(len(self.places), ()), self.case.parts)
            ]
            found = self._best(tried)
            found += self._best([replace(side, label="torch, 1f1b", schedule="1f1b") for side in found])
        return found

    def _rows(self, one: Arrangement) -> list[StageSide]:
        if "rows" not in self.peers or not self.case.rows:
            return []
        ways = dict.fromkeys([Arrangement(one.channels_last), Arrangement(False)])
        return self._best([StageSide("ShardTensor, by rows", "rows", way) for way in ways])

    def _best(self, sides: Iterable[StageSide]) -> list[StageSide]:
        """The fastest in one trial of a single update; none if all fail."""
        tried = list(sides)
        found: list[tuple[float, int]] = []
        for number, side in enumerate(tried if len(tried) > 1 else []):
            timings = self._measure(side, 1, f"{side.label}, {side.how}")
            if timings is not None:
                found.append((slowest(timings), number))
                self._note(f"{side.label}, {side.how}", slowest(timings))
        return [tried[min(found)[1]]] if found else tried if len(tried) == 1 else []

    def _measure(self, side: StageSide, updates: int | None = None, name: str | None = None) -> list[Timing] | None:
        """What each rank measured; None if one fails."""
        places = self.places[:1] if side.kind == "serial" else self.places
        case = replace(self.case, updates=updates or self.case.updates)
        warm_up = 1 if any(side.label.startswith(label) for label in self._slow) else WARM_UP
        try:
            return run_ranks(train, len(places), side, case, warm_up, places=places, limits=Limits(self.seconds))
        except (RankFailed, ConvoyError) as error:
            name = name or side.label
            self.results.skipped[name] = f"failed: {str(error).strip().partition(chr(10))[0]}"
            self.say(f"{name}: {error}")
            return None

    def _note(self, name: str, seconds: float) -> None:
        self.results.tried[name] = seconds
        self.say(f"trial: {name} {seconds:.3f} s")
