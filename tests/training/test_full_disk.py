"""Runs on a disk that is full: a small file system in a mount namespace of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.checkpoint.store import CheckpointStore
from tiny import write_mnist

INSIDE = 'mount -t tmpfs -o size=$0k convoy-test "$1" && run=$1 && kept=$2 && shift 2 && { "$@"; status=$?; }'
AFTER = '; cp -r "$run" "$kept" && exit $status'


def on_a_small_disk(size_k: int, tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that writes to `tmp_path/disk/run`; what there is then is copied to `tmp_path/kept`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    arguments = ["unshare", "--mount", "sh", "-c", INSIDE + AFTER, str(size_k), str(disk), str(tmp_path / "kept")]
    return subprocess.run([*arguments, *command], env=environment, capture_output=True, text=True, timeout=150)


@pytest.fixture(autouse=True)
def may_mount(tmp_path: Path) -> None:
    probe = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0"', str(tmp_path)]
    try:
        found = subprocess.run(probe, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"unshare is missing: {error}")
    if found.returncode:
        pytest.skip(f"needs the right to mount a small file system: {found.stderr.strip()}")


def train(tmp_path: Path, size_k: int, *options: str) -> subprocess.CompletedProcess[str]:
    data = write_mnist(tmp_path / "data")
    settings = ["checkpoint.every=2ba", "checkpoint.keep=9", "log_every=1ba", "threads=1", "evaluate_every=1000ba"]
    sets = [part for each in settings for part in ("--set", each)]
    options = ("--batch", "24", "--microbatches", "2", "--epochs", "16ba", *sets, *options)
    out = str(tmp_path / "disk" / "run")
    command = ["-m", "convoy", "train", "tiny:TinyNet", "--data", str(data), "--out", out, *options]
    return on_a_small_disk(size_k, tmp_path, sys.executable, *command)


@pytest.mark.slow
def test_a_run_on_two_devices_stops_with_a_sentence_and_its_last_checkpoint(tmp_path: Path) -> None:
    found = train(tmp_path, 230, "--devices", "2")
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr + found.stdout
    (sentence,) = [line for line in found.stderr.splitlines() if line.startswith("convoy: ")]
    store = CheckpointStore(tmp_path / "kept" / "run" / "checkpoints")
    newest = store.steps()[-1]
    assert f"could not be written to {tmp_path}/disk/run/checkpoints" in sentence
    assert "No space left on device" in sentence
    assert f"the newest whole one is of update {newest}" in sentence
    assert store.load(newest).step == newest
    assert not list(store.folder.glob(".*"))


@pytest.mark.slow
def test_or_goes_on_and_says_in_the_end_what_it_could_not_write(tmp_path: Path) -> None:
    found = train(tmp_path, 130, "--set", "checkpoint.on_error=continue")
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr + found.stdout
    assert "the run goes on" in found.stdout
    assert "the checkpoint of update 16 could not be written" in found.stdout
    assert "cannot write to" in found.stderr
    assert "(No space left on device)" in found.stderr
    store = CheckpointStore(tmp_path / "kept" / "run" / "checkpoints")
    newest = store.steps()[-1]
    assert newest < 16
    assert store.load(newest).step == newest
