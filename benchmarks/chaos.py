"""Kills ranks of a training at random moments, and compares its weights with those of the training left alone.

    python benchmarks/chaos.py                      50 kills, 2 devices
    python benchmarks/chaos.py --kills 3 --devices 3

Each time a random rank gets SIGKILL: at any moment, or when it is in the forward or backward pass, in a collective, or
while a checkpoint is written, in turn. `convoy train --max-restarts` starts the ranks again. Prints how often what was
hit, how many updates were lost, and how long it took until the next update was done; exit status 1 where the weights or
the curve are not, bit for bit, those of the run that was left alone.
"""

import argparse
import hashlib
import json
import os
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from measuring.phases import environment, seen

TARGETS = ("any moment", "forward", "backward", "collective", "checkpoint write")
_PATIENCE_S = 3.0
_STUCK_S = 120.0


@dataclass
class Kill:
    """One of them.

    Attributes:
        phase: what the rank was doing.
        updates: that the run had done.
        lost: of them, those done again.
        seconds: until the next update was done.
    """

    phase: str
    updates: int
    lost: int = 0
    seconds: float = 0.0


class Run:
    """A training in the background, which ends with the context that it is for."""

    def __init__(self, arguments: list[str], folder: Path, out: Path) -> None:
        self.phases, self.checkpoints, self.log = folder / "phases", out / "checkpoints", folder / f"{out.name}.log"
        with environment(self.phases) as variables, self.log.open("w") as file:
            variables |= {"TMPDIR": str(folder)}  # what it leaves there when it is killed goes with the folder
            self.process = subprocess.Popen(arguments, env=variables, stdout=file, stderr=subprocess.STDOUT)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what still runs: the launcher, which must not start others meanwhile, and its ranks."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        ranks = [os.pidfd_open(pid) for pid in self._children()]
        for rank in ranks:
            signal.pidfd_send_signal(rank, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for rank in ranks:
            select.select([rank], [], [])
            os.close(rank)

    def finish(self) -> None:
        """Wait for its end."""
        if self.process.wait(600) != 0:
            raise SystemExit(f"the run ended with status {self.process.returncode}:\n{self.log.read_text()}")

    def _children(self) -> list[int]:
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended
                found += [int(pid) for pid in task.read_text().split()]
        return found

    def ranks(self) -> dict[int, int]:
        """Process numbers of the ranks that run."""
        found = {}
        for pid in self._children():
            try:
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = next((entry[5:] for entry in entries if entry.startswith(b"RANK=")), None)
            if rank is not None:
                found[int(rank)] = pid
        return found

    def resumed(self) -> list[int]:
        """The updates after which the run went on, one for each restart so far that came so far."""
        found = re.findall(r"going on after ([\d,]+) of", self.log.read_text(errors="replace"))
        return [int(number.replace(",", "")) for number in found]

    def wait_for_update(self, gone: set[int], devices: int) -> dict[int, int]:
        """Wait until new ranks, all of them, have done an update; their process numbers."""
        until = time.monotonic() + _STUCK_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended with status {self.process.returncode}:\n{self.log.read_text()}")
            ranks = self.ranks()
            new = len(ranks) == devices and not gone & set(ranks.values())
            if new and all(seen(self.phases, pid)[1] for pid in ranks.values()):
                return ranks
            time.sleep(0.002)
        raise SystemExit(f"the run does not go on:\n{self.log.read_text()}")

    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(path.name.startswith(".") for path in self.checkpoints.glob(".*"))

    def phase(self, pid: int) -> str:
        """What a rank does; the writing of a checkpoint goes before all else."""
        return "checkpoint write" if self.writing() else seen(self.phases, pid)[0]


def strike(run: Run, ranks: dict[int, int], target: str, begun: int) -> Kill:
    """Kill one rank when it does what it is to be killed in, or after some seconds in whatever it does."""
    time.sleep(random.uniform(0.0, 0.6))
    pid = ranks[random.choice(sorted(ranks))]
    until = time.monotonic() + _PATIENCE_S
    while target != "any moment" and time.monotonic() < until:
        if run.phase(pid) == target:
            break
    phase = run.phase(pid)
    os.kill(pid, signal.SIGKILL)
    return Kill(phase, begun + seen(run.phases, pid)[1])


def torment(run: Run, kills: int, devices: int) -> list[Kill]:
    """Kill ranks so often; the run then goes on to its end."""
    found: list[Kill] = []
    ranks = run.wait_for_update(set(), devices)
    begun = 0
    for number in range(kills):
        kill = strike(run, ranks, TARGETS[number % len(TARGETS)], begun)
        struck = time.monotonic()
        ranks = run.wait_for_update(set(ranks.values()), devices)
        kill.seconds = time.monotonic() - struck
        begun = run.resumed()[-1]
        kill.lost = max(0, kill.updates - begun)
        found.append(kill)
        print(f"kill {number + 1}: {kill.phase}, {kill.lost} updates lost, {kill.seconds:.1f} s", flush=True)
    return found


def digest(out: Path) -> str:
    """SHA-256 of the final weights."""
    return hashlib.sha256((out / "weights.safetensors").read_bytes()).hexdigest()


def curve(out: Path) -> list[tuple[object, ...]]:
    """All metrics but those of time."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [tuple(line.get(key) for key in ("split", "step", "loss", "top1", "lr", "images")) for line in lines]


def command(out: Path, arguments: argparse.Namespace) -> list[str]:
    settings = {"checkpoint.every": f"{arguments.every}ba", "log_every": "10ba", "evaluate_every": "200ba"}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    options = ["--data", arguments.data, "--batch", "64", "--microbatches", "8", "--reproducible"]
    options += ["--devices", str(arguments.devices), "--epochs", f"{arguments.updates}ba", "--out", str(out)]
    return [sys.executable, "-m", "convoy", "train", "measuring.phases:lenet", *options, *sets]


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill ranks of a training, and compare its weights.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--updates", type=int, default=3500, help="of the run: enough for all kills")
    parser.add_argument("--every", type=int, default=20, help="updates between two checkpoints")
    parser.add_argument("--data", default="mnist-mini")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and ranks")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="convoy-chaos-") as name:
        folder = Path(name)
        whole, parts = folder / "whole", folder / "parts"
        with Run(command(whole, arguments), folder, whole) as run:
            run.finish()
        restarts = ["--max-restarts", str(arguments.kills)]
        with Run([*command(parts, arguments), *restarts], folder, parts) as run:
            kills = torment(run, arguments.kills, arguments.devices)
            run.finish()
        lost, seconds = [kill.lost for kill in kills], [kill.seconds for kill in kills]
        hit = Counter(kill.phase for kill in kills)
        print(f"kills            {len(kills)}: {', '.join(f'{n} in {phase}' for phase, n in hit.most_common())}")
        print(f"lost updates     {sum(lost)} in all, median {statistics.median(lost):g}, worst {max(lost)}")
        print(f"time to go on    median {statistics.median(seconds):.1f} s, worst {max(seconds):.1f} s")
        same = digest(parts) == digest(whole), curve(parts) == curve(whole)
        print(f"weights          {'bit-identical' if same[0] else 'DIFFERENT'}")
        print(f"metrics          {'identical' if same[1] else 'DIFFERENT'}")
        return 0 if all(same) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started ends then, too
    sys.exit(main())
