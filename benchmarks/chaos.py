"""Breaks trainings, their files and their data in many ways, and looks at what has come of each.

    python benchmarks/chaos.py                       all faults, a table in Markdown at the end
    python benchmarks/chaos.py --only 'SIG|disk'     those with a name like this
    python benchmarks/chaos.py --list                what there is, and what has to come out
    python benchmarks/chaos.py --kills 50            one run whose ranks are killed so often

Every fault is a row of `measuring/faults.yaml`: how it is done and what has to come out. A run is held at a place of
its training while it is struck, and its weights and metrics are compared, bit for bit, with those of the run left
alone. The network and its data are tiny, so that a fault takes seconds; those that need root, mounts or programs that
are not here are skipped, with the reason. Exit status 1 where something did not come out.
"""

import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from measuring import harness
from measuring.blows import do, lacking, prepare
from measuring.faults import FAULTS, Case


def cells(case: Case, skipped: str) -> list[str]:
    """Of the table: what was done, or why it was skipped."""
    fault, seconds = case.fault, "" if case.seconds is None else f"{case.seconds:.1f} s"
    came = f"skipped: {skipped}" if skipped else "; ".join(case.wrong) or "yes"
    came += ", bit-identical" if case.identical else ""
    lost = "" if case.lost is None else str(case.lost)
    found = (fault.name, fault.how, fault.promise, lost, seconds, case.sentence, came)
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in found]


def main() -> int:
    """Do the faults that are asked for."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", metavar="PATTERN", default="", help="faults whose names have this in them")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--kills", type=int, default=3, help="how often ranks are killed in `kill, again and again`")
    parser.add_argument("--slack", type=float, default=1.0, help="factor for all limits of time, on a busy machine")
    arguments = parser.parse_args()
    chosen = [one for one in FAULTS if re.search(arguments.only, one.name)]
    if arguments.list:
        print("\n".join(f"{one.name:32}{one.promise:42}{one.how}" for one in chosen))
        return 0
    done = []
    with tempfile.TemporaryDirectory(prefix="convoy-chaos-") as name:
        shared = Path(name).resolve() / "shared"
        prepare(shared)
        for number, fault in enumerate(chosen):
            case = Case(fault, shared, shared.parent / f"case-{number}", arguments.slack, arguments.kills)
            if not (reason := lacking(fault.needs)):
                do(case)
            shutil.rmtree(case.folder, ignore_errors=True)
            done.append((case, reason))
            print(f"{fault.name}: {'; '.join(case.wrong) or reason or 'as promised'}", flush=True)
    wrong, skipped = sum(bool(case.wrong) for case, _ in done), sum(bool(reason) for _, reason in done)
    print()
    with harness.report(arguments.out) as report:
        report.header("fault", "how", "has to come out", "lost updates", "noticed", "said", "came out")
        for case, reason in done:
            report.row(*cells(case, reason))
        report.print(f"\n{len(done)} faults: {wrong} came out wrong, {skipped} skipped")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started ends then, too
    sys.exit(main())
