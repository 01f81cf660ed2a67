"""The profile store: what is put is found again, by others too, whatever has happened to its lines; devices by name."""

import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from convoy.planner import store as store_module
from convoy.planner.cost.costs import Times
from convoy.planner.cost.local_op import LocalOp, Operand
from convoy.planner.store import Device, ProfileStore

DEVICE = Device("Some CPU @ 2.5 GHz", "2.13", "0.1", 1)


def op(size: int) -> LocalOp:
    return LocalOp("linear", "", (Operand((size, 8), "float32"),), (Operand((size, 4), "float32"),))


def put(store: ProfileStore, seconds: Mapping[int, float], source: str = "profiling") -> None:
    """Operations by their size, which take so long forward and twice as long back."""
    store.put(DEVICE, {op(size): Times(each, 2 * each) for size, each in seconds.items()}, source)


def kept(path: Path) -> dict[int, float]:
    """What a store that begins anew finds, as `put` writes it."""
    return {one.inputs[0].shape[0]: times.forward for one, times in ProfileStore(path).times(DEVICE).items()}


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / f"{DEVICE.key}.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def test_what_is_put_is_found_again_by_another_store_of_the_same_device(tmp_path: Path) -> None:
    others = {"str": "other", "int": 7, "bool": True, "float": 0.5}
    variants = [replace(DEVICE, **{one.name: others[one.type.__name__]}) for one in fields(Device)]
    assert len({DEVICE.key, *(one.key for one in variants)}) == 1 + len(variants)
    store, other, names = ProfileStore(tmp_path), ProfileStore(tmp_path), list[str]()
    assert other.times(DEVICE) == {}
    put(store, {3: 0.5, 4: 2})
    assert other.times(DEVICE).get(op(3)) == Times(0.5, 1) and other.devices() == [DEVICE]
    assert store.times(DEVICE).get(op(5)) is store.times(replace(DEVICE, threads=2)).get(op(3)) is None
    put(store, {3: 5})  # the last measurement counts
    assert [(row.local_op, row.times.forward) for row in store.rows(DEVICE)] == [(op(4), 2), (op(3), 5)]
    for value in ([{"ranks": [0, 1]}], []):  # notes are kept beside them
        store.note(DEVICE, "links 2", value)
        assert other.noted(DEVICE, "links 2") == value
    with patch.object(store_module, "_NOTES", 3):
        for number in range(9):
            store.note(DEVICE, f"began {number}", number)
            store.note(DEVICE, "links 2", number)  # of what is noted again and again the last is kept
    for name in ("began 8", "never"):
        store.note(DEVICE, name, None)
    changed(tmp_path, lambda document: names.extend(document["notes"]))
    assert names == ["began 7", "links 2"]
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


def test_damaged_files_and_entries_are_passed_over(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    for damage in (b"\xff no JSON" * 100, b"", b"[]", b'{"notes": [], "operations": 3}'):
        put(store, {1: 1})
        (tmp_path / f"{DEVICE.key}.json").write_bytes(damage)
        assert kept(tmp_path) == {} and ProfileStore(tmp_path).devices() == []
        assert ProfileStore(tmp_path).noted(DEVICE, "links") is None
    for entry in ("x", {}, 3, {"op": {}, "source": "run", "seconds": [], "host": [0, 0]}):
        put(store, {1: 1, 2: 2})
        changed(tmp_path, lambda document, entry=entry: document["operations"].update({op(1).key: entry}))
        assert kept(tmp_path) == {2: 2}
    for device in (3, {"name": "CPU"}, {"name": "", "wheels": 4}):
        changed(tmp_path, lambda document, device=device: document.update(device=device))
        assert ProfileStore(tmp_path).devices() == []
    (tmp_path / "none").touch()  # a place that cannot be written
    assert kept(tmp_path / "none") == {}
    with pytest.raises(OSError, match="exists"):
        put(ProfileStore(tmp_path / "none"), {1: 1})


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
        # what a host takes is known from profiling, whatever runs add
        assert times[op(3)] == Times(median, 2 * median, 3, 4) and times[op(4)] == Times(3, 6), runs
        assert {row.local_op: row.source for row in store.rows(DEVICE)} == {op(3): "run", op(4): "profiling"}


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
    with patch.object(store_module, "_OPERATIONS", 40), patch.object(store_module, "_DEVICES", 2):
        put(store, dict.fromkeys(range(40), 1))
        put(store, {100: 1})
        assert list(kept(tmp_path)) == [*range(11, 40), 100]
        for threads in (2, 3):
            store.put(replace(DEVICE, threads=threads), {op(1): Times(1, 1)})
    assert {device.threads for device in store.devices()} == {2, 3}
