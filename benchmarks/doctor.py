"""What `convoy doctor` says of runs that are each slow for one reason, beside what is measured when that is put right.

    python benchmarks/doctor.py --photographs FOLDER
    python benchmarks/doctor.py --cases batch,threads,healthy --rounds 5
    python benchmarks/doctor.py --others --photographs FOLDER               other networks, with the same faults

The run and the same run put right take turns for some rounds, each of fresh processes; images a second are those of
the run's own metrics without its beginning, and the median over the rounds counts. In the same
surroundings the doctor is asked first. Where it gives arguments for the right cause, the run with these is measured
too, and the predicted gain is compared with that. Emulated devices and slow storage need root; see
`measuring/slow_storage.py`.
"""

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import broken_runs, harness
from measuring.broken_runs import HEALTHY, BrokenRun, CannotBeSetUpError, DataSets, RunFailedError

from convoy.cli.doctor import replaced

NEAR, HARMLESS = 0.2, 1.05
"""How far a predicted gain may be from the measured one, and what may still be promised to a healthy run."""
_PACK = re.compile(r"convoy data pack [^`\n]+")


@dataclass
class Result:
    """What came of a case."""

    cause: str
    # arguments of `convoy train` and images a second in the rounds, of `broken`, `repaired` and, where the doctor gave
    # arguments, `advised`
    sides: dict[str, list[str]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    answer: dict[str, Any] | None = None  # of the doctor
    failed: str = ""  # why it, or what was to be measured, did not come to its end
    skipped: str = ""  # why the case cannot be set up here, or that nothing is broken

    @property
    def first(self) -> dict[str, Any]:
        """The doctor's first advice; empty where there is none."""
        found: dict[str, Any] = next(iter((self.answer or {}).get("advice") or []), {})
        return found

    def gain(self, side: str) -> float | None:
        """The measured gain of a side."""
        broken, other = self.rates.get("broken"), self.rates.get(side)
        return statistics.median(other) / statistics.median(broken) if broken and other else None

    @property
    def error(self) -> float | None:
        """Of the predicted gain; only where the right cause is named."""
        gain = self.gain("advised") or self.gain("repaired")
        return self.first["gain"] / gain - 1 if gain and self.first and self.is_named else None

    @property
    def is_named(self) -> bool:
        """Whether the first advice has the cause; of a healthy run, whether nothing much is advised."""
        if self.cause == HEALTHY:
            return self.answer is not None and self.first.get("gain", 1.0) <= HARMLESS
        return bool(self.first.get("cause") == self.cause)

    @property
    def is_right(self) -> bool:
        """The cause, and the gain."""
        return self.is_named and (self.cause == HEALTHY or (self.error is not None and abs(self.error) <= NEAR))

    def cells(self, work: Path) -> list[str]:
        """Of the table."""
        command = " ".join(self.sides.get("broken", ())).replace(f"{work}/", "")
        measured = _times(self.gain("repaired"))
        if (gain := self.gain("advised")) is not None:
            measured = f"{_times(gain)} (repaired otherwise: {measured})"
        said = f"{self.first['cause']}: {self.first['change']}" if self.first else "none" if self.answer else "–"
        right = "yes" if self.is_right else "cause only" if self.is_named else "no"
        right = "skipped" if self.skipped else "failed" if self.failed else right if self.answer else "–"
        error = "–" if self.error is None else f"{self.error:+.0%}"
        return [self.cause, f"`{command}`", said, _times(self.first.get("gain")), measured, error, right]


def _times(gain: float | None) -> str:
    return "–" if gain is None else f"×{gain:.2f}"


def run_case(case: BrokenRun, data: DataSets, rounds: int, seconds: float) -> Result:
    """Ask the doctor and measure; each run is deleted when it was read."""
    result = Result(case.cause)
    try:
        common = data.filled(case.command)
        result.sides["broken"] = common + data.filled(case.broken)
        if case.cause != HEALTHY:
            result.sides["repaired"] = common + data.filled(case.repaired)
        _ask(case, result, data.work, seconds)
        for number, name, arguments in harness.turns(result.sides, rounds):
            run, updates = data.work / "run", case.updates[name != "broken"]
            command = [*harness.CONVOY, "train", *arguments, "--epochs", f"{updates}ba", "--out", str(run)]
            around = case.around if name == "broken" else case.around_repaired or case.around
            try:
                around.run(command, data.work, seconds)
                *_, batch = re.findall(r"--batch (\d+)", " ".join(arguments))
                rate = steady_rate(run, case.by_clock_from, int(batch))
            finally:
                shutil.rmtree(run, ignore_errors=True)
            result.rates.setdefault(name, []).append(rate)
            harness.say(f"round {number + 1}: {case.cause}, {name}: {rate:,.1f} images/s")
        gains = [gain for side in ("repaired", "advised") if (gain := result.gain(side))]
        if gains and max(gains) < HARMLESS and not (result.failed or result.is_named):
            result.skipped = f"nothing is broken on this machine: put right, it is ×{max(gains):.2f} as fast"
    except CannotBeSetUpError as error:
        result.skipped = str(error)
    except RunFailedError as error:
        result.failed = str(error)
    return result


def _ask(case: BrokenRun, result: Result, work: Path, seconds: float) -> None:
    command = [*harness.CONVOY, "doctor", "train", *result.sides["broken"], "--json"]
    if not any(word.startswith("evaluate_every=") for word in command):  # what is measured is without evaluations
        command += ["--set", "evaluate_every=20ep"]
    try:
        result.answer = json.loads(case.around.run(command, work, seconds))
    except (RunFailedError, ValueError) as error:
        result.failed = f"the doctor: {error}"
        return
    if case.cause == HEALTHY or not result.is_named or not result.first["arguments"]:
        return
    if pack := _PACK.search(result.first["change"]):
        subprocess.run([*harness.CONVOY, *shlex.split(pack[0])[1:]], cwd=work, check=True, capture_output=True)
    if case.by_arguments or pack:
        result.sides["advised"] = replaced(result.sides["broken"], result.first["arguments"])


def steady_rate(run: Path, by_clock_from: int | None, batch: int) -> float:
    """Images a second of a run without its beginning."""
    lines = harness.lines_of(run)
    begin = lines[-1]["step"] / 3 if by_clock_from is None else by_clock_from
    lines = [line for line in lines if line["step"] >= begin]
    if by_clock_from is None:
        seconds = sum((two["step"] - one["step"]) * batch / two["images_per_s"] for one, two in pairwise(lines))
    else:
        seconds = lines[-1]["time_s"] - lines[0]["time_s"]
    rate: float = (lines[-1]["step"] - lines[0]["step"]) * batch / seconds
    return rate


def summary(report: harness.Report, results: Sequence[Result]) -> None:
    """How many are right, and why some cannot be."""
    for r in results:
        if r.skipped or r.failed:
            report.print(f"\n{r.cause}: {'skipped' if r.skipped else 'failed'}, {r.skipped or r.failed}")
    broken = [r for r in results if r.answer is not None and r.cause != HEALTHY and not r.skipped]
    if broken:
        named, right = (sum(getattr(r, name) for r in broken) for name in ("is_named", "is_right"))
        said = f"Of {len(broken)} broken runs the first advice names the cause of {named}"
        report.print(f"\n{said}, {right} of them with a gain within {NEAR:.0%} of what was measured.")
    for r in results:
        if r.cause == HEALTHY and r.answer is not None:
            report.print(f"\nThe healthy run is {'promised no' if r.is_named else 'PROMISED'} gain above {HARMLESS}.")


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    names = list(dict.fromkeys(case.cause for case in broken_runs.CASES))
    harness.choice(parser, "--cases", names, names)
    parser.add_argument("--others", action="store_true", help="the faults in other networks and other amounts")
    parser.add_argument("--photographs", type=Path, help="folder of large JPEG files, for the cases that decode")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a run is given up")
    options = parser.parse_args()
    results: list[Result] = []
    with harness.report(options.out) as report, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        os.environ["CONVOY_CACHE"] = f"{folder}/cache"  # what other runs have measured decides nothing
        data = DataSets(options.photographs, Path(folder), stack)
        report.header("case", "command", "first advice", "predicted gain", "measured gain", "error", "right?")
        cases = broken_runs.OTHERS if options.others else broken_runs.CASES
        for case in (case for name in options.cases for case in cases if case.cause == name):
            results.append(run_case(case, data, options.rounds, options.timeout))
            report.row(*results[-1].cells(Path(folder)), **asdict(results[-1]))
        summary(report, results)


if __name__ == "__main__":
    main()
