"""What a process here may use: the cores of a rank, which it is pinned to, and memory, what control groups leave of
either; and what the processor is."""

import contextlib
import os
import platform
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from convoy.errors import ConvoyError, MachineError

PINNED = "CONVOY_CORES"
_CPU = Path("/sys/devices/system/cpu")
MEMBERSHIP = Path("/proc/self/cgroup")  # the file that says which groups the process is in
ROOT = Path("/sys/fs/cgroup")  # where their file systems are
_MEMINFO = Path("/proc/meminfo")
CPU_INFO = Path("/proc/cpuinfo")
# Files with the limit and the use of a group.
_OF_VERSION = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
# The part of its use that is cached files, in `memory.stat`.
_REMEMBERED = {1: r"^total_(?:in)?active_file (\d+)$", 2: r"^(?:in)?active_file (\d+)$"}


def device_name(text: str) -> str:
    """The name of a device, as it was typed; a ConvoyError where it is none."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        many = f", or --devices {text} for so many" if re.fullmatch(r"\d+(,\d+)*", text) else ""
        raise ConvoyError(f"--device {text} is no device: use cpu, cuda or cuda:N{many}")
    return text


def own_cores() -> list[int]:
    """The cores that this process may use, those of one physical core side by side."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0), key=lambda core: (*_physical(core), core))


_MOST_ON_A_CORE = 16


def share(cores: Sequence[int], num_ranks: int, place: int, per_device: int | None) -> list[int]:
    """The cores of one of several ranks on a machine, which share `cores`: disjoint runs, evenly where `per_device` is
    None, or one core in turn where there are too few."""
    if per_device is None:
        per_device = len(cores) // num_ranks
        if num_ranks > _MOST_ON_A_CORE * len(cores):  # their memory alone stalls a machine
            raise ConvoyError(
                f"{num_ranks} devices on {len(cores)} cores would compute in turns, more than {_MOST_ON_A_CORE} on a "
                f"core: use at most {_MOST_ON_A_CORE * len(cores)}; {len(cores)} are as fast"
            )
        if per_device == 0:
            return [cores[place % len(cores)]]
    elif per_device * num_ranks > len(cores):
        raise ConvoyError(
            f"--cores-per-device {per_device} on {num_ranks} devices needs {per_device * num_ranks} cores, but here "
            f"are {len(cores)}: use at most {len(cores) // num_ranks}, or fewer devices"
        )
    return list(cores[place * per_device : (place + 1) * per_device])


def in_turns(num_ranks: int, num_cores: int) -> str | None:
    """A sentence where ranks outnumber the cores that they share; None where they do not."""
    if num_ranks <= num_cores:
        return None
    if num_cores == 1:
        return f"{num_ranks} devices share one core and compute in turns: that is no faster than one"
    return f"{num_ranks} devices share {num_cores} cores and compute in turns: that is no faster than {num_cores}"


def take_share(gather: Callable[[Any], list[Any]], rank: int, per_device: int | None) -> list[int]:
    """Pin this rank to its share of the cores of its machine, evenly where `per_device` is None; ranks that already
    have cores to themselves keep them. `gather` gives every rank the values of all."""
    cores = own_cores()
    answers = gather((_machine(), cores))
    peers = [number for number, (machine, _) in enumerate(answers) if machine == answers[rank][0]]
    os.environ["LOCAL_WORLD_SIZE"] = str(len(peers))
    if all(answers[number][1] == cores for number in peers):
        cores = share(cores, len(peers), peers.index(rank), per_device)
    else:
        cores = share(cores, 1, 0, per_device or len(cores))
    pin(cores)
    return cores


def pin(cores: Sequence[int]) -> None:
    """Let all threads of this process, and the processes that it starts, run on these cores alone."""
    if not hasattr(os, "sched_setaffinity"):
        return
    tasks = Path("/proc/self/task")
    threads = [int(entry.name) for entry in tasks.iterdir()] if tasks.is_dir() else [0]
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(thread, cores)
    os.environ[PINNED] = ",".join(map(str, cores))


def check_threads(number: int = 8) -> None:
    """A MachineError where so many more threads cannot be started: torch and gloo, which start about as many to join
    other ranks, wait for ever for one that could not be."""
    stop, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(number):
            thread = threading.Thread(target=stop.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        raise MachineError(
            f"no {number} more threads can be started here: raise the limit on processes and threads, that of the user "
            "(ulimit -u) or of the container (pids)"
        ) from error
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def folders(controller: str, membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """The folder of each group of a controller that the process is in, and of all around it, with the version."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        version = 2 if controllers == "" else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        mount = root if version == 2 else root / controller
        parts = [part for part in path.split("/") if part and part != ".."]
        for length in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:length]), version


def cores_allowed(membership: Path = MEMBERSHIP, root: Path = ROOT) -> float:
    """The number of cores whose time control groups let the process use; infinite where none sets a limit."""
    limit = float("inf")
    for folder, version in folders("cpu", membership, root):
        if version == 2:
            words = text_of(folder / "cpu.max").split()
        else:
            words = [text_of(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            limit = min(limit, int(words[0]) / int(words[1]))
    return limit


def own_share() -> float:
    """The number of cores whose time this process and those that it starts may use. Of the cores that it may run on and
    the time that control groups leave, ranks of a host get equal parts; cores to which a rank is pinned are its own."""
    local = max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
    return min(len(own_cores()) / (1 if PINNED in os.environ else local), cores_allowed() / local)


def host_memory() -> int:
    """Bytes that the processes here may have together."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def free_memory() -> int:
    """Bytes that processes here may still have: those that no process of the machine and no group has used up. Files
    that the system remembers count as free."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text_of(_MEMINFO), re.MULTILINE)
    host_bytes = 1024 * int(match[1]) if match else host_memory()
    return max(0, min([host_bytes, *memory_left()]))


def memory_left(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[int]:
    """Bytes that each of the groups has left."""
    for folder, version in folders("memory", membership, root):
        limit, used = (text_of(folder / name) for name in _OF_VERSION[version])
        if limit.isdecimal() and used.isdecimal():
            remembered = re.findall(_REMEMBERED[version], text_of(folder / "memory.stat"), re.MULTILINE)
            yield int(limit) - int(used) + sum(map(int, remembered))


def memory_limits(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[int]:
    """Bytes that each of the groups may have."""
    for folder, version in folders("memory", membership, root):
        text = text_of(folder / _OF_VERSION[version][0])
        if text.isdecimal():
            yield int(text)


def text_of(file: Path) -> str:
    """The text of a file of the system; empty where it is not there."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _physical(core: int) -> tuple[int, int]:
    """Package and physical core; threads of one core have the same."""
    topology = _CPU / f"cpu{core}" / "topology"
    try:
        package, number = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, core
    return package, number


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def processor_name() -> str:
    """The processor's model."""
    named = (line.partition(":")[2].strip() for line in text_of(CPU_INFO).splitlines() if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "CPU"


def processor_flags() -> set[str]:
    """What Linux calls its abilities, on x86 and on Arm; empty elsewhere."""
    return set(text_of(CPU_INFO).split())


def has_amx() -> bool:
    """Whether the processor multiplies matrices in tiles, which oneDNN does in bf16 where it can."""
    return "amx_tile" in processor_flags()


def kernels() -> str:
    """For which abilities of the processor torch and oneDNN choose their kernels."""
    import torch

    return torch.backends.cpu.get_cpu_capability() + (" with AMX" if has_amx() else "")
