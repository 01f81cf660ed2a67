"""One case: trials that choose arrangements and plans, then rounds in which all sides take turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from convoy.bench.emulated import EmulatedDevice
from measuring.cases import Case, Plan
from measuring.ranks import Limits, RankFailed, run_ranks
from measuring.results import SERIAL, Results, Row
from measuring.sides import PEERS, Arrangement, Side
from measuring.training import Timing, train, try_arrangements

SAMPLE = "Convoy sample=2"


@dataclass
class CaseRun:
    """Measures a case."""

    case: Case
    rounds: int
    places: Sequence[EmulatedDevice]  # of the ranks on two emulated hosts; none for loopback
    peers: Sequence[str]  # kinds of the peers' sides
    compiled: bool  # measure compiled sides too
    seconds: float  # after which a side is given up
    say: Callable[[str], None]  # is told what is going on
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        network = f"{self.case.model}, {self.case.image_size} px"
        self.results = Results(self.case.name, self.case.batch, network)

    def __call__(self) -> Results:
        """Trials, then rounds."""
        results = self.results
        one = self._one_device()
        sides = self._sides(one)
        results.rows = [Row(side.label, str(side.arrangement), plan=side.plan) for side in sides]
        for number in range(self.rounds):
            for side in sides if number % 2 == 0 else list(reversed(sides)):
                if side.label in results.skipped:
                    continue
                timings = self._measure(side, number)
                if timings is not None:
                    row = results.row(side.label)
                    row.add(slowest(timings), sum(t.losses[0] for t in timings) / len(timings), timings[0].busy)
                    self.say(f"round {number + 1}: {side.label} {slowest(timings):.4f} s")
        results.rows = [row for row in results.rows if row.seconds and row.label not in results.skipped]
        return results

    def _one_device(self) -> Arrangement:
        found: dict[Arrangement, float]
        found = run_ranks(try_arrangements, 1, self.case, limits=Limits(self.seconds))[0]
        for arrangement, seconds in found.items():
            self._note(f"one device, {arrangement}", seconds)
        return min(found, key=lambda arrangement: found[arrangement])

    def _sides(self, one: Arrangement) -> list[Side]:
        """Those of the rounds: one device and the peers, `sample` and the plan that is best of all, each arranged as
        is best for it; all peers as is best for DistributedDataParallel, which they use."""
        own = list(dict.fromkeys([one.for_batch(self.case.batch // 2), Arrangement(one.channels_last)]))
        sides = [Side(SERIAL, "serial", one), Side(f"{SERIAL}, memory kept", "serial", one, keeps=True)]
        by_data = self._best([Side("DDP", "ddp", arrangement) for arrangement in own]) if len(own) > 1 else None
        for kind in self.peers:
            peer = Side(PEERS[kind], kind, by_data.arrangement if by_data else own[0])
            if peer.missing:
                self.results.skipped[peer.label] = f"pip install {peer.missing}"
            else:
                sides.append(peer)
        samples = [Side(SAMPLE, "convoy", arrangement, "sample=2") for arrangement in own]
        sample = (self._best(samples) if len(samples) > 1 else None) or samples[0]
        if self.case.batch_norm:
            sides.append(replace(sample, label=f"{SAMPLE}, batch norm of each rank", batch_norm="local"))
        sides.append(sample)
        plans: dict[str, Plan] = {"sample=2": "sample=2", **self.case.plans}
        tried = [Side(f"Convoy {name}", "convoy", way, plan) for name, plan in plans.items() for way in own]
        best = self._best([sample, *(side for side in tried if side.label != SAMPLE)]) if self.case.plans else None
        if best is not None and best != sample:
            sides.append(best)
        if self.compiled:
            sides += [replace(s, label=f"{s.label}, compiled", compiled=True) for s in sides if s.kind not in PEERS]
        return sides

    def _best(self, sides: Sequence[Side]) -> Side | None:
        """The fastest in one trial."""
        found: list[tuple[float, int]] = []
        for number, side in enumerate(sides):
            timings = self._measure(side, 0, f"{side.label}, {side.arrangement}")
            if timings is not None:
                found.append((slowest(timings), number))
                self._note(f"{side.label}, {side.arrangement}", slowest(timings))
        return sides[min(found)[1]] if found else None

    def _measure(self, side: Side, number: int, name: str | None = None) -> list[Timing] | None:
        """What each rank measured; None if one fails."""
        serial = side.kind == "serial"
        case, warm_up = self.case, 1 if self.case.updates == 1 else 2
        try:
            return run_ranks(
                train,
                1 if serial else 2,
                side,
                case,
                warm_up,
                places=() if serial else self.places,
                limits=Limits(self.seconds),
                first_core=number if serial else 0,
            )
        except RankFailed as error:
            name = name or side.label
            self.results.skipped[name] = f"failed: {str(error).strip().splitlines()[-1]}"
            self.say(f"{name}: {error}")
            return None

    def _note(self, name: str, seconds: float) -> None:
        self.results.tried[name] = seconds
        self.say(f"trial: {name} {seconds:.4f} s")


def slowest(timings: Sequence[Timing]) -> float:
    """Seconds of an update on the slowest rank."""
    return max(timing.median for timing in timings)
