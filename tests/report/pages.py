"""Pages as a parser has them, and names that must stay text in them."""

import base64
import hashlib
import re
from html.parser import HTMLParser

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
