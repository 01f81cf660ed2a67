"""What `convoy doctor` says of runs that are each slow for one reason, beside what is measured when that is put right.

    python benchmarks/doctor.py --photographs FOLDER
    python benchmarks/doctor.py --cases batch,threads,healthy --rounds 5
    python benchmarks/doctor.py --others --photographs FOLDER               other networks, with the same faults
    python benchmarks/doctor.py --no-doctor                              only what putting right brings

The run and the same run put right take turns for some rounds, each of fresh processes; images a second are those of
the run's own metrics without its beginning, and the median over the rounds counts. In the same
surroundings the doctor is asked first. Where it gives arguments for the right cause, the run with these is measured
too, and the predicted gain is compared with that. Emulated devices and slow storage need root; see
`measuring/slow_storage.py`.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import harness, machine
from measuring.broken_runs import CASES, HEALTHY, OTHERS, BrokenRun, CannotBeSetUpError, DataSets, Place

from convoy.cli.doctor import replaced

CONVOY = (sys.executable, "-m", "convoy")
NEAR, HARMLESS = 0.2, 1.05
"""How far a predicted gain may be from the measured one, and what may still be promised to a healthy run."""
_PATIENCE_S = 10.0
_PACK = re.compile(r"convoy data pack [^`\n]+")


class RunFailedError(Exception):
    """A run or the doctor did not come to its end."""


@dataclass
class Side:
    """One way to run a case."""

    arguments: list[str]  # of `convoy train`
    rates: list[float] = field(default_factory=list)  # images a second of the rounds

    @property
    def rate(self) -> float | None:
        """Their median."""
        return statistics.median(self.rates) if self.rates else None


@dataclass
class Result:
    """What came of a case."""

    cause: str
    # `broken`, `repaired` and, where the doctor gave arguments, `advised`
    sides: dict[str, Side] = field(default_factory=dict)
    answer: dict[str, Any] | None = None  # of the doctor
    failed: str = ""  # why it, or what was to be measured, did not come to its end
    skipped: str = ""  # why the case cannot be set up here, or that nothing is broken

    @property
    def first(self) -> dict[str, Any] | None:
        """The doctor's first advice."""
        advice = (self.answer or {}).get("advice") or [None]
        found: dict[str, Any] | None = advice[0]
        return found

    @property
    def predicted(self) -> float | None:
        """The gain that the first advice promises."""
        return self.first["gain"] if self.first else None

    def measured(self, side: str) -> float | None:
        """The gain of a side."""
        broken, other = self.sides.get("broken"), self.sides.get(side)
        return other.rate / broken.rate if broken and other and broken.rate and other.rate else None

    @property
    def gain(self) -> float | None:
        """What the prediction is compared with."""
        return self.measured("advised") or self.measured("repaired")

    @property
    def error(self) -> float | None:
        """Of the prediction; only where the right cause is named."""
        named = self.predicted is not None and self.gain is not None and self.is_named
        return self.predicted / self.gain - 1 if named and self.predicted and self.gain else None

    @property
    def is_named(self) -> bool:
        """Whether the first advice has the cause; of a healthy run, whether nothing much is advised."""
        if self.cause == HEALTHY:
            return self.answer is not None and (self.predicted or 1.0) <= HARMLESS
        return self.first is not None and self.first["cause"] == self.cause

    @property
    def is_right(self) -> bool:
        """The cause, and the gain."""
        return self.is_named and (self.cause == HEALTHY or (self.error is not None and abs(self.error) <= NEAR))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "medians": {name: side.rate for name, side in self.sides.items()},
            "gains": {name: self.measured(name) for name in self.sides if name != "broken"},
            "predicted": self.predicted,
            "error": self.error,
            "named": self.is_named,
            "right": self.is_right,
        }


@dataclass
class CaseRun:
    """Measures a case and asks the doctor."""

    case: BrokenRun
    data: DataSets  # of all cases
    work: Path  # a folder for runs, each deleted when it was read
    rounds: int  # in which the sides take turns
    seconds: float  # after which a run is given up
    doctor: bool  # whether it is asked

    def __call__(self) -> Result:
        """All of it."""
        case, result = self.case, Result(self.case.cause)
        try:
            common = self.data.filled(case.command)
            result.sides["broken"] = Side(common + self.data.filled(case.broken))
            if case.cause != HEALTHY:
                result.sides["repaired"] = Side(common + self.data.filled(case.repaired))
            with case.around.made() as place:
                if self.doctor:
                    self._ask(place, result)
                if case.around_repaired is None:
                    self._take_turns(result, dict.fromkeys(result.sides, place))
            if case.around_repaired is not None:
                self._take_turns(result, {})
            gains = [gain for side in result.sides if side != "broken" and (gain := result.measured(side))]
            if gains and max(gains) < HARMLESS and not (result.failed or result.is_named):
                result.skipped = f"nothing is broken on this machine: put right, it is ×{max(gains):.2f} as fast"
        except CannotBeSetUpError as error:
            result.skipped = str(error)
        except RunFailedError as error:
            result.failed = str(error)
        return result

    def _ask(self, place: Place, result: Result) -> None:
        command = [*CONVOY, "doctor", "train", *result.sides["broken"].arguments, "--json"]
        if not any(word.startswith("evaluate_every=") for word in command):  # what is measured is without evaluations
            command += ["--set", "evaluate_every=20ep"]
        try:
            said = self._run(place, command)
            result.answer = json.loads(said)
        except (RunFailedError, ValueError) as error:
            result.failed = f"the doctor: {error}"
            return
        first = result.first
        if first is None or self.case.cause == HEALTHY or not result.is_named or not first["arguments"]:
            return
        advised = replaced(result.sides["broken"].arguments, first["arguments"])
        if pack := _PACK.search(first["change"]):
            subprocess.run([*CONVOY, *shlex.split(pack[0])[1:]], cwd=self.work, check=True, capture_output=True)
        if self.case.by_arguments or pack:
            result.sides["advised"] = Side(advised)

    def _take_turns(self, result: Result, places: dict[str, Place]) -> None:
        """The rounds; where the surroundings of sides differ, these are made anew for each measurement."""
        names = list(result.sides)
        for number in range(self.rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                if name in places:
                    rate = self._measure(places[name], result, name)
                else:
                    around = self.case.around if name == "broken" else self.case.around_repaired
                    assert around is not None
                    with around.made() as place:
                        rate = self._measure(place, result, name)
                _say(f"round {number + 1}: {self.case.cause}, {name}: {rate:,.1f} images/s")

    def _measure(self, place: Place, result: Result, name: str) -> float:
        side = result.sides[name]
        run = self.work / "run"
        updates = self.case.updates[name != "broken"]
        command = [*CONVOY, "train", *side.arguments, "--epochs", f"{updates}ba", "--out", str(run)]
        try:
            self._run(place, command)
            rate = steady_rate(run / "metrics.jsonl", self.case.by_clock_from, _batch(side.arguments))
        finally:
            shutil.rmtree(run, ignore_errors=True)
        side.rates.append(rate)
        return rate

    def _run(self, place: Place, command: Sequence[str]) -> str:
        """What the first rank prints."""
        with tempfile.TemporaryDirectory(dir=self.work) as name:
            folder = Path(name)
            with _ended(place.start(command, folder)) as processes:
                until = time.monotonic() + self.seconds
                try:
                    codes = [process.wait(max(until - time.monotonic(), 0)) for process in processes]
                except subprocess.TimeoutExpired:
                    raise RunFailedError(f"took more than {self.seconds:.0f} s") from None
            if any(codes):
                rank = next(rank for rank, code in enumerate(codes) if code)
                lines = (folder / f"err-{rank}").read_text(errors="replace").strip().splitlines()
                raise RunFailedError(lines[-1] if lines else f"exit status {codes[rank]}")
            return (folder / "out-0").read_text(encoding="utf-8")


def steady_rate(metrics: Path, by_clock_from: int | None, batch: int) -> float:
    """Images a second of a run without its beginning."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    begin = lines[-1]["step"] / 3 if by_clock_from is None else by_clock_from
    lines = [line for line in lines if line["step"] >= begin]
    pairs = list(pairwise(lines))
    if by_clock_from is None:
        seconds = sum((two["step"] - one["step"]) * batch / two["images_per_s"] for one, two in pairs)
    else:
        seconds = lines[-1]["time_s"] - lines[0]["time_s"]
    rate: float = (lines[-1]["step"] - lines[0]["step"]) * batch / seconds
    return rate


def _batch(arguments: Sequence[str]) -> int:
    """That the last `--batch` says."""
    place = len(arguments) - 1 - list(reversed(arguments)).index("--batch")
    return int(arguments[place + 1])


@contextmanager
def _ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are gone, with all that they have started, when the context is left."""
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + _PATIENCE_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


HEADER = """\
| case | command | first advice | predicted gain | measured gain | error | right? |
| --- | --- | --- | --- | --- | --- | --- |"""


def markdown(results: Sequence[Result], work: Path) -> str:
    """The table, and how many are right."""
    lines = [HEADER]
    for result in results:
        command = " ".join(result.sides["broken"].arguments).replace(f"{work}/", "") if result.sides else ""
        gain = result.measured("advised")
        measured = _times(result.measured("repaired"))
        if gain is not None:
            measured = f"{_times(gain)} (repaired otherwise: {measured})"
        advice = f"{result.first['cause']}: {result.first['change']}" if result.first else "none"
        error = "–" if result.error is None else f"{result.error:+.0%}"
        right = "yes" if result.is_right else "cause only" if result.is_named else "no"
        cells = [advice if result.answer else "–", _times(result.predicted), measured, error]
        cells.append("skipped" if result.skipped else "failed" if result.failed else right if result.answer else "–")
        lines.append(f"| {result.cause} | `{command}` | {' | '.join(cells)} |")
    lines += [f"\n{r.cause}: {'skipped' if r.skipped else 'failed'}, {why}" for r in results if (why := _why(r))]
    broken = [r for r in results if r.answer is not None and r.cause != HEALTHY and not r.skipped]
    if broken:
        named, right = (sum(getattr(r, name) for r in broken) for name in ("is_named", "is_right"))
        said = f"Of {len(broken)} broken runs the first advice names the cause of {named}"
        lines.append(f"\n{said}, {right} of them with a gain within {NEAR:.0%} of what was measured.")
    for r in results:
        if r.cause == HEALTHY and r.answer is not None:
            lines.append(f"\nThe healthy run is {'promised no' if r.is_named else 'PROMISED'} gain above {HARMLESS}.")
    return "\n".join(lines)


def _why(result: Result) -> str:
    return result.skipped or result.failed


def _times(gain: float | None) -> str:
    return "–" if gain is None else f"×{gain:.2f}"


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> None:
    arguments = _parser().parse_args()
    cases = OTHERS if arguments.others else CASES
    names = list(dict.fromkeys(case.cause for case in cases))
    chosen = names if arguments.cases is None else arguments.cases
    if unknown := sorted(set(chosen) - set(names)):
        raise SystemExit(f"there is no case {unknown[0]}: there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes, mounts and groups are cleaned up
    about = machine.describe()
    heading = f"{about['date']}: `{about['command']}`\n\n{machine.sentence(about)}\n"
    print(heading, flush=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, DataSets(arguments.photographs, Path(folder)) as data:
        os.environ["CONVOY_CACHE"] = f"{folder}/cache"  # what other runs have measured decides nothing
        work = Path(folder)
        for case in (case for name in chosen for case in cases if case.cause == name):
            run = CaseRun(case, data, work, arguments.rounds, arguments.timeout, not arguments.no_doctor)
            results.append(run())
            if why := _why(results[-1]):
                _say(f"{case.cause}: {why}")
            arguments.out.mkdir(parents=True, exist_ok=True)
            document = {"machine": about, "cases": [result.to_dict() for result in results]}
            (arguments.out / "doctor.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            table = markdown(results, work)
            (arguments.out / "doctor.md").write_text(f"{heading}\n{table}\n", encoding="utf-8")
    print(table)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--cases", type=lambda text: text.split(","), help="some of them, with commas [default: all]")
    parser.add_argument("--others", action="store_true", help="the faults in other networks and other amounts")
    parser.add_argument("--photographs", type=Path, help="folder of large JPEG files, for the cases that decode")
    parser.add_argument("--no-doctor", action="store_true", help="measure only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a run is given up")
    parser.add_argument("--out", type=Path, default=Path("doctor-results"), help="folder for JSON and Markdown")
    return parser


if __name__ == "__main__":
    main()
