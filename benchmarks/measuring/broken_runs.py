"""Runs that are slow for one reason each, and how each is repaired; and a healthy one (`broken_runs.yaml`)."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from convoy import resources as cores
from convoy.bench.emulated import Cluster, ClusterDevice, EmulatedDevice, emulate
from convoy.errors import ConvoyError
from measuring.slow_storage import missing, slow

HEALTHY = "healthy"
STORAGE_RATE = 6e6
"""Bytes a second of the slow storage: some 55 photographs of 110 kB."""
_LINKS = 12
"""To each photograph, so that no epoch ends while a run is measured."""


class CannotBeSetUpError(Exception):
    """This machine, or what is installed, does not do for a case."""


@dataclass(frozen=True)
class Surroundings:
    """Where a run takes place."""

    cores: int | None = None  # how many of this machine's it may use; None for all
    busy: bool = False  # another process keeps the first of them busy
    cluster: Cluster | None = None  # emulated, with a rank on every device, in place of this machine's cores

    @contextmanager
    def made(self) -> Iterator["Place"]:
        """The surroundings, gone when the context is left."""
        available = cores.own_cores()[: self.cores]
        with ExitStack() as stack:
            devices: Sequence[EmulatedDevice] = ()
            if self.cluster is not None:
                try:
                    devices = stack.enter_context(emulate(self.cluster))
                except ConvoyError as error:
                    raise CannotBeSetUpError(str(error)) from error
            if self.busy:
                stack.enter_context(_busy(available[0]))
            yield Place(tuple(available), tuple(devices))


@dataclass(frozen=True)
class Place:
    """Surroundings that are there: starts processes in them."""

    cores: tuple[int, ...]
    devices: tuple[EmulatedDevice, ...]

    def start(self, command: Sequence[str], folder: Path) -> list[subprocess.Popen[bytes]]:
        """One process for each emulated device, or one; what they say goes to files `out-RANK` and `err-RANK`."""
        started: list[subprocess.Popen[bytes]] = []
        for rank in range(max(len(self.devices), 1)):
            environment = dict(os.environ)
            if self.devices:
                environment |= self.devices[rank].environment
            if len(self.devices) > 1:
                num = str(len(self.devices))
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num}
            with (folder / f"out-{rank}").open("wb") as out, (folder / f"err-{rank}").open("wb") as err:
                started.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        env=environment,
                        start_new_session=True,  # so that all that a run has started can be ended
                        preexec_fn=self.devices[rank].enter if self.devices else self._pin,
                    )
                )
        return started

    def _pin(self) -> None:
        os.sched_setaffinity(0, self.cores)


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


def _surroundings(words: Mapping[str, Any]) -> Surroundings:
    """From the table: `cores`, `busy`; or emulated `devices` by speed, in one host or in two with a `link`."""
    speeds = words.get("devices", [])
    hosts = ["a", "b" if words.get("hosts") == 2 else "a"]
    devices = tuple(ClusterDevice(speed, host) for speed, host in zip(speeds, hosts, strict=False))
    cluster = Cluster(devices, words.get("link", "")) if devices else None
    return Surroundings(words.get("cores"), words.get("busy", False), cluster)


def _run(words: Mapping[str, Any]) -> BrokenRun:
    places = {key: _surroundings(words[key]) for key in ("around", "around_repaired") if key in words}
    return BrokenRun(**{**words, "updates": tuple(words.get("updates", (60, 60))), **places})


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CASES, OTHERS = (tuple(map(_run, _TABLE[key])) for key in ("cases", "others"))


@dataclass
class DataSets:
    """The data of the cases, each made when an argument first asks for it, and gone with the context."""

    photographs: Path | None  # class folders
    work: Path  # an empty folder
    _made: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "DataSets":
        return self

    def __exit__(self, *ending: object) -> None:
        self._stack.close()

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
        command = (sys.executable, "-m", "convoy", "data", "pack", source, str(folder), "--short-side", "64", "--raw")
        subprocess.run(command, check=True, capture_output=True)
        return folder

    def _slow(self) -> Path:
        if reason := missing():
            raise CannotBeSetUpError(reason)
        source, folder = self.filled("{photos}")[0], self.work / "slow"
        self._stack.enter_context(slow(Path(source), folder, STORAGE_RATE))
        return folder


@contextmanager
def _busy(core: int) -> Iterator[None]:
    """A process that computes all the time on one core."""
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nparent = {os.getpid()}\nwhile os.getppid() == parent: pass"
    process = subprocess.Popen((sys.executable, "-I", "-S", "-c", code), stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()
