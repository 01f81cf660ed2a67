"""One case: trials that choose arrangements and plans, then rounds in which all sides take turns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from convoy.bench.emulated import EmulatedDevice
from convoy.errors import ConvoyError
from measuring import harness
from measuring.cases import Plan
from measuring.ranks import Limits, RankFailed, run_ranks
from measuring.results import SERIAL, Results, Row
from measuring.sides import PEERS, Arrangement, Side
from measuring.training import Timing, train, try_arrangements

SAMPLE = "Convoy sample=2"


def slowest(timings: Sequence[Timing]) -> float:
    """Seconds of an update on the slowest rank."""
    return max(timing.median for timing in timings)


@dataclass
class Runs(ABC):
    """Measures sides of one case by fresh processes, and gives up those that fail."""

    case: Any
    rounds: int
    places: Sequence[EmulatedDevice]  # of the ranks; none for loopback
    peers: Sequence[str]  # kinds of the peers' sides
    seconds: float  # after which a side is given up
    say: Callable[[str], None]  # is told what is going on
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.results = Results(self.case.name, self.case.batch, f"{self.case.model}, {self.case.image_size} px")

    @abstractmethod
    def measure(self, side: Any, number: int, trial: bool = False) -> list[Timing]:
        """What each rank measures of a side in a round."""

    def one_device(self, *arguments: Any) -> Arrangement:
        """The fastest arrangement of one device by itself."""
        limits, places = Limits(self.seconds), self.places[:1] if arguments else ()
        seconds: dict[Arrangement, float]
        seconds = run_ranks(try_arrangements, 1, self.case, *arguments, places=places, limits=limits)[0]
        for arrangement in seconds:
            self._note(f"one device, {arrangement}", seconds[arrangement])
        return min(seconds, key=lambda arrangement: seconds[arrangement])

    def best(self, rivals: Sequence[Any]) -> list[Any]:
        """The fastest in one trial, which a side without rivals does not need; none if all fail."""
        if len(rivals) < 2:
            return list(rivals)
        seconds: list[tuple[float, int]] = []
        for number, side in enumerate(rivals):
            timings = self._try(side, f"{side.label}, {side.how}", trial=True)
            if timings is not None:
                seconds.append((slowest(timings), number))
                self._note(f"{side.label}, {side.how}", slowest(timings))
        return [rivals[min(seconds)[1]]] if seconds else []

    def take_turns(self, sides: Sequence[Any]) -> Results:
        """The rounds; `results` must have a row for each side."""
        results = self.results
        for number, label, side in harness.turns({side.label: side for side in sides}, self.rounds):
            timings = self._try(side, label, number) if label not in results.skipped else None
            if timings is not None:
                losses = [timing.losses[0] for timing in timings if timing.losses[0] == timing.losses[0]]
                results.row(label).add(slowest(timings), sum(losses) / len(losses), timings[0].busy)
                self.say(f"round {number + 1}: {label} {slowest(timings):.4f} s")
        results.rows = [row for row in results.rows if row.seconds and row.label not in results.skipped]
        return results

    def _try(self, side: Any, name: str, number: int = 0, trial: bool = False) -> list[Timing] | None:
        try:
            return self.measure(side, number, trial)
        except (RankFailed, ConvoyError) as error:
            line = str(error).strip().splitlines()[-1 if isinstance(error, RankFailed) else 0]
            self.results.skipped[name] = f"failed: {line}"
            self.say(f"{name}: {error}")
            return None

    def _note(self, name: str, seconds: float) -> None:
        self.results.tried[name] = seconds
        self.say(f"trial: {name} {seconds:.4f} s")


@dataclass
class CaseRun(Runs):
    """A case of `parallel.py`."""

    compiled: bool = False  # measure compiled sides too

    def __call__(self) -> Results:
        """Trials, then rounds."""
        sides = self._sides(self.one_device())
        self.results.rows = [Row(side.label, side.how, plan=side.plan) for side in sides]
        return self.take_turns(sides)

    def measure(self, side: Side, number: int, trial: bool = False) -> list[Timing]:
        """On two ranks, or on one that takes another core in each round."""
        serial, warm_up = side.kind == "serial", 1 if self.case.updates == 1 else 2
        how: dict[str, Any] = {"first_core": number} if serial else {"places": self.places}
        return run_ranks(train, 1 if serial else 2, side, self.case, warm_up, limits=Limits(self.seconds), **how)

    def _sides(self, one: Arrangement) -> list[Side]:
        """Those of the rounds: one device and the peers, `sample` and the plan that is best of all, each arranged as
        is best for it; all peers as is best for DistributedDataParallel, which they use."""
        case = self.case
        ways = list(dict.fromkeys([one.for_batch(case.batch // 2), Arrangement(one.channels_last)]))
        sides = [Side(SERIAL, "serial", one), Side(f"{SERIAL}, memory kept", "serial", one, keeps=True)]
        by_data = self.best([Side("DDP", "ddp", way) for way in ways])
        for kind in self.peers:
            peer = Side(PEERS[kind], kind, by_data[0].arrangement if by_data else ways[0])
            if peer.missing:
                self.results.skipped[peer.label] = f"pip install {peer.missing}"
            else:
                sides.append(peer)
        samples = [Side(SAMPLE, "convoy", way, "sample=2") for way in ways]
        sample: Side = (self.best(samples) or samples)[0]
        if case.batch_norm:
            sides.append(replace(sample, label=f"{SAMPLE}, batch norm of each rank", batch_norm="local"))
        sides.append(sample)
        plans: dict[str, Plan] = {name: plan for name, plan in case.plans.items() if name != "sample=2"}
        rivals = [Side(f"Convoy {name}", "convoy", way, plan) for name, plan in plans.items() for way in ways]
        sides += [side for side in self.best([sample, *rivals]) if side != sample]
        if self.compiled:
            sides += [replace(s, label=f"{s.label}, compiled", compiled=True) for s in sides if s.kind not in PEERS]
        return sides
