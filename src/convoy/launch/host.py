"""What the machine did while something ran: cores that others had, memory that was swapped, a GPU that throttled.

All is read from Linux's counters in `/proc` and `/sys`, and of a GPU from `nvidia-smi`, at the beginning and again
later. What a machine does not tell (another system, a sandbox, an older kernel) is None, 0 or empty.
"""

import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.launch.rank import FOLDER
from convoy.resources import cores_allowed, folders, own_cores, text_of
from convoy.terminal import printable

if TYPE_CHECKING:
    import torch

LEAST_CORES = 0.02  # other processes that use less are not named
# This variable, at 1, says that a machine is never quiet: times taken beside other processes are kept all the same.
SHARED = "CONVOY_SHARED"
# The share of its cores' time that a run may lose to other processes, and the error of the kernel's counters.
_DISTURBED, _TICKS_S = 0.1, 0.05
_INTERPRETERS = ("python", "bash", "sh", "java", "node", "perl", "ruby")
_KERNEL_THREAD = 0x0020_0000
_TIMEOUT_S = 5.0
_SAMPLED_S = 1.1  # utilization is that of the last second, at most
_COUNTED = ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown")
_FIELDS = ("utilization.gpu",)
_COUNTERS = tuple(f"clocks_event_reasons_counters.{name}" for name in _COUNTED)  # not in drivers before 2025


@dataclass(frozen=True)
class GpuProcess:
    """A process that is no part of the run and computes on its GPU."""

    name: str  # of the program
    pid: int
    used_bytes: int  # of the GPU's memory; 0 where the driver does not say


@dataclass(frozen=True)
class GpuLoad:
    """What `nvidia-smi` says of a GPU."""

    # seconds of the interval, by `sw_power_cap`, `sw_thermal_slowdown` and `hw_thermal_slowdown`; empty where the
    # driver does not count them
    throttled_s: Mapping[str, float]
    # processes outside the run that compute on it, those with the most memory first; empty where process numbers are
    # not those of the driver, as in most containers
    others: tuple[GpuProcess, ...]
    others_busy: float  # share of the time in which they compute, while the run does not


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
    gpu: GpuLoad | None  # None where the device is no NVIDIA GPU

    @property
    def is_disturbed(self) -> bool:
        """Whether others had so much of the cores that times of this interval do not hold for the machine by itself."""
        taken_s = self.wall_s * (self.others_cores or 0.0)
        return os.environ.get(SHARED) != "1" and taken_s > _DISTURBED * self.cores * self.wall_s + _TICKS_S


class HostWatch:
    """Counts what the machine does since it was made or last read.

    Making it and reading it take 2 ms each on a machine of 90 processes, 0.15 ms for ten more of them, 0.3 ms for ten
    threads more, and with a GPU the time of `nvidia-smi` (not measured), which is started once or twice. Processes of
    the run are this one, all that it started, and those that the same launcher started (by torch's, Convoy's or Slurm's
    variables). `machine` is where the machine's `proc` and `sys` are.
    """

    def __init__(self, device: "torch.device | None" = None, *, machine: Path = Path("/")) -> None:
        self._proc, self._sys = machine / "proc", machine / "sys"
        self._run = _run_of(self._environment("self"))
        self._gpu = GpuWatch(device)
        self._begin = self._count()

    def read(self) -> HostLoad:
        begin, now = self._begin, self._count()
        self._begin = now
        cores, wall = own_cores(), now.time - begin.time
        cpu = now.cpu - begin.cpu
        strangers, run = self._elsewhere(begin, now, cores)
        busy = wall * len(cores) - _added(now.idle, begin.idle, cores)
        heat = [now.hot[core] - begin.hot[core] for core in cores if core in now.hot and core in begin.hot]
        throttled = [now.throttled[name] - begin.throttled.get(name, 0.0) for name in now.throttled]
        waited = [
            # a number that is lower than before belongs to a new thread
            number - (before if (before := begin.waited.get(name, 0.0)) <= number else 0.0)
            for name, number in now.waited.items()
        ]
        return HostLoad(
            wall_s=wall,
            cpu_s=cpu,
            cores=min(len(cores), cores_allowed(self._proc / "self/cgroup", self._sys / "fs/cgroup")),
            waited_s=sum(waited) if waited else None,
            throttled_s=max(throttled, default=None),
            others=strangers,
            others_cores=max(busy - cpu - run, 0.0) / wall if any(now.idle.values()) else None,
            run_cores=run / wall,
            swapped_bytes=now.swapped - begin.swapped,
            memory_pressure_s=None if now.pressure is None or begin.pressure is None else now.pressure - begin.pressure,
            hot_s=max(heat, default=None),
            gpu=self._gpu.read(partial(self._is_ours, self._family(begin, now))),
        )

    def _count(self) -> "_Counters":
        pages = _lines(self._proc / "vmstat")
        return _Counters(
            time=time.perf_counter(),
            cpu=time.process_time(),
            waited=dict(self._waits()),
            throttled=dict(self._throttled()),
            idle=_idle_times(text_of(self._proc / "stat")),
            processes=dict(self._processes()),
            swapped=sum(pages.get(name, 0) for name in ("pswpin", "pswpout", "zswpin", "zswpout"))
            * os.sysconf("SC_PAGE_SIZE"),
            pressure=self._pressure(),
            hot=dict(self._heat()),
        )

    def _waits(self) -> Iterator[tuple[str, float]]:
        for thread in _names(self._proc / "self/task"):
            words = text_of(self._proc / "self/task" / thread / "schedstat").split()
            if len(words) == 3 and words[0] != "0":  # kernels that do not count say 0
                yield thread, int(words[1]) / 1e9

    def _throttled(self) -> Iterator[tuple[str, float]]:
        for folder, _ in folders("cpu", self._proc / "self/cgroup", self._sys / "fs/cgroup"):
            counters = _lines(folder / "cpu.stat")
            for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
                if name in counters:
                    yield str(folder), counters[name] * unit

    def _pressure(self) -> float | None:
        groups = folders("memory", self._proc / "self/cgroup", self._sys / "fs/cgroup")
        for file in (*(folder / "memory.pressure" for folder, _ in groups), self._proc / "pressure/memory"):
            total = re.search(r"^full .*\btotal=(\d+)", text_of(file), re.MULTILINE)
            if total is not None:
                return int(total[1]) / 1e6
        return None

    def _heat(self) -> Iterator[tuple[int, float]]:
        """Seconds for which a core was slowed because it, or all of its package, was hot."""
        for core in own_cores():
            folder = self._sys / f"devices/system/cpu/cpu{core}/thermal_throttle"
            if folder.is_dir():
                kinds = ("core", "package")
                yield core, max(_number(folder / f"{kind}_throttle_total_time_ms") for kind in kinds) / 1e3

    def _processes(self) -> Iterator[tuple[int, "_Process"]]:
        ticks = os.sysconf("SC_CLK_TCK")
        for name in _names(self._proc):
            if not name.isdecimal():
                continue
            # as text_of, but faster for hundreds of files
            with contextlib.suppress(OSError), open(f"{self._proc}/{name}/stat", "rb") as file:  # noqa: PTH123
                before, _, after = file.read().decode(errors="replace").rpartition(")")
                words = after.split()
                if len(words) > 19:
                    cpu = (int(words[11]) + int(words[12])) / ticks
                    is_kernel = bool(int(words[6]) & _KERNEL_THREAD)
                    program = before.partition("(")[2]
                    yield int(name), _Process(program, int(words[1]), cpu, int(words[19]), is_kernel)

    def _elsewhere(
        self, begin: "_Counters", now: "_Counters", cores: list[int]
    ) -> tuple[tuple[OtherProcess, ...], float]:
        """Processes that are no part of the run, and the seconds of `cores` that the rest of the run took."""
        family, wall = self._family(begin, now), now.time - begin.time
        strangers, run = [], 0.0
        for pid, process in now.processes.items():
            before = begin.processes.get(pid)
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
        match = re.search(r"^Cpus_allowed_list:\s*(\S+)", text_of(self._proc / str(pid) / "status"), re.MULTILINE)
        if match is None:
            return 1.0
        ranges = [part.partition("-") for part in match[1].split(",")]
        allowed = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
        if allowed <= set(cores) or not allowed & set(cores):
            return float(allowed <= set(cores))
        on_cores = in_all = 0
        for thread in _names(self._proc / str(pid) / "task"):
            words = text_of(self._proc / str(pid) / "task" / thread / "stat").rpartition(")")[2].split()
            if len(words) > 36:
                ticks = int(words[11]) + int(words[12])
                in_all += ticks
                on_cores += ticks * (int(words[36]) in cores)
        return on_cores / in_all if in_all else 1.0

    def _family(self, begin: "_Counters", now: "_Counters") -> set[int]:
        """This process, and all that it started."""
        family = {os.getpid()}
        parents = {(pid, process.parent) for count in (begin, now) for pid, process in count.processes.items()}
        while children := {pid for pid, parent in parents if parent in family} - family:
            family |= children
        return family

    def _is_ours(self, family: set[int], pid: int) -> bool:
        return pid in family or (self._run is not None and _run_of(self._environment(str(pid))) == self._run)

    def _environment(self, pid: str) -> dict[str, str]:
        """The variables that a process was started with; none where it is another user's."""
        pairs = (entry.partition("=") for entry in text_of(self._proc / pid / "environ").split("\0"))
        return {name: value for name, _, value in pairs}


@dataclass(frozen=True)
class _Process:
    name: str
    parent: int
    cpu: float
    began: int
    is_kernel: bool


@dataclass(frozen=True)
class _Counters:
    """The counters at one time, in seconds; `swapped` in bytes."""

    time: float
    cpu: float
    waited: dict[str, float]
    throttled: dict[str, float]
    idle: dict[int, float]
    processes: dict[int, _Process]
    swapped: int
    pressure: float | None
    hot: dict[int, float]


def beside_others(loads: Sequence[HostLoad]) -> list[str]:
    """A sentence on times that are not kept, where ranks lost much of their cores to others."""
    disturbed = [load for load in loads if load.is_disturbed]
    if not disturbed:
        return []
    peak = max(disturbed, key=lambda load: load.others_cores or 0.0)
    who = f", {peak.others[0].name} (process {peak.others[0].pid}) most" if peak.others else ""
    return [
        f"other processes kept {peak.others_cores:.2g} of {peak.cores:g} cores busy{who}: what was measured meanwhile "
        f"is not kept for later plans, as it would be wrong for the machine by itself ({SHARED}=1 keeps it)"
    ]


def _idle_times(stat: str) -> dict[int, float]:
    """Seconds in which each core did nothing here; time that a hypervisor gave to other machines counts. Idle time is
    measured, while busy time is sampled, which errs with what runs in step with the kernel's ticks."""
    ticks = os.sysconf("SC_CLK_TCK")
    idle = {}
    for name, numbers in re.findall(r"^cpu(\d+) ([\d ]+)$", stat, re.MULTILINE):
        nothing, disk, _, _, steal = (*map(int, numbers.split()[3:8]), *[0] * 5)[:5]
        idle[int(name)] = (nothing + disk + steal) / ticks
    return idle


def _added(now: Mapping[int, float], begin: Mapping[int, float], cores: Iterable[int]) -> float:
    return sum(now[core] - begin[core] for core in cores if core in now and core in begin)


def _run_of(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The variables that the processes of one run have in common on a machine; None where nobody started several. No
    two runs have the same port for their ranks to meet."""
    for names in ((FOLDER,), ("MASTER_ADDR", "MASTER_PORT"), ("SLURM_JOB_ID", "SLURM_STEP_ID")):
        if all(environment.get(name) for name in names):
            return (*names, *(environment[name] for name in names))
    return None


def _lines(file: Path) -> dict[str, int]:
    words = (line.split() for line in text_of(file).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _number(file: Path) -> float:
    return number_of(text_of(file)) or 0.0


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


class GpuWatch:
    """Counts what happens to a GPU since it was made or last read, if `nvidia-smi` knows the GPU."""

    def __init__(self, device: "torch.device | None") -> None:
        self._name = _identifier(device)
        self._begin = _counters(self._name)

    def read(self, is_ours: Callable[[int], bool]) -> GpuLoad | None:
        """What has happened since; None where nobody can say. Nothing of the run may compute meanwhile; `is_ours` says
        which processes are part of it."""
        begin, counters = self._begin, _counters(self._name)
        if not counters:
            return None
        self._begin = counters
        processes = {process.pid: process for process in _processes(self._name)}
        # if this process is not listed, numbers belong to another name space
        listed = processes.items() if os.getpid() in processes else ()
        strangers = sorted((entry for pid, entry in listed if not is_ours(pid)), key=lambda entry: -entry.used_bytes)
        if strangers:
            time.sleep(_SAMPLED_S)
        busy = number_of(_counters(self._name).get("utilization.gpu", "")) if strangers else None
        return GpuLoad(
            throttled_s=dict(_times(begin, counters)),
            others=tuple(strangers),
            others_busy=(busy or 0.0) / 100,
        )


def _times(old_counters: Mapping[str, str], counters: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Seconds between two answers for which a clock was held down, by the reason."""
    for name, key in zip(_COUNTED, _COUNTERS, strict=True):
        begin, end = (number_of(answer.get(key, "")) for answer in (old_counters, counters))
        if begin is not None and end is not None:
            yield name, (end - begin) / 1e6


def number_of(text: str) -> float | None:
    """A number; None where a machine says something else, as `[N/A]`, or nothing."""
    try:
        return float(text)
    except ValueError:
        return None


def _identifier(device: "torch.device | None") -> str:
    """The identifier of an NVIDIA GPU, whatever CUDA_VISIBLE_DEVICES says; empty for any other device."""
    if device is None or device.type != "cuda":
        return ""
    import torch

    with contextlib.suppress(AssertionError, AttributeError, RuntimeError):
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return ""


def _counters(gpu: str) -> dict[str, str]:
    for counters in (_COUNTERS, ()) if gpu else ():
        fields = (*_FIELDS, *counters)
        lines = _smi("-i", gpu, f"--query-gpu={','.join(fields)}")
        if lines and len(lines[0]) == len(fields):
            return dict(zip(fields, lines[0], strict=True))
    return {}


def _processes(gpu: str) -> Iterator[GpuProcess]:
    for line in _smi("-i", gpu, "--query-compute-apps=pid,name,used_memory"):
        if len(line) == 3 and line[0].isdecimal():
            yield GpuProcess(printable(Path(line[1]).name), int(line[0]), _bytes(line[2]))


def _smi(*arguments: str) -> list[list[str]]:
    """The table that `nvidia-smi` prints; empty where it is not there, fails or does not answer."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return [line.split(", ") for line in done.stdout.splitlines() if line] if done.returncode == 0 else []


def _bytes(mebibytes: str) -> int:
    return round((number_of(mebibytes) or 0.0) * 2**20)
