"""What a machine does beside a run is seen, on a made-up one."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from convoy.launch import host
from convoy.launch.host import HostWatch, OtherProcess


def made(machine: Path, files: Mapping[str, str]) -> Path:
    """A machine whose files say this."""
    for name, text in files.items():
        (machine / name).parent.mkdir(parents=True, exist_ok=True)
        (machine / name).write_text(text)
    return machine


def stat(pid: int, name: str, parent: int, ticks: int, flags: int = 0) -> dict[str, str]:
    numbers = [parent, *[0] * 4, flags, *[0] * 4, ticks, *[0] * 7, 7, *[0] * 20]
    return {f"proc/{pid}/stat": f"{pid} ({name}) R {' '.join(map(str, numbers))}"}


def test_all_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "own_cores", lambda: [0, 1])
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100, "SC_PAGE_SIZE": 4096}.__getitem__)

    def counters(n: int) -> dict[str, str]:
        core = " ".join(str(n * ticks) for ticks in (10_000, 0, 0, 9, 9, 0, 0, 50, 0, 0))
        return {
            "proc/self/task/1/schedstat": f"5 {n}000000000 1",
            "sys/fs/cgroup/pod/cpu.stat": f"usage_usec 9\nthrottled_usec {n}500000\n",
            "proc/stat": f"cpu  1 2\ncpu0 {core}\ncpu1 {core}\ncpu2 {core}\nintr 1\n",
            "proc/vmstat": f"pswpin {n}\npswpout {2 * n}\nzswpin {n}\n",
            "sys/fs/cgroup/pod/job/memory.pressure": f"some total=9\nfull avg10=0.00 total={n}250000\n",
            "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_total_time_ms": f"{n}500",
            **stat(os.getpid(), "python", 1, 100 * n),
            **stat(4_000_001, "worker", os.getpid(), 100_000 * n),
            **stat(4_000_002, "odd ) name", 1, 200_000 * n),
            **stat(4_000_005, "python3", 1, 50_000 * n),
            "proc/4000005/cmdline": "python3\0/home/x/train.py\0--lr\0",
            **stat(4_000_003, "elsewhere", 1, 200_000 * n),
            "proc/4000003/status": "Cpus_allowed_list:\t2,4-6\n",
            **stat(4_000_004, "kworker", 2, 200_000 * n, 0x0020_8040),
        }

    groups = {"proc/self/cgroup": "0::/pod/job\n", "sys/fs/cgroup/pod/cpu.max": "150000 100000"}
    machine = made(tmp_path, {**groups, **counters(1)})
    watch = HostWatch(machine)
    made(machine, counters(3))
    load = watch.read()
    assert (load.cores, load.waited_s, load.throttled_s, load.memory_pressure_s, load.hot_s) == (1.5, 2, 2, 2, 2)
    assert load.swapped_bytes == 8 * 4096
    assert load.others == (
        OtherProcess("odd ) name", 4_000_002, 4000 / load.wall_s),
        OtherProcess("python3 train.py", 4_000_005, 1000 / load.wall_s),
    )
    assert load.run_cores == pytest.approx(2000 / load.wall_s)
    made(machine, counters(3) | {"proc/stat": counters(2)["proc/stat"]})
    assert (watch.read().others_cores or 0) > 1  # of two cores; the kernel lets waits for disks become less
