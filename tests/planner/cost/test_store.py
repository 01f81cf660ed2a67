"""The profile store: what is put is found again, by others too, whatever has happened to its lines."""

import json
import multiprocessing
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from convoy.planner.cost import store as store_module
from convoy.planner.cost.device import Device, cores_allowed, this_device
from convoy.planner.cost.local_op import LocalOp, Operand
from convoy.planner.cost.store import ProfileStore, default_folder
from convoy.planner.cost.times import Table, Times

DEVICE = Device("Some CPU @ 2.5 GHz", "2.13", "0.1", 1)


def linear(size):
    return LocalOp("linear", "", (Operand((size, 8), "float32"),), (Operand((size, 4), "float32"),))


def put_many(path, first):
    store = ProfileStore(path)
    for number in range(first, first + 60):
        store.put(DEVICE, {linear(number): Times(number, 2 * number), linear(1000): Times(first, first)})


def test_what_is_put_is_found_again_by_another_store(tmp_path):
    ProfileStore(tmp_path).put(DEVICE, {linear(3): Times(0.5, 1.25)})
    again = ProfileStore(tmp_path)
    assert again.get(DEVICE, linear(3)) == Times(0.5, 1.25)
    assert again.get(DEVICE, linear(4)) is None
    assert again.get(replace(DEVICE, threads=2), linear(3)) is None
    assert again.devices() == [DEVICE]


def test_the_last_measurement_counts(tmp_path):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(3): Times(1, 1), linear(4): Times(2, 2)})
    store.put(DEVICE, {linear(3): Times(5, 5)})
    assert [(row.local_op, row.times.forward) for row in store.rows(DEVICE)] == [(linear(4), 2), (linear(3), 5)]


def test_a_store_sees_what_another_process_adds(tmp_path):
    store = ProfileStore(tmp_path)
    assert store.times(DEVICE) == {}
    ProfileStore(tmp_path).put(DEVICE, {linear(3): Times(1, 1)})
    assert store.times(DEVICE) == {linear(3): Times(1, 1)}


def test_two_processes_may_add_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=put_many, args=(tmp_path, first)) for first in (0, 100)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = ProfileStore(tmp_path).times(DEVICE)
    numbers = [*range(60), *range(100, 160)]
    assert {local_op: times for local_op, times in found.items() if local_op != linear(1000)} == {
        linear(number): Times(number, 2 * number) for number in numbers
    }


@pytest.mark.parametrize("damage", [b"no database at all" * 100, b""])
def test_a_damaged_file_is_put_in_its_place_anew(tmp_path, damage):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(1): Times(1, 1)})
    (tmp_path / store_module.FILE).write_bytes(damage)
    assert (ProfileStore(tmp_path).times(DEVICE), ProfileStore(tmp_path).devices()) == ({}, [])
    assert ProfileStore(tmp_path).noted(DEVICE, "links") is None
    store.put(DEVICE, {linear(2): Times(2, 2)})
    assert ProfileStore(tmp_path).times(DEVICE) == {linear(2): Times(2, 2)}


def changed(path, command):
    with closing(sqlite3.connect(path / store_module.FILE)) as database, database:
        assert database.execute(command).rowcount == 1


@pytest.mark.parametrize("change", ["local_op = '{}'", "local_op = '3'", "local_op = 'x'", "forward = 'fast'"])
def test_damaged_rows_are_skipped(tmp_path, change):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(1): Times(1, 1), linear(2): Times(2, 2)})
    changed(tmp_path, f"UPDATE times SET {change} WHERE forward = 1")
    assert ProfileStore(tmp_path).times(DEVICE) == {linear(2): Times(2, 2)}


def test_stores_of_older_versions_are_left_alone(tmp_path):
    (tmp_path / "some-cpu.jsonl").write_text('{"device": {}}')
    store = ProfileStore(tmp_path)
    assert store.devices() == []
    store.put(DEVICE, {linear(1): Times(1, 1)})
    assert len(store.rows(DEVICE)) == 1


def test_a_place_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / store_module.FILE).mkdir()
    store = ProfileStore(tmp_path)
    assert store.times(DEVICE) == {}
    with pytest.raises(OSError, match="open"):
        store.put(DEVICE, {linear(1): Times(1, 1)})


def test_times_that_are_no_numbers_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="no times"):
        ProfileStore(tmp_path).put(DEVICE, {linear(1): Times(float("nan"), 1)})


def test_notes_are_kept_beside_times(tmp_path):
    store = ProfileStore(tmp_path)
    assert store.noted(DEVICE, "links 2") is None
    store.note(DEVICE, "links 2", [{"ranks": [0, 1]}])
    store.put(DEVICE, {linear(1): Times(1, 1)})
    store.note(DEVICE, "links 2", [])
    assert ProfileStore(tmp_path).noted(DEVICE, "links 2") == []
    assert len(store.rows(DEVICE)) == 1


def test_a_device_can_be_forgotten(tmp_path):
    store, other = ProfileStore(tmp_path), replace(DEVICE, precision="bfloat16")
    for device in (DEVICE, other):
        store.put(device, {linear(1): Times(1, 1)})
    assert store.clear(DEVICE) == 1
    assert (store.times(DEVICE), len(store.times(other))) == ({}, 1)
    assert store.clear() == 1
    assert store.clear() == 0


def test_where_the_store_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CONVOY_CACHE", raising=False)
    assert default_folder() == tmp_path / "cache" / "convoy" / "profiles"
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path / "mine"))
    assert ProfileStore().path == tmp_path / "mine" / "profiles"


def test_devices_that_take_other_times_have_other_keys():
    others = [
        replace(DEVICE, **{name: value})
        for name, value in {
            "name": "Other CPU",
            "torch": "2.14",
            "convoy": "0.2",
            "threads": 2,
            "precision": "bfloat16",
            "channels_last": True,
            "compiled": True,
            "neighbours": 2,
            "numerics": "benchmark",
            "share": 0.5,
        }.items()
    ]
    assert len({device.key for device in (DEVICE, *others)}) == 11
    assert replace(DEVICE).key == DEVICE.key
    assert DEVICE.key.startswith("some-cpu-2-5-ghz-1t-float32-")


def test_this_device_names_itself():
    found = this_device(torch.device("cpu"), neighbours=2)
    assert found.threads == torch.get_num_threads()
    assert found.torch == torch.__version__
    assert found.name
    assert "2 ranks on the host" in found.describe()


def test_switches_and_shares_of_a_core_are_named(tmp_path):
    cpu = torch.device("cpu")
    plain = this_device(cpu)
    torch.use_deterministic_algorithms(True)
    try:
        assert this_device(cpu).numerics == ", ".join(filter(None, ("deterministic", plain.numerics)))
    finally:
        torch.use_deterministic_algorithms(False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert "tf32 products" in this_device(cpu).numerics
    finally:
        torch.set_float32_matmul_precision(before)
    with patch("convoy.planner.cost.device.cores_allowed", lambda: torch.get_num_threads() / 2):
        assert (this_device(cpu).share, "50% of the time" in this_device(cpu).describe()) == (0.5, True)
    assert this_device(cpu) == plain


@pytest.mark.parametrize(
    ("line", "files"),
    [
        (
            "0::/batch/job",
            {"batch/job/cpu.max": "max 100000", "batch/cpu.max": "2000 4000", "cpu.max": "300000 100000"},
        ),
        (
            "4:cpu,cpuacct:/batch",
            {
                "cpu/batch/cpu.cfs_quota_us": "2000",
                "cpu/batch/cpu.cfs_period_us": "4000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
        ),
    ],
)
def test_control_groups_leave_a_share_of_a_core(tmp_path, line, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "membership").write_text(f"9:pids:/other\n{line}\n")
    assert cores_allowed(tmp_path / "membership", tmp_path) == 0.5
    assert cores_allowed(tmp_path / "missing", tmp_path) == float("inf")


def test_a_table_asks_elsewhere_for_what_was_not_measured():
    table = Table({linear(1).key: Times(1, 2)}, lambda local_op: Times(7, 7))
    assert table(linear(1)) == Times(1, 2)
    assert table(linear(2)) == Times(7, 7)


def test_what_a_run_has_measured_counts_before_what_was_profiled(tmp_path):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(3): Times(1, 1), linear(4): Times(2, 2)})
    store.put(DEVICE, {linear(3): Times(5, 6)}, "run")
    store.put(DEVICE, {linear(3): Times(1, 1), linear(4): Times(3, 3)})
    assert store.times(DEVICE) == {linear(3): Times(5, 6), linear(4): Times(3, 3)}
    assert {row.local_op: row.source for row in store.rows(DEVICE)} == {linear(3): "run", linear(4): "profiling"}


def test_of_several_runs_the_median_counts_and_old_ones_are_forgotten(tmp_path):
    store = ProfileStore(tmp_path)
    for seconds in (1, 90, 2):
        store.put(DEVICE, {linear(3): Times(seconds, 2 * seconds)}, "run")
    assert store.get(DEVICE, linear(3)) == Times(2, 4)
    for _ in range(5):
        store.put(DEVICE, {linear(3): Times(7, 7)}, "run")
    assert store.get(DEVICE, linear(3)) == Times(7, 7)


def test_a_newer_run_weighs_more(tmp_path):
    store = ProfileStore(tmp_path)
    for seconds in (2, 2, 9, 9):
        store.put(DEVICE, {linear(3): Times(seconds, 1)}, "run")
    assert store.get(DEVICE, linear(3)).forward == 9
    for seconds in (1, 1):
        store.put(DEVICE, {linear(3): Times(seconds, 1)}, "run")
    assert store.get(DEVICE, linear(3)).forward == 1


DAY = 86_400.0


@pytest.mark.parametrize(
    ("days", "source", "seconds"), [(40, "run", 2.0), (40, "profiling", 2.0), (10, "profiling", 1.0)]
)
def test_what_runs_have_taught_long_ago_counts_no_longer(tmp_path, days, source, seconds):
    store = ProfileStore(tmp_path)
    for _ in range(3):
        store.put(DEVICE, {linear(3): Times(1, 1)}, "run")
    later = store_module.time.time() + days * DAY
    with patch.object(store_module.time, "time", lambda: later):
        store.put(DEVICE, {linear(3): Times(2, 2)}, source)
    assert ProfileStore(tmp_path).get(DEVICE, linear(3)).forward == seconds


def test_what_counts_no_longer_is_not_kept(tmp_path):
    store, other = ProfileStore(tmp_path), ProfileStore(tmp_path)
    store.note(DEVICE, "links", [1])
    for seconds in range(30):
        store.put(DEVICE, {linear(number): Times(seconds, 1) for number in range(50)})
    store.put(DEVICE, {linear(1): Times(7, 7)}, "run")
    assert len(other.times(DEVICE)) == 50
    found = ProfileStore(tmp_path)
    assert found.times(DEVICE) == store.times(DEVICE) == other.times(DEVICE)
    assert (found.get(DEVICE, linear(1)), found.get(DEVICE, linear(2))) == (Times(7, 7), Times(29, 1))
    assert found.noted(DEVICE, "links") == [1]
    assert found.devices() == [DEVICE]
    with closing(sqlite3.connect(tmp_path / store_module.FILE)) as database:
        assert database.execute("SELECT count(*) FROM times").fetchone() == (50,)


def test_the_oldest_operations_and_devices_go(tmp_path):
    store = ProfileStore(tmp_path)
    with patch.object(store_module, "_OPERATIONS", 40), patch.object(store_module, "_DEVICES", 2):
        store.put(DEVICE, {linear(number): Times(1, 1) for number in range(40)})
        store.put(DEVICE, {linear(100): Times(1, 1)})
        kept = [row.local_op for row in store.rows(DEVICE)]
        assert kept == [*(linear(number) for number in range(11, 40)), linear(100)]
        store.put(replace(DEVICE, threads=2), {linear(1): Times(1, 1)})
        store.put(replace(DEVICE, threads=3), {linear(1): Times(1, 1)})
    assert {device.threads for device in store.devices()} == {2, 3}


def test_a_store_that_is_cleared_by_another_process_is_empty_and_can_be_added_to(tmp_path):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(1): Times(1, 1)})
    assert len(store.times(DEVICE)) == 1
    assert ProfileStore(tmp_path).clear() == 1
    assert store.times(DEVICE) == {}
    store.put(DEVICE, {linear(2): Times(2, 2)})
    assert store.times(DEVICE) == ProfileStore(tmp_path).times(DEVICE) == {linear(2): Times(2, 2)}


@pytest.mark.parametrize("text", ["{", "3", '{"name": "CPU"}', '{"name": "", "wheels": 4}'])
def test_a_device_that_is_none_is_not_listed(tmp_path, text):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(1): Times(1, 1)})
    changed(tmp_path, f"UPDATE devices SET device = '{text}'")
    assert ProfileStore(tmp_path).devices() == []


OLDER = """
CREATE TABLE devices (key TEXT PRIMARY KEY, device TEXT, changed REAL);
CREATE TABLE notes (device TEXT, name TEXT, value TEXT, PRIMARY KEY (device, name));
CREATE TABLE times (number INTEGER PRIMARY KEY AUTOINCREMENT, device TEXT, op TEXT, local_op TEXT,
    forward REAL, backward REAL, measured REAL, source TEXT);
CREATE INDEX of_op ON times (device, op);
"""


def test_a_store_that_knows_of_no_hosts_is_gone_on_with(tmp_path):
    one = linear(1)
    with closing(sqlite3.connect(tmp_path / store_module.FILE)) as database, database:
        database.executescript(OLDER)
        row = DEVICE.key, one.key, json.dumps(one.to_dict()), 1.0, 2.0, time.time(), "profiling"
        columns = "device, op, local_op, forward, backward, measured, source"
        database.execute(f"INSERT INTO times ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    store = ProfileStore(tmp_path)
    assert store.times(DEVICE) == {}
    store.put(DEVICE, {linear(2): Times(3, 4, 5, 6)})
    assert ProfileStore(tmp_path).times(DEVICE) == {one: Times(1, 2), linear(2): Times(3, 4, 5, 6)}


def test_what_a_host_takes_is_known_from_profiling_whatever_runs_add(tmp_path):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(1): Times(1, 2, 3, 4)})
    for seconds in (5, 7, 9):
        store.put(DEVICE, {linear(1): Times(seconds, seconds), linear(2): Times(1, 1)}, "run")
    found = store.times(DEVICE)
    assert (found[linear(1)], found[linear(2)]) == (Times(7, 7, 3, 4), Times(1, 1))
