"""The profile store: what is put is found again, by others too, whatever has happened to its lines; devices by name."""

import json
import multiprocessing
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from convoy.planner.cost import store as store_module
from convoy.planner.cost.costs import Times
from convoy.planner.cost.local_op import LocalOp, Operand
from convoy.planner.cost.store import Device, ProfileStore, cores_allowed, default_folder, this_device

DEVICE = Device("Some CPU @ 2.5 GHz", "2.13", "0.1", 1)


def op(size: int) -> LocalOp:
    return LocalOp("linear", "", (Operand((size, 8), "float32"),), (Operand((size, 4), "float32"),))


def put(store: ProfileStore, seconds: Mapping[int, float], source: str = "profiling") -> None:
    """Operations by their size, which take so long forward and twice as long back."""
    store.put(DEVICE, {op(size): Times(each, 2 * each) for size, each in seconds.items()}, source)


def kept(path: Path) -> dict[int, float]:
    """What a store that begins anew finds, as `put` writes it."""
    return {one.inputs[0].shape[0]: times.forward for one, times in ProfileStore(path).times(DEVICE).items()}


def changed(path: Path, command: str) -> None:
    with closing(sqlite3.connect(path / store_module.FILE)) as database, database:
        assert database.execute(command).rowcount == 1


def test_what_is_put_is_found_again_by_another_store_of_the_same_device(tmp_path: Path) -> None:
    store, other = ProfileStore(tmp_path), ProfileStore(tmp_path)
    assert other.times(DEVICE) == {}
    put(store, {3: 0.5, 4: 2})
    assert other.times(DEVICE).get(op(3)) == Times(0.5, 1) and other.devices() == [DEVICE]
    assert store.times(DEVICE).get(op(5)) is store.times(replace(DEVICE, threads=2)).get(op(3)) is None
    put(store, {3: 5})  # the last measurement counts
    assert [(row.local_op, row.times.forward) for row in store.rows(DEVICE)] == [(op(4), 2), (op(3), 5)]
    for value in ([{"ranks": [0, 1]}], []):  # notes are kept beside them
        store.note(DEVICE, "links 2", value)
        assert other.noted(DEVICE, "links 2") == value
    with pytest.raises(ValueError, match="no times"):
        put(store, {1: float("nan")})
    other.put(replace(DEVICE, precision="bfloat16"), {op(1): Times(1, 1)})
    assert store.clear(DEVICE) == 1 and kept(tmp_path) == {} and len(store.devices()) == 1
    assert (store.clear(), store.clear()) == (1, 0)
    put(other, {2: 2})  # a store that another process has cleared can be added to
    assert kept(tmp_path) == {2: 2}


def put_many(path: Path, first: int) -> None:
    store = ProfileStore(path)
    for number in range(first, first + 30):
        put(store, {number: number, 1000: first})


def test_two_processes_may_add_at_once(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=put_many, args=(tmp_path, n)) for n in (0, 100)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert {n: s for n, s in kept(tmp_path).items() if n < 1000} == {n: n for n in (*range(30), *range(100, 130))}


def test_damaged_stores_and_rows_are_passed_over(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    for damage in (b"no database at all" * 100, b""):
        put(store, {1: 1})
        (tmp_path / store_module.FILE).write_bytes(damage)
        assert kept(tmp_path) == {} and ProfileStore(tmp_path).devices() == []
        assert ProfileStore(tmp_path).noted(DEVICE, "links") is None
    for change in ("local_op = '{}'", "local_op = '3'", "local_op = 'x'", "forward = 'fast'"):
        put(store, {1: 1, 2: 2})
        changed(tmp_path, f"UPDATE times SET {change} WHERE forward = 1")
        assert kept(tmp_path) == {2: 2}
    for text in ("{", "3", '{"name": "CPU"}', '{"name": "", "wheels": 4}'):
        changed(tmp_path, f"UPDATE devices SET device = '{text}'")
        assert ProfileStore(tmp_path).devices() == []
    (tmp_path / "none" / store_module.FILE).mkdir(parents=True)  # a place that cannot be written
    assert kept(tmp_path / "none") == {}
    with pytest.raises(OSError, match="open"):
        put(ProfileStore(tmp_path / "none"), {1: 1})


OLDER = """
CREATE TABLE devices (key TEXT PRIMARY KEY, device TEXT, changed REAL);
CREATE TABLE notes (device TEXT, name TEXT, value TEXT, PRIMARY KEY (device, name));
CREATE TABLE times (number INTEGER PRIMARY KEY AUTOINCREMENT, device TEXT, op TEXT, local_op TEXT,
    forward REAL, backward REAL, measured REAL, source TEXT);
CREATE INDEX of_op ON times (device, op);
"""


def test_stores_of_before_are_gone_on_with_or_left_alone(tmp_path: Path) -> None:
    (tmp_path / "some-cpu.jsonl").write_text('{"device": {}}')
    assert ProfileStore(tmp_path).devices() == []
    with closing(sqlite3.connect(tmp_path / store_module.FILE)) as database, database:
        database.executescript(OLDER)  # which knows of no hosts
        row = DEVICE.key, op(1).key, json.dumps(op(1).to_dict()), 1.0, 2.0, time.time(), "profiling"
        columns = "device, op, local_op, forward, backward, measured, source"
        database.execute(f"INSERT INTO times ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    ProfileStore(tmp_path).put(DEVICE, {op(2): Times(3, 4, 5, 6)})
    assert ProfileStore(tmp_path).times(DEVICE) == {op(1): Times(1, 2), op(2): Times(3, 4, 5, 6)}


def test_runs_count_before_profiling_the_median_of_the_last_and_newer_ones_more(tmp_path: Path) -> None:
    for number, (runs, median) in enumerate(
        (((1, 90, 2), 2), ((1, 90, 2, 7, 7, 7, 7, 7), 7), ((2, 2, 9, 9), 9), ((2, 2, 9, 9, 1, 1), 1))
    ):
        store = ProfileStore(tmp_path / str(number))
        store.put(DEVICE, {op(3): Times(50, 50, 3, 4)})
        for seconds in runs:
            put(store, {3: seconds}, "run")
        put(store, {3: 1000, 4: 3})
        times = store.times(DEVICE)
        assert times[op(3)].forward == median and times[op(4)] == Times(3, 6), runs
        assert {row.local_op: row.source for row in store.rows(DEVICE)} == {op(3): "run", op(4): "profiling"}
    only = ProfileStore(tmp_path / "hosts")  # what a host takes is known from profiling, whatever runs add
    only.put(DEVICE, {op(1): Times(1, 2, 3, 4)})
    put(only, {1: 7}, "run")
    assert only.times(DEVICE).get(op(1)) == Times(7, 14, 3, 4)


def test_old_runs_count_no_longer_and_the_oldest_operations_and_devices_go(tmp_path: Path) -> None:
    for days, source, seconds in ((40, "run", 2.0), (40, "profiling", 2.0), (10, "profiling", 1.0)):
        folder = tmp_path / f"{days} {source}"
        for _ in range(3):
            put(ProfileStore(folder), {3: 1}, "run")
        later = time.time() + days * 86_400.0
        with patch.object(store_module.time, "time", lambda later=later: later):
            put(ProfileStore(folder), {3: 2}, source)
        assert kept(folder) == {3: seconds}
    store = ProfileStore(tmp_path)
    for seconds in range(5):
        put(store, dict.fromkeys(range(50), seconds))
    with closing(sqlite3.connect(tmp_path / store_module.FILE)) as database:  # what counts no longer is not kept
        assert database.execute("SELECT count(*) FROM times").fetchone() == (50,)
    store.clear()
    with patch.object(store_module, "_OPERATIONS", 40), patch.object(store_module, "_DEVICES", 2):
        put(store, dict.fromkeys(range(40), 1))
        put(store, {100: 1})
        assert list(kept(tmp_path)) == [*range(11, 40), 100]
        for threads in (2, 3):
            store.put(replace(DEVICE, threads=threads), {op(1): Times(1, 1)})
    assert {device.threads for device in store.devices()} == {2, 3}


def test_devices_that_take_other_times_have_other_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    others = {"str": "other", "int": 7, "bool": True, "float": 0.5}
    changed = [replace(DEVICE, **{one.name: others[one.type.__name__]}) for one in fields(Device)]
    assert len({DEVICE.key, *(one.key for one in changed)}) == 1 + len(changed)
    assert replace(DEVICE).key == DEVICE.key and DEVICE.key.startswith("some-cpu-2-5-ghz-1t-float32-")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CONVOY_CACHE", raising=False)
    assert default_folder() == tmp_path / "cache" / "convoy" / "profiles"
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path / "mine"))
    assert ProfileStore().path == tmp_path / "mine" / "profiles"


def test_this_device_is_named_with_its_switches_and_its_share_of_a_core() -> None:
    cpu = torch.device("cpu")
    plain = this_device(cpu)
    assert (plain.threads, plain.torch, bool(plain.name)) == (torch.get_num_threads(), torch.__version__, True)
    assert "2 ranks on the host" in this_device(cpu, neighbours=2).describe()
    before = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    try:
        numerics = this_device(cpu).numerics
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)
    assert numerics.startswith("deterministic") and "tf32 products" in numerics
    with patch("convoy.planner.cost.store.cores_allowed", lambda: torch.get_num_threads() / 2):
        assert (this_device(cpu).share, "50% of the time" in this_device(cpu).describe()) == (0.5, True)
    assert this_device(cpu) == plain


def test_control_groups_leave_a_share_of_a_core(tmp_path: Path) -> None:
    one = {"batch/job/cpu.max": "max 100000", "batch/cpu.max": "2000 4000", "cpu.max": "300000 100000"}
    cores = {"cpu/batch/cpu.cfs_quota_us": "2000", "cpu/batch/cpu.cfs_period_us": "4000"}
    for line, files in (("0::/batch/job", one), ("4:cpu,cpuacct:/batch", cores | {"cpu/cpu.cfs_quota_us": "-1"})):
        folder = tmp_path / line[0]
        for name, text in {**files, "membership": f"9:pids:/other\n{line}\n"}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        assert cores_allowed(folder / "membership", folder) == 0.5
        assert cores_allowed(folder / "missing", folder) == float("inf")
