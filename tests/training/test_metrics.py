"""Metrics on a full disk are kept until there is room, in order and whole."""

import json
import resource
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter, masked_crc32c

from convoy.errors import ConvoyError
from convoy.training import metrics as events
from convoy.training.metrics import MetricsWriter
from ranks import run_ranks


def read_events(path: Path) -> list[Event]:
    """As TensorBoard does, with all checksums."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        assert struct.unpack("<I", content[8:12]) == (masked_crc32c(content[:8]),)
        record, content = content[12 : 12 + length], content[12 + length :]
        assert struct.unpack("<I", content[:4]) == (masked_crc32c(record),)
        content = content[4:]
        found.append(Event.FromString(record))
    return found


def test_lines_and_events(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 4) as metrics:
        metrics.write("train", 5, 0.5, 1.0, loss=2.5, top1=float("nan"), top5=None)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line == {"split": "train", "step": 5, "epoch": 0.5, "time_s": 1.0, "loss": 2.5, "top1": None, "top5": None}
    version, purge, loss = read_events(next((tmp_path / "tensorboard").iterdir()))
    assert version.file_version == "brain.Event:2"
    assert purge.step == 5
    assert (loss.step, loss.summary.value[0].tag, loss.summary.value[0].simple_value) == (5, "train/loss", 2.5)


def test_records_are_those_of_tensorboardx(tmp_path: Path) -> None:
    event = Event(step=3, wall_time=0.5)
    writer = RecordWriter(str(tmp_path / "x"))
    writer.write(event.SerializeToString())
    writer.close()
    assert events._record(event) == (tmp_path / "x").read_bytes()


def _on_a_full_disk(folder: Path) -> tuple[list[str], list[int], list[int]]:
    said: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(folder / "metrics.jsonl", folder / "tensorboard", 0, said.append) as metrics:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
        try:
            for step in range(1, 9):
                metrics.write("train", step, 0.0, 0.0, loss=1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        at_first = (folder / "metrics.jsonl").stat().st_size
        assert at_first == 300
        metrics.write("train", 9, 0.0, 0.0, loss=1.0)
    lines = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return said, lines, [event.step for event in read_events(next((folder / "tensorboard").iterdir()))[2:]]


def test_what_does_not_fit_is_kept_and_written_later(tmp_path: Path) -> None:
    ((said, lines, steps),) = run_ranks(_on_a_full_disk, 1, tmp_path)
    assert lines == steps == list(range(1, 10))
    assert len(said) == 2
    assert said[0].endswith("cannot be written (File too large): the metrics are kept until it can")
    assert said[1] == "the metrics are written again, those that were kept too"


def _full_to_the_end(folder: Path) -> list[str]:
    said: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with MetricsWriter(folder / "metrics.jsonl", folder / "tensorboard", 0, said.append) as metrics:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
            for step in range(1, 9):
                metrics.write("train", step, 0.0, 0.0, loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return said


def test_and_where_it_never_fits_that_is_said(tmp_path: Path) -> None:
    ((first, last),) = run_ranks(_full_to_the_end, 1, tmp_path)
    assert "cannot be written" in first
    assert last.startswith("the last metrics could not be written to ")
    assert "metrics.jsonl and " in last
    assert last.endswith("(File too large)")


def test_a_place_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(ConvoyError, match="cannot write to"):
        MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard")
