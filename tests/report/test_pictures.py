import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from convoy.errors import ConvoyError
from convoy.report.pages import LARGEST, read_picture


def test_a_picture_becomes_a_png_inside_the_page(tmp_path: Path) -> None:
    Image.new("RGB", (28, 20), (250, 10, 10)).save(tmp_path / "a.png")
    picture = read_picture(tmp_path, "a.png")
    assert picture is not None
    assert (picture.width, picture.height, picture.coarse) == (28, 20, True)
    head, _, body = picture.uri.partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(body))).getpixel((3, 3)) == (250, 10, 10)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_every_mode_is_shown(tmp_path: Path, mode: str) -> None:
    name = "a.jpg" if mode == "CMYK" else "a.png"
    Image.new(mode, (600, 300)).save(tmp_path / name)
    picture = read_picture(tmp_path, name)
    assert picture is not None
    assert (picture.width, picture.height, picture.coarse) == (LARGEST, LARGEST // 2, False)


def test_a_missing_picture_is_none(tmp_path: Path) -> None:
    assert read_picture(tmp_path, "a.png") is None
    assert read_picture(tmp_path, None) is None


def test_a_corrupt_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    with pytest.raises(ConvoyError, match=r"a\.png is not a readable"):
        read_picture(tmp_path, "a.png")


@pytest.mark.parametrize("link", [False, True])
def test_a_picture_outside_the_run_is_refused(tmp_path: Path, link: bool) -> None:
    run = tmp_path / "run"
    run.mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "private.png")
    (run / "link.png").symlink_to(tmp_path / "private.png")
    with pytest.raises(ConvoyError, match="outside the run directory"):
        read_picture(run, "link.png" if link else "../private.png")
