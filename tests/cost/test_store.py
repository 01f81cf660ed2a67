"""The profile store: what is put is found again, by others too, whatever has happened to its lines."""

import json
import multiprocessing
from dataclasses import replace

import pytest
import torch

from convoy.cost.device import Device, this_device
from convoy.cost.piece import Operand, Piece
from convoy.cost.store import ProfileStore, default_folder
from convoy.cost.times import Table, Times

DEVICE = Device("Some CPU @ 2.5 GHz", "2.13", "0.1", 1)


def linear(size):
    return Piece("linear", "", (Operand((size, 8), "float32"),), (Operand((size, 4), "float32"),))


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
    assert [(row.piece, row.times.forward) for row in store.rows(DEVICE)] == [(linear(4), 2), (linear(3), 5)]


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
    assert {piece: times for piece, times in found.items() if piece != linear(1000)} == {
        linear(number): Times(number, 2 * number) for number in numbers
    }
    lines = next(tmp_path.glob("*.jsonl")).read_text().splitlines()
    assert all(json.loads(line) for line in lines)
    assert sum("device" in json.loads(line) for line in lines) == 1


DAMAGE = [
    b"not json at all\n",
    b'{"piece": {"op": "linear"}, "forward": 1, "backward": 1, "measured": 1}\n',
    b'{"piece": 3, "forward": 1, "backward": 1, "measured": 1}\n',
    b"[1, 2]\n",
    b"\xff\xfe\x00\n",
    b"\n",
    b'{"piece": {"op": "lin',  # a process was killed here
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_lines_are_skipped(tmp_path, damage):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(1): Times(1, 1)})
    file = next(tmp_path.glob("*.jsonl"))
    with file.open("ab") as out:
        out.write(damage)
    ProfileStore(tmp_path).put(DEVICE, {linear(2): Times(2, 2)})
    assert ProfileStore(tmp_path).times(DEVICE) == {linear(1): Times(1, 1), linear(2): Times(2, 2)}


@pytest.mark.parametrize("value", ["-1", "NaN", "Infinity", '"fast"', "null"])
def test_numbers_that_are_no_times_are_skipped(tmp_path, value):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(1): Times(1, 1), linear(2): Times(2, 2)})
    file = next(tmp_path.glob("*.jsonl"))
    file.write_text(file.read_text().replace('"forward":1,', f'"forward":{value},'))
    assert ProfileStore(tmp_path).times(DEVICE) == {linear(2): Times(2, 2)}


def test_times_that_are_no_numbers_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
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
        }.items()
    ]
    assert len({device.key for device in (DEVICE, *others)}) == 9
    assert replace(DEVICE).key == DEVICE.key
    assert DEVICE.key.startswith("some-cpu-2-5-ghz-1t-float32-")


def test_this_device_names_itself():
    found = this_device(torch.device("cpu"), neighbours=2)
    assert found.threads == torch.get_num_threads()
    assert found.torch == torch.__version__
    assert found.name
    assert "2 ranks on the host" in found.describe()


def test_a_table_asks_elsewhere_for_what_was_not_measured():
    table = Table({linear(1).key: Times(1, 2)}, lambda piece: Times(7, 7))
    assert table(linear(1)) == Times(1, 2)
    assert table(linear(2)) == Times(7, 7)


def test_what_a_run_has_measured_counts_before_what_was_rehearsed(tmp_path):
    store = ProfileStore(tmp_path)
    store.put(DEVICE, {linear(3): Times(1, 1), linear(4): Times(2, 2)})
    store.put(DEVICE, {linear(3): Times(5, 6)}, "run")
    store.put(DEVICE, {linear(3): Times(1, 1), linear(4): Times(3, 3)})
    assert store.times(DEVICE) == {linear(3): Times(5, 6), linear(4): Times(3, 3)}
    assert {row.piece: row.source for row in store.rows(DEVICE)} == {linear(3): "run", linear(4): "rehearsal"}


def test_of_several_runs_the_median_counts_and_old_ones_are_forgotten(tmp_path):
    store = ProfileStore(tmp_path)
    for seconds in (1, 90, 2):
        store.put(DEVICE, {linear(3): Times(seconds, 2 * seconds)}, "run")
    assert store.get(DEVICE, linear(3)) == Times(2, 4)
    for _ in range(5):
        store.put(DEVICE, {linear(3): Times(7, 7)}, "run")
    assert store.get(DEVICE, linear(3)) == Times(7, 7)
