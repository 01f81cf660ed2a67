"""The cores and the memory that ranks of a machine have: their shares, and what control groups leave them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy import resources
from convoy.errors import ConvoyError

PINNED = """
import os, threading
from convoy import resources
ends, go = [], threading.Event()
thread = threading.Thread(target=lambda: (go.wait(), ends.append(os.sched_getaffinity(0))))
thread.start()
own = resources.own_cores()
cases = {
    "shared": ([("here", own), ("here", own)], resources.share(own, 2, 1, None)),
    "another machine": ([("there", own), ("here", own)], own),
    "its own already": ([("here", [max(own) + 1]), ("here", own)], own),
}
for name, (answers, expected) in cases.items():
    os.sched_setaffinity(0, own)
    assert resources.take_share(lambda answer: answers, 1, None) == expected, name
resources.pin(own[:1]); go.set(); thread.join()
assert ends == [set(own[:1])] == [os.sched_getaffinity(0)], ends
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_a_rank_takes_its_share_with_all_of_its_threads() -> None:
    subprocess.run([sys.executable, "-c", PINNED], check=True, timeout=60)
    shares = [[resources.share(range(3), num, place, None) for place in range(num)] for num in (1, 4)]
    assert shares == [[[0, 1, 2]], [[0], [1], [2], [0]]]
    with pytest.raises(ConvoyError, match="--cores-per-device 4 on 2 devices needs 8 cores, but here are 6"):
        resources.share(range(6), 2, 0, 4)


GROUPS = {
    2: ("0::/batch/job", "", ("memory.max", "memory.current"), ""),
    1: ("4:cpu,memory:/batch/job", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
}


@pytest.mark.parametrize("version", GROUPS)
def test_control_groups_and_those_around_them_limit_memory_and_files_count_as_free(
    tmp_path: Path, version: int
) -> None:
    line, folder, names, prefix = GROUPS[version]
    group, mount = tmp_path / "cgroup", tmp_path / folder
    stat = f"{prefix}rss 2000\n{prefix}inactive_file 600\n{prefix}active_file 400\n{prefix}active_anon 70\n"
    files = {f"batch/job/{names[0]}": "max\n", f"batch/{names[0]}": "5000\n", names[0]: "9000\n"}
    for name, text in (files | {f"batch/{names[1]}": "3000\n", "batch/memory.stat": stat}).items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)
    assert list(resources.memory_limits(group, tmp_path)) == []
    group.write_text(f"9:pids:/other\n{line}\n")
    assert sorted(resources.memory_limits(group, tmp_path)) == [5000, 9000]
    assert list(resources.memory_left(group, tmp_path)) == [3000]
