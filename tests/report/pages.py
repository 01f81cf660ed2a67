"""Pages as a parser and as a browser have them, and names that must stay text in them."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from convoy import units

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "--><svg onload=alert(1)>",
    "' onclick='alert(1)",
    '" autofocus onfocus="alert(1)',
    "{{ 7*7 }}{% for x in y %}",
    "]]><b>",
    "&lt;b&gt; &#60;",
    "$\\frac{1}{$ and $x$",
    "a\x1b[2Jb\x00c\x08",
    "\u202egnp.exe\u2066",
    "\u2028\u2029",
    "\ud800",
    "javascript:alert(1)",
]
ADDRESSES = {"src", "href", "srcset", "action", "poster", "data", "xlink:href"}


class Page(HTMLParser):
    """The elements and texts of a page; notices tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.text = html, ""
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "img", "br", "input", "hr"}:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack[-1:] not in (["style"], ["script"]):
            self.text += data.replace(units.SPACE, " ")

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def harmless(html: str) -> Page:
    """The page has one script, the one that it vouches for, no handlers, and no address but its own data."""
    page = Page(html)
    for tag, attributes in page.elements:
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ADDRESSES or (value or "").startswith(("data:", "#"))
    assert not set(html) & set("\x1b\x00\x08\u202e\u2066\u2028\u2029")
    assert not re.search(r"url\((?!#)|@import", re.sub(r'"data:[^"]*"', "", html))
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policy is not None and policy.startswith("default-src 'none'")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert len(page.all("script")) == 1
    return page


# In Chromium, narrow and wide: the page itself is asked what it looks like.

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
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    paper: getComputedStyle(document.body).backgroundColor,
    cut: [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth + 1)
      .map((one) => getComputedStyle(one).backgroundImage !== "none"),
  };
  console.log("PROBE" + JSON.stringify(found));
});
"""
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --disable-sync --disable-background-networking "
FLAGS += "--disable-component-update --no-first-run --hide-scrollbars --enable-logging=stderr --dump-dom"


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
    flags = [*FLAGS.split(), f"--user-data-dir={profile}", f"--window-size={width + 100},1200"]
    flags.append(f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    done = subprocess.run([BROWSER, *flags, frame.as_uri()], capture_output=True, text=True, timeout=90, check=False)
    console = re.findall(r"CONSOLE[^\]]*\] \"(.*)\", source: ", done.stderr)
    probes = [line.removeprefix("PROBE") for line in console if line.startswith("PROBE")]
    assert len(probes) == 1, done.stderr
    return json.loads(probes[0]), [line for line in console if not line.startswith("PROBE")]
