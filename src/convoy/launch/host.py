"""What the machine did while something ran: cores that others had, memory that was swapped, heat.

All is read from Linux's counters in `/proc` and `/sys`, at the beginning and again later. What a machine does not tell
(another system, a sandbox, an older kernel) is None, 0 or empty.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from convoy.launch.rank import FOLDER
from convoy.resources import cores_allowed, folders, own_cores, text_of
from convoy.terminal import printable

LEAST_CORES = 0.02  # other processes that use less are not named
# This variable, at 1, says that a machine is never quiet: times taken beside other processes are kept all the same.
SHARED = "CONVOY_SHARED"
# The share of its cores' time that a run may lose to other processes, and the error of the kernel's counters.
_DISTURBED, _TICKS_S = 0.1, 0.05
_INTERPRETERS = ("python", "bash", "sh", "java", "node", "perl", "ruby")
_KERNEL_THREAD = 0x0020_0000
_THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # in `cpu.stat` of a control group, with the unit
# Variables that the processes of one run have in common on a machine, which they inherit from what started them. No two
# runs have the same port for their ranks to meet.
_OF_RUN = ((FOLDER,), ("MASTER_ADDR", "MASTER_PORT"), ("SLURM_JOB_ID", "SLURM_STEP_ID"))


@dataclass(frozen=True)
class OtherProcess:
    """A process that is no part of the run."""

    name: str  # of the program, at most 15 characters, and of the script that it interprets
    pid: int
    # number of this process's cores that it kept busy, on average; a process that may also run elsewhere is counted by
    # where its threads ran last
    cores: float


@dataclass(frozen=True)
class HostLoad:
    """What the machine did in an interval, seen from one process; None where kernel or processor do not say."""

    wall_s: float  # length of the interval
    cpu_s: float  # processor time of this process, all its threads together
    cores: float  # number that it may use, by its affinity and the quotas of its control groups
    # seconds, summed over its living threads, in which they were ready to run but others had the core or a quota was
    # used up
    waited_s: float | None
    # seconds for which a quota of its control groups held them back, summed over cores; None where no group counts it
    throttled_s: float | None
    others: tuple[OtherProcess, ...]  # processes outside the run that kept these cores busy, the busiest first
    # number of these cores that all outside the run kept busy: also short-lived processes, the kernel, and processes
    # outside of the container
    others_cores: float | None
    run_cores: float  # number of them that the rest of the run kept busy: data workers, other ranks
    swapped_bytes: int  # in and out on the machine, by any process
    # seconds for which all work of this process's control group, or of the machine where groups do not say, waited for
    # memory
    memory_pressure_s: float | None
    hot_s: float | None  # seconds for which the core that was slowed most was slowed by heat

    @property
    def is_shared(self) -> bool:
        """Whether others had so much of the cores that times of this interval do not hold for the machine by itself."""
        taken_s = self.wall_s * (self.others_cores or 0.0)
        return taken_s > _DISTURBED * self.cores * self.wall_s + _TICKS_S

    @property
    def is_disturbed(self) -> bool:
        """The same, unless the user says that it is never otherwise."""
        return self.is_shared and os.environ.get(SHARED) != "1"

    @property
    def occupation(self) -> str:
        """How many cores others kept busy, and who most, in words."""
        who = f", {self.others[0].name} (process {self.others[0].pid}) most" if self.others else ""
        return f"{self.others_cores or 0.0:.2g} of {self.cores:g} cores busy{who}"


class _Process(NamedTuple):
    name: str
    parent: int
    cpu: float
    began: int
    is_kernel: bool


class HostWatch:
    """Counts what the machine does since it was made or last read.

    Making it and reading it take 2 ms each on a machine of 90 processes, 0.15 ms for ten more of them, 0.3 ms for ten
    threads more. Processes of the run are this one, all that it started, and those that the same launcher started (by
    torch's, Convoy's or Slurm's variables). `machine` is where the machine's `proc` and `sys` are.
    """

    def __init__(self, machine: Path = Path("/")) -> None:
        self._proc, self._sys = machine / "proc", machine / "sys"
        self._groups = self._proc / "self/cgroup", self._sys / "fs/cgroup"
        self._run = self._run_of("self")
        self._counters, self._processes = self._count(), dict(self._list())

    def read(self) -> HostLoad:
        begin, processes = self._counters, self._processes
        self._counters, self._processes = self._count(), dict(self._list())

        def grown(kind: str, first: float | None = None) -> list[float]:
            """By how much the counters of a kind have grown; new ones from `first`: of such kinds one that is lower
            than before belongs to another thread or group of this name. Idle time may become less by itself."""
            pairs = [
                (number, begin.get(key, first)) for key, number in self._counters.items() if key.startswith(kind + " ")
            ]
            return [
                number - (before if before <= number or first is None else first)
                for number, before in pairs
                if before is not None
            ]

        cores, (wall,), (cpu,) = own_cores(), grown("wall"), grown("cpu")
        family = self._family(processes)
        strangers, run = self._elsewhere(processes, family, cores, wall)
        # Idle time is measured, while busy time is sampled, which errs with what runs in step with the kernel's ticks:
        # a process with a quota of half a core and a period of 4 ms left 0.3 to 0.4 cores that nobody had used, by idle
        # time 0.03 at most.
        idle, waited, pressure = grown("idle"), grown("waited", 0.0), grown("pressure")
        return HostLoad(
            wall_s=wall,
            cpu_s=cpu,
            cores=min(len(cores), cores_allowed(*self._groups)),
            waited_s=sum(waited) if waited else None,
            throttled_s=max(grown("throttled", 0.0), default=None),
            others=strangers,
            others_cores=max(wall * len(cores) - sum(idle) - cpu - run, 0.0) / wall if idle else None,
            run_cores=run / wall,
            swapped_bytes=int(sum(grown("swapped"))),
            memory_pressure_s=pressure[0] if pressure else None,
            hot_s=max(grown("hot"), default=None),
        )

    def _count(self) -> dict[str, float]:
        """Counters by their kind and whose they are: seconds, and bytes that were swapped."""
        cores = own_cores()
        counters = {"wall ": time.perf_counter(), "cpu ": time.process_time()}
        for thread in _names(self._proc / "self/task"):
            words = text_of(self._proc / "self/task" / thread / "schedstat").split()
            if len(words) == 3 and words[0] != "0":  # kernels that do not count say 0
                counters[f"waited {thread}"] = int(words[1]) / 1e9
        for folder, _ in folders("cpu", *self._groups):
            numbers = _lines(folder / "cpu.stat")
            counters |= {
                f"throttled {folder}": numbers[name] * _THROTTLED[name] for name in _THROTTLED if name in numbers
            }
        for core, words in re.findall(r"^cpu(\d+) ([\d ]+)$", text_of(self._proc / "stat"), re.MULTILINE):
            idle, disk, _, _, steal = (*map(int, words.split()[3:8]), *[0] * 5)[:5]
            # Time that a hypervisor gave to other machines counts; some kernels say 0.
            if int(core) in cores and (ticks := idle + disk + steal):
                counters[f"idle {core}"] = ticks / os.sysconf("SC_CLK_TCK")
        pages = _lines(self._proc / "vmstat")
        for name in ("pswpin", "pswpout", "zswpin", "zswpout"):
            counters[f"swapped {name}"] = pages.get(name, 0) * os.sysconf("SC_PAGE_SIZE")
        files = (folder / "memory.pressure" for folder, _ in folders("memory", *self._groups))
        for file in (*files, self._proc / "pressure/memory"):
            total = re.search(r"^full .*\btotal=(\d+)", text_of(file), re.MULTILINE)
            if total is not None:
                counters["pressure "] = int(total[1]) / 1e6
                break
        for core in cores:  # slowed because it, or all of its package, was hot
            folder = self._sys / f"devices/system/cpu/cpu{core}/thermal_throttle"
            if folder.is_dir():
                times = (text_of(folder / f"{kind}_throttle_total_time_ms") for kind in ("core", "package"))
                counters[f"hot {core}"] = max(int(text) if text.isdecimal() else 0 for text in times) / 1e3
        return counters

    def _list(self) -> Iterator[tuple[int, _Process]]:
        """All processes, by number."""
        ticks = os.sysconf("SC_CLK_TCK")
        for name in filter(str.isdecimal, _names(self._proc)):
            # as text_of, but faster for hundreds of files
            with contextlib.suppress(OSError), open(f"{self._proc}/{name}/stat", "rb") as file:  # noqa: PTH123
                before, _, after = file.read().decode(errors="replace").rpartition(")")
                words = after.split()
                if len(words) > 19:
                    cpu, is_kernel = (int(words[11]) + int(words[12])) / ticks, bool(int(words[6]) & _KERNEL_THREAD)
                    yield int(name), _Process(before.partition("(")[2], int(words[1]), cpu, int(words[19]), is_kernel)

    def _elsewhere(
        self, processes: Mapping[int, _Process], family: set[int], cores: list[int], wall: float
    ) -> tuple[tuple[OtherProcess, ...], float]:
        """Processes that are no part of the run, and the seconds of `cores` that the rest of the run took."""
        strangers, run = [], 0.0
        for pid, process in self._processes.items():
            before = processes.get(pid)
            seconds = process.cpu - (before.cpu if before is not None and before.began == process.began else 0.0)
            if pid == os.getpid() or process.is_kernel or seconds < LEAST_CORES * wall:
                continue
            seconds *= self._share(pid, cores)
            if self._is_ours(family, pid):
                run += seconds
            elif seconds >= LEAST_CORES * wall:
                strangers.append(OtherProcess(printable(self._name(pid, process.name)), pid, seconds / wall))
        return tuple(sorted(strangers, key=lambda other: -other.cores)), run

    def _name(self, pid: int, program: str) -> str:
        """`python train.py` or `python -m train` where an interpreter runs a script; otherwise the program's name."""
        if not program.startswith(_INTERPRETERS):
            return program
        _, *words = text_of(self._proc / str(pid) / "cmdline").split("\0")
        script = words[:2] if words[:1] == ["-m"] else [Path(word).name for word in words[:1] if word[:1] != "-"]
        return " ".join([program, *script]).strip()

    def _share(self, pid: int, cores: list[int]) -> float:
        """The part of a process's time that it took of these cores: all or nothing by where it may run, else by where
        its threads ran last."""
        match = re.search(r"^Cpus_allowed_list:\s*(\S+)", text_of(self._proc / str(pid) / "status"), re.MULTILINE)
        if match is None:
            return 1.0
        ranges = [part.partition("-") for part in match[1].split(",")]
        allowed = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
        if allowed <= set(cores) or not allowed & set(cores):
            return float(allowed <= set(cores))
        ticks = {True: 0, False: 0}
        for thread in _names(self._proc / str(pid) / "task"):
            words = text_of(self._proc / str(pid) / "task" / thread / "stat").rpartition(")")[2].split()
            if len(words) > 36:
                ticks[int(words[36]) in cores] += int(words[11]) + int(words[12])
        return ticks[True] / sum(ticks.values()) if any(ticks.values()) else 1.0

    def _family(self, processes: Mapping[int, _Process]) -> set[int]:
        """This process, and all that it started."""
        family = {os.getpid()}
        parents = {(pid, process.parent) for pid, process in (*processes.items(), *self._processes.items())}
        while children := {pid for pid, parent in parents if parent in family} - family:
            family |= children
        return family

    def _is_ours(self, family: set[int], pid: int) -> bool:
        return pid in family or (self._run is not None and self._run_of(str(pid)) == self._run)

    def _run_of(self, pid: str) -> tuple[str, ...] | None:
        """What a process has of its run by the variables that it was started with; None where nobody started several,
        or it is another user's."""
        pairs = (entry.partition("=") for entry in text_of(self._proc / pid / "environ").split("\0"))
        environment = {name: value for name, _, value in pairs}
        runs = ((*names, *(environment.get(name, "") for name in names)) for names in _OF_RUN)
        return next((run for run in runs if all(run)), None)


def beside_others(loads: Sequence[HostLoad]) -> list[str]:
    """A sentence on times that are not kept, where ranks lost much of their cores to others."""
    disturbed = [load for load in loads if load.is_disturbed]
    if not disturbed:
        return []
    peak = max(disturbed, key=lambda load: load.others_cores or 0.0)
    return [f"other processes kept {peak.occupation}: times measured beside them are not kept ({SHARED}=1 keeps them)"]


def _lines(file: Path) -> dict[str, int]:
    words = (line.split() for line in text_of(file).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def network_place() -> tuple[str, str]:
    """The host's name and the network that this process is in: ranks in the same one talk without a link."""
    with contextlib.suppress(OSError):
        return socket.gethostname(), str(Path("/proc/self/ns/net").readlink())
    return socket.gethostname(), ""
