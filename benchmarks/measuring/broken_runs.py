"""Runs that are slow for one reason each, and how each is repaired; and a healthy one (`broken_runs.yaml`)."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from convoy import resources as cores
from convoy.bench.emulated import Cluster, ClusterDevice, EmulatedDevice, emulate
from convoy.errors import ConvoyError
from measuring import harness
from measuring.slow_storage import missing, slow

HEALTHY = "healthy"
STORAGE_RATE = 6e6
"""Bytes a second of the slow storage: some 55 photographs of 110 kB."""
_LINKS = 12
"""To each photograph, so that no epoch ends while a run is measured."""
_PATIENCE_S = 10.0
_BUSY = """
import os, sys
os.sched_setaffinity(0, [int(sys.argv[1])])
while os.getppid() == int(sys.argv[2]): pass
"""


class CannotBeSetUpError(Exception):
    """This machine, or what is installed, does not do for a case."""


class RunFailedError(Exception):
    """A run or the doctor did not come to its end."""


@dataclass(frozen=True)
class Surroundings:
    """Where a run takes place."""

    cores: int | None = None  # how many of this machine's it may use; None for all
    busy: bool = False  # another process keeps the first of them busy
    cluster: Cluster | None = None  # emulated, with a rank on every device, in place of this machine's cores

    def run(self, command: Sequence[str], work: Path, seconds: float) -> str:
        """What the first rank prints, of one process for each emulated device, or of one."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=work)))
            available, devices = cores.own_cores()[: self.cores], list[EmulatedDevice]()
            if self.cluster is not None:
                try:
                    devices = list(stack.enter_context(emulate(self.cluster)))
                except ConvoyError as error:
                    raise CannotBeSetUpError(str(error)) from error
            if self.busy:
                stack.enter_context(harness.beside(_BUSY, available[0], os.getpid()))
            processes = stack.enter_context(_ended())
            for rank in range(max(len(devices), 1)):
                processes.append(_start(command, folder, rank, devices, available))
            until = time.monotonic() + seconds
            try:
                codes = [process.wait(max(until - time.monotonic(), 0)) for process in processes]
            except subprocess.TimeoutExpired:
                raise RunFailedError(f"took more than {seconds:.0f} s") from None
            for rank, code in enumerate(codes):
                if code:
                    lines = (folder / f"err-{rank}").read_text(errors="replace").strip().splitlines()
                    raise RunFailedError(lines[-1] if lines else f"exit status {code}")
            return (folder / "out-0").read_text(encoding="utf-8")


def _start(
    command: Sequence[str], folder: Path, rank: int, devices: Sequence[EmulatedDevice], available: Sequence[int]
) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if devices:
        environment |= devices[rank].environment
    if (num := len(devices)) > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num}
        environment |= {name: str(value) for name, value in places.items()}
    with (folder / f"out-{rank}").open("wb") as out, (folder / f"err-{rank}").open("wb") as err:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,  # so that all that a run has started can be ended
            preexec_fn=devices[rank] if devices else lambda: os.sched_setaffinity(0, available),
        )


@contextmanager
def _ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are gone, with all that they have started, when the context is left."""
    processes: list[subprocess.Popen[bytes]] = []
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


@dataclass(frozen=True)
class BrokenRun:
    """A run of `convoy train` that one thing holds back.

    In arguments `{photos}` is a folder of large photographs, `{packed}` the same as `convoy data pack` has them, and
    `{slow}` the same on slow storage.
    """

    cause: str  # in the words of `convoy doctor`
    command: str  # of both runs: the network, its data and what does not change
    broken: str = ""
    repaired: str = ""  # further arguments of each
    updates: tuple[int, int] = (60, 60)  # of each run
    around: Surroundings = Surroundings()
    around_repaired: Surroundings | None = None  # of each run; the latter None where nothing changes
    by_clock_from: int | None = None
    by_arguments: bool = True  # the arguments that the doctor gives are all that its change needs

    @staticmethod
    def of(words: Mapping[str, Any]) -> "BrokenRun":
        """From a row of the table."""
        places = {key: _surroundings(words[key]) for key in ("around", "around_repaired") if key in words}
        return BrokenRun(**{**words, "updates": tuple(words.get("updates", (60, 60))), **places})


def _surroundings(words: Mapping[str, Any]) -> Surroundings:
    """`cores`, `busy`; or emulated `devices` by speed, in one host or in two with a `link`."""
    hosts = ["a", "b" if words.get("hosts") == 2 else "a"]
    devices = tuple(ClusterDevice(speed, host) for speed, host in zip(words.get("devices", []), hosts, strict=False))
    cluster = Cluster(devices, words.get("link", "")) if devices else None
    return Surroundings(words.get("cores"), words.get("busy", False), cluster)


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CASES, OTHERS = (tuple(map(BrokenRun.of, _TABLE[key])) for key in ("cases", "others"))


@dataclass
class DataSets:
    """The data of the cases, each made when an argument first asks for it, and gone with the stack."""

    photographs: Path | None  # class folders
    work: Path  # an empty folder
    stack: ExitStack
    _made: dict[str, str] = field(default_factory=dict)

    def filled(self, words: str) -> list[str]:
        """Arguments with the names of the data in their places."""
        for name, make in (("photos", self._photos), ("packed", self._packed), ("slow", self._slow)):
            if f"{{{name}}}" in words and name not in self._made:
                self._made[name] = str(make())
        return words.format(**self._made).split()

    def _photos(self) -> Path:
        if self.photographs is None or not self.photographs.is_dir():
            raise CannotBeSetUpError("photographs are needed: --photographs FOLDER")
        folder = self.work / "photos"
        for number, source in enumerate(sorted(self.photographs.rglob("*"))):
            if source.suffix.lower() in (".jpg", ".jpeg"):
                into = folder / f"class{number % 10}"
                into.mkdir(parents=True, exist_ok=True)
                for link in range(_LINKS):
                    (into / f"{link}-{source.name}").symlink_to(source.resolve())
        return folder

    def _packed(self) -> Path:
        source, folder = self.filled("{photos}")[0], self.work / "packed"
        harness.run_convoy("data", "pack", source, str(folder), "--short-side", "64", "--raw")
        return folder

    def _slow(self) -> Path:
        if reason := missing():
            raise CannotBeSetUpError(reason)
        source, folder = self.filled("{photos}")[0], self.work / "slow"
        self.stack.enter_context(slow(Path(source), folder, STORAGE_RATE))
        return folder
