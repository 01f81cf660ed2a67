"""Opens the report in Chromium, narrow and wide, and asks the page itself what it looks like."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from convoy.report.report import write_report
from report.made_runs import complete_run, evaluation, summary
from report.test_prediction import comparison

PROBE = """
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect());
  const paths = [...document.querySelectorAll("figure svg")].map((svg) => svg.querySelectorAll("path").length);
  const found = {
    width: innerWidth,
    content: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    plots: boxes.filter((box, place) => box.width > 250 && box.height > 180 && paths[place] > 3).length,
    pictures: [...document.images].filter((image) => image.naturalWidth > 0).length,
    text: Math.min(...[...document.querySelectorAll("figure svg text")].map(
      (text) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)),
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    paper: getComputedStyle(document.body).backgroundColor,
    cut: [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth + 1)
      .map((one) => getComputedStyle(one).backgroundImage !== "none"),
    buttons: [...document.querySelectorAll("button")].filter((button) => !button.hidden).length,
  };
  console.log("PROBE" + JSON.stringify(found));
});
"""

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--dump-dom",
]

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium is not installed")


def look(report: Path, profile: Path, *, width: int, dark: bool = False) -> tuple[dict[str, Any], list[str]]:
    """What the probe found in the page at a width, and what the console said. Only the probe is added to the page."""
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    html = report.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ")
    probed = report.with_name("probed.html")
    probed.write_text(html.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    assert BROWSER is not None
    # A window is at least 500 pixels wide, a frame is as narrow as one likes.
    frame = report.with_name("frame.html")
    frame.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,">'
        f'<iframe src="{probed.name}" style="width: {width}px; height: 1000px; border: 0">'
    )
    flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width + 100},1200"]
    flags.append(f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    done = subprocess.run([BROWSER, *flags, frame.as_uri()], capture_output=True, text=True, timeout=90, check=False)
    said = re.findall(r"CONSOLE[^\]]*\] \"(.*)\", source: ", done.stderr)
    probes = [line.removeprefix("PROBE") for line in said if line.startswith("PROBE")]
    assert len(probes) == 1, done.stderr
    return json.loads(probes[0]), [line for line in said if not line.startswith("PROBE")]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(400, False), (820, True), (1600, True)])
def test_the_page_is_whole_quiet_and_fits(tmp_path: Path, width: int, dark: bool) -> None:
    names = ["airplane", "<script>alert(1)</script>", "w" * 300, *map(str, range(9))]
    bad = [{"name": "deep/" * 60 + "x.png", "reason": "truncated", "split": "train"}]
    run = complete_run(tmp_path, final=evaluation(names), results=summary(data="d" * 300, bad_images=bad))
    (run / "prediction.json").write_text(json.dumps(comparison(plan="p" * 300).to_document()), encoding="utf-8")
    found, said = look(write_report(run), tmp_path / "profile", width=width, dark=dark)
    assert said == []
    assert found["width"] == width
    assert found["content"] <= width
    assert [address for address in found["requests"] if not address.startswith(("data:", "file:"))] == []
    assert (found["plots"], found["pictures"], found["buttons"]) == (6, 6, 2)
    assert 11 <= found["text"] <= 17
    assert found["dark"] == dark
    assert found["paper"] == ("rgb(18, 21, 26)" if dark else "rgb(255, 255, 255)")


def test_tables_fit_a_narrow_page_or_show_that_they_scroll(tmp_path: Path) -> None:
    report = write_report(complete_run(tmp_path))
    assert look(report, tmp_path / "profile", width=400)[0]["cut"] == []
    found = look(report, tmp_path / "profile", width=240)[0]["cut"]
    assert found and all(found)


def test_the_probe_notices_a_bad_page(tmp_path: Path) -> None:
    report = write_report(complete_run(tmp_path))
    bad = '<div style="width: 500px">wide</div><img src="http://127.0.0.1:9/a.png"><script>alert(1)</script></footer>'
    report.write_text(report.read_text(encoding="utf-8").replace("</footer>", bad), encoding="utf-8")
    found, said = look(report, tmp_path / "profile", width=400)
    assert found["content"] > 400
    assert any("Content Security Policy" in line for line in said)
