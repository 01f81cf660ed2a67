"""Runs that are slow for one reason each, and how each is repaired; and a healthy one."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from convoy.bench.emulated import Cluster, ClusterDevice, EmulatedDevice, emulate
from convoy.errors import ConvoyError
from convoy.launch import cores
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
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables

    @contextmanager
    def made(self) -> Iterator["Place"]:
        """The surroundings, gone when the context is left."""
        own = cores.own_cores()
        own = own if self.cores is None else own[: self.cores]
        with ExitStack() as stack:
            devices: Sequence[EmulatedDevice] = ()
            if self.cluster is not None:
                try:
                    devices = stack.enter_context(emulate(self.cluster))
                except ConvoyError as error:
                    raise CannotBeSetUpError(str(error)) from error
            if self.busy:
                stack.enter_context(_busy(own[0]))
            yield Place(tuple(own), tuple(devices), self.environment)


@dataclass(frozen=True)
class Place:
    """Surroundings that are there: starts processes in them."""

    cores: tuple[int, ...]
    devices: tuple[EmulatedDevice, ...]
    environment: Mapping[str, str]

    def start(self, command: Sequence[str], folder: Path) -> list[subprocess.Popen[bytes]]:
        """One process for each emulated device, or one; what they say goes to files `out-RANK` and `err-RANK`."""
        started: list[subprocess.Popen[bytes]] = []
        for rank in range(max(len(self.devices), 1)):
            environment = {**os.environ, **self.environment}
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


ONE_CORE = Surroundings(cores=1)


def _pair(link: str = "", second: float = 1.0, hosts: int = 1) -> Surroundings:
    """Two emulated devices, in one host or in two."""
    devices = (ClusterDevice(1.0, "a"), ClusterDevice(second, "a" if hosts == 1 else "b"))
    return Surroundings(cluster=Cluster(devices, link))


CASES = (
    BrokenRun(
        "workers",
        "squeezenet1_1 --data {photos} --batch 64 --set data.image_size=64 --set threads=1",
        "--workers 0",
        "--workers 1",
        (20, 30),
    ),
    BrokenRun(
        "storage",
        "squeezenet1_1 --data {photos} --batch 16 --set data.image_size=64",
        "--data {slow}",
        updates=(24, 60),
        by_arguments=False,
    ),
    BrokenRun(
        "decoding",
        "squeezenet1_1 --batch 64 --set data.image_size=32",
        "--data {photos}",
        "--data {packed}",
        (30, 40),
        by_arguments=False,
    ),
    BrokenRun("batch", "squeezenet1_1 --data mnist-mini --set threads=1", "--batch 4", "--batch 64", (300, 60)),
    BrokenRun(
        "microbatch",
        "resnet34 --data mnist-mini --batch 64 --reproducible",
        "--set microbatch=4",
        "--set microbatch=32",
        (12, 24),
    ),
    BrokenRun(
        "plan",
        "squeezenet1_1-cifar --data mnist-mini --batch 64 --devices 2",
        "--plan filter=2",
        "--plan sample=2",
        (15, 30),
    ),
    BrokenRun(
        "link",
        "squeezenet1_1-cifar --data mnist-mini --batch 256 --plan sample=2",
        updates=(7, 10),
        around=_pair("60mbit", hosts=2),
        around_repaired=_pair("10gbit", hosts=2),
        by_arguments=False,
    ),
    BrokenRun(
        "shares",
        "resnet18 --data mnist-mini --batch 256",
        "--plan sample=2",
        "--shares auto",
        (15, 30),
        around=_pair(second=0.4),
    ),
    BrokenRun(
        "threads",
        "resnet18 --data mnist-mini --batch 64",
        "--set threads=8",
        "--set threads=1",
        (15, 30),
        around=ONE_CORE,
    ),
    BrokenRun(
        "busy",
        "resnet18 --data mnist-mini --batch 64",
        updates=(20, 40),
        around=Surroundings(cores=1, busy=True),
        around_repaired=ONE_CORE,
        by_arguments=False,
    ),
    BrokenRun(
        "limit",
        "resnet18 --data mnist-mini --batch 64",
        updates=(20, 40),
        around=Surroundings(cluster=Cluster.alike(1, 0.5)),
        around_repaired=Surroundings(cluster=Cluster.alike(1)),
        by_arguments=False,
    ),
    BrokenRun(
        "devices", "lenet --data mnist-mini --batch 64", "--devices 2", "--devices 1", (300, 600), around=ONE_CORE
    ),
    BrokenRun(
        "evaluation",
        "resnet18 --data mnist-mini --batch 64",
        "--set evaluate_every=5ba",
        "--set evaluate_every=1ep",
        (93, 124),
        by_clock_from=62,
    ),
    BrokenRun(
        "checkpoint",
        "resnet18 --data mnist-mini --batch 64",
        "--set checkpoint.every=2ba",
        "--set checkpoint.every=auto",
        (16, 40),
        by_clock_from=4,
    ),
    BrokenRun(
        "precision", "resnet18-cifar --data mnist-mini --batch 64", "--precision fp32", "--precision bf16", (9, 15)
    ),
    BrokenRun(
        "memory_format", "resnet18-cifar --data mnist-mini --batch 64", "--channels-last", "--channels-first", (9, 15)
    ),
    BrokenRun(
        HEALTHY, "resnet18 --data mnist-mini --batch 128 --precision bf16 --set evaluate_every=5ep", updates=(20, 20)
    ),
)

OTHERS = (
    BrokenRun(
        "workers",
        "resnet18 --data {photos} --batch 32 --set data.image_size=32 --set threads=1",
        "--workers 0",
        "--workers 1",
        (20, 30),
    ),
    BrokenRun(
        "storage",
        "resnet18 --data {photos} --batch 32 --set data.image_size=48",
        "--data {slow}",
        updates=(14, 40),
        by_arguments=False,
    ),
    BrokenRun(
        "decoding",
        "squeezenet1_0 --batch 32 --set data.image_size=48",
        "--data {photos}",
        "--data {packed}",
        (40, 60),
        by_arguments=False,
    ),
    BrokenRun("batch", "resnet18 --data mnist-mini --set threads=1", "--batch 2", "--batch 32", (200, 40)),
    BrokenRun(
        "microbatch",
        "resnet18 --data mnist-mini --batch 96 --reproducible",
        "--set microbatch=3",
        "--set microbatch=48",
        (15, 30),
    ),
    BrokenRun(
        "plan",
        "resnet18-cifar --data mnist-mini --batch 64 --devices 2",
        "--plan filter=2",
        "--plan sample=2",
        (15, 30),
    ),
    BrokenRun(
        "link",
        "resnet18 --data mnist-mini --batch 512 --plan sample=2",
        updates=(12, 20),
        around=_pair("1gbit", hosts=2),
        around_repaired=_pair("10gbit", hosts=2),
        by_arguments=False,
    ),
    BrokenRun(
        "shares",
        "squeezenet1_1-cifar --data mnist-mini --batch 128 --set microbatch=16",
        "--plan sample=2",
        "--shares auto",
        (15, 30),
        around=_pair(second=0.6),
    ),
    BrokenRun(
        "threads",
        "squeezenet1_1 --data mnist-mini --batch 32",
        "--set threads=4",
        "--set threads=1",
        (40, 60),
        around=ONE_CORE,
    ),
    BrokenRun(
        "busy",
        "alexnet-cifar --data mnist-mini --batch 32",
        updates=(15, 30),
        around=Surroundings(cores=1, busy=True),
        around_repaired=ONE_CORE,
        by_arguments=False,
    ),
    *(
        BrokenRun(
            "busy",
            command,
            updates=updates,
            around=Surroundings(busy=True),
            around_repaired=Surroundings(),
            by_arguments=False,
        )
        for command, updates in (
            ("lenet --data mnist-mini --batch 128", (150, 400)),
            ("resnet18-cifar --data mnist-mini --batch 32", (9, 18)),
        )
    ),
    BrokenRun(
        "limit",
        "squeezenet1_1 --data mnist-mini --batch 128",
        updates=(15, 40),
        around=Surroundings(cluster=Cluster.alike(1, 0.3)),
        around_repaired=Surroundings(cluster=Cluster.alike(1)),
        by_arguments=False,
    ),
    BrokenRun(
        "devices",
        "cifar-quick --data mnist-mini --set data.image_size=32 --batch 64",
        "--devices 2",
        "--devices 1",
        (200, 400),
        around=ONE_CORE,
    ),
    BrokenRun(
        "evaluation",
        "squeezenet1_1 --data mnist-mini --batch 32",
        "--set evaluate_every=8ba",
        "--set evaluate_every=2ep",
        (250, 375),
        by_clock_from=125,
    ),
    BrokenRun(
        "checkpoint",
        "resnet50 --data mnist-mini --batch 16",
        "--set checkpoint.every=3ba",
        "--set checkpoint.every=auto",
        (24, 60),
        by_clock_from=4,
    ),
    BrokenRun(HEALTHY, "resnet18-cifar --data mnist-mini --batch 64 --devices 2 --precision auto", updates=(20, 20)),
)
"""The same faults in other networks, batches and amounts; no rule of the doctor was written with these at hand."""


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
