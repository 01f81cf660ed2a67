"""Pictures of a run that a page shows: readable, and of that run."""

from pathlib import Path

import pytest
from PIL import Image

from convoy.errors import ConvoyError
from convoy.report.pages import read_picture


def test_a_corrupt_picture_and_one_outside_the_run_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    with pytest.raises(ConvoyError, match=r"a\.png is not a readable"):
        read_picture(run, "a.png")
    Image.new("L", (8, 8)).save(tmp_path / "private.png")
    (run / "link.png").symlink_to(tmp_path / "private.png")
    for name in ("link.png", "../private.png"):
        with pytest.raises(ConvoyError, match="outside the run directory"):
            read_picture(run, name)
