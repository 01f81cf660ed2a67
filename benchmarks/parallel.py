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
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from measuring import machine, ranks
from measuring.case_runs import CaseRun
from measuring.cases import CASES, OTHERS
from measuring.link import bits_per_second
from measuring.results import markdown
from measuring.sides import PEERS

from convoy.bench.emulated import Cluster, emulate
from convoy.errors import ConvoyError


def main() -> None:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and processes are cleaned up
    try:
        _run(arguments)
    except ConvoyError as error:
        raise SystemExit(f"{error}") from None


def _run(arguments: argparse.Namespace) -> None:
    everything = {**CASES, **OTHERS}
    unknown = set(arguments.cases) - set(everything)
    if unknown:
        raise ConvoyError(f"there is no case {min(unknown)}: there are {', '.join(everything)}")
    ranks.prepare()
    about = machine.describe()
    if about["cores"] < 2:
        raise ConvoyError("two devices of one core each need two cores, but here is one")
    tables = [f"{about['date']}: `{about['command']}`", machine.sentence(about)]
    document = {"machine": about, "link": arguments.link, "cases": []}
    with ExitStack() as stack:
        places = stack.enter_context(emulate(Cluster.alike(2, rate=arguments.link))) if arguments.link else []
        if places:
            document["link_bits_per_second"] = rate = ranks.run_ranks(bits_per_second, 2, 2**25, places=places)[0]
            tables.append(f"Between the hosts {arguments.link}; an all-reduce moved {rate / 1e9:.2f} Gbit/s each way.")
        print("\n".join(tables), flush=True)
        for name in arguments.cases:
            results = CaseRun(
                everything[name].changed(arguments.batch, arguments.updates),
                arguments.rounds,
                places,
                arguments.peers,
                arguments.compile,
                arguments.timeout,
                lambda text: print(f"  {text}", file=sys.stderr, flush=True),
            )()
            document["cases"].append(results.to_dict())
            tables.append(markdown(results))
            print(f"\n{tables[-1]}", flush=True)
            _store(arguments.out, document, tables)
    print(f"\nstored in {arguments.out}")


def _store(folder: Path, document: dict[str, object], tables: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parallel.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "parallel.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=_names, default=list(CASES), help=f"of {', '.join([*CASES, *OTHERS])}")
    parser.add_argument("--peers", type=_names, default=list(PEERS), help=f"of {', '.join(PEERS)}; '' for none")
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--updates", type=_positive, help="timed in a round (default: those of the case)")
    parser.add_argument("--batch", type=_positive, help="global batch (default: that of the case)")
    parser.add_argument("--link", metavar="RATE", help="between two emulated hosts, e.g. 1gbit")
    parser.add_argument("--compile", action="store_true", help="measure compiled sides too")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a side is given up")
    parser.add_argument("--out", type=Path, default=Path("parallel-results"), help="folder for JSON and Markdown")
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number from 1")
    return int(text)


if __name__ == "__main__":
    main()
