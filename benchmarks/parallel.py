"""Two devices beside one, and Convoy beside its peers: seconds of a weight update, all sides in turn in one run.

    python benchmarks/parallel.py                                       all cases
    python benchmarks/parallel.py --cases alexnet-32 --link 1gbit       two emulated hosts, as root
    python benchmarks/parallel.py --cases resnet18 --compile            with compiled sides beside the others

A device is one core and one thread, also where one device runs alone. Every measurement is one of fresh processes;
the sides take turns for some rounds, and the median over the rounds counts. One device gets the best of its
arrangements (memory format, size of a pass), the data-parallel sides the one that is best for
DistributedDataParallel, and the best plan is found in trials before the rounds, which do not count. Lightning Fabric
and accelerate are measured if they are installed (pip install lightning accelerate).
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measuring import harness, machine, ranks
from measuring.case_runs import CaseRun
from measuring.cases import CASES, OTHERS
from measuring.link import bits_per_second
from measuring.results import markdown
from measuring.sides import PEERS

from convoy.bench.emulated import Cluster, emulate
from convoy.errors import ConvoyError

EVERYTHING = {**CASES, **OTHERS}


def main() -> None:
    options = _parser().parse_args()
    ranks.prepare()
    with harness.ended():
        _run(options)


def _run(options: argparse.Namespace) -> None:
    about = machine.describe()
    if about["cores"] < 2:
        raise ConvoyError("two devices of one core each need two cores, but here is one")
    tables = [f"{about['date']}: `{about['command']}`", machine.sentence(about)]
    document: dict[str, Any] = {"machine": about, "link": options.link, "cases": []}
    with ExitStack() as stack:
        places = stack.enter_context(emulate(Cluster.alike(2, rate=options.link))) if options.link else []
        if places:
            document["link_bits_per_second"] = rate = ranks.run_ranks(bits_per_second, 2, 2**25, places=places)[0]
            tables.append(f"Between the hosts {options.link}; an all-reduce moved {rate / 1e9:.2f} Gbit/s each way.")
        print("\n".join(tables), flush=True)
        for name in options.cases:
            case = EVERYTHING[name].changed(options.batch, options.updates)
            common = (case, options.rounds, places, options.peers, options.timeout, harness.say)
            results = CaseRun(*common, compiled=options.compile)()
            document["cases"].append(results.to_dict())
            tables.append(markdown(results))
            print(f"\n{tables[-1]}", flush=True)
            harness.save(options.out / "parallel.json", document)
            (options.out / "parallel.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    print(f"\nstored in {options.out}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    cases = f"of {', '.join(EVERYTHING)}"
    parser.add_argument("--cases", type=harness.some(EVERYTHING), default=list(CASES), help=cases)
    peers = f"of {', '.join(PEERS)}; '' for none"
    parser.add_argument("--peers", type=harness.some(PEERS), default=list(PEERS), help=peers)
    parser.add_argument("--rounds", type=harness.positive, default=3)
    parser.add_argument("--updates", type=harness.positive, help="timed in a round (default: those of the case)")
    parser.add_argument("--batch", type=harness.positive, help="global batch (default: that of the case)")
    parser.add_argument("--link", metavar="RATE", help="between two emulated hosts, e.g. 1gbit")
    parser.add_argument("--compile", action="store_true", help="measure compiled sides too")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a side is given up")
    parser.add_argument("--out", type=Path, default=Path("parallel-results"), help="folder for JSON and Markdown")
    return parser


if __name__ == "__main__":
    main()
