"""Names of others in reports, tables and pictures: text and nothing else."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from bench.made_study import write_study
from convoy.bench.page import write_files
from convoy.bench.table import csv_of, escaped
from convoy.report.report import write_report
from report.made_runs import CONFIG, ENVIRONMENT, complete_run, evaluation, summary
from report.test_report import Page

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


def check(html: str) -> Page:
    """The page has one script, the one it vouches for, no handlers, and no address but its own data."""
    found = Page(html)
    assert len(found.all("script")) == 1
    for tag, attributes in found.elements:
        assert tag not in {"b", "iframe", "object", "embed", "base", "form"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("src", "href") or (value or "").startswith(("data:", "#"))
    assert not set(html) & {"\x1b", "\x00", "\x08", "\u202e", "\u2066", "\u2028", "\u2029"}
    return found


def test_the_report_of_a_run(tmp_path: Path) -> None:
    all_of_them = " ".join(HOSTILE)
    final = evaluation(HOSTILE)
    for mistake, name in zip(final["mistakes"], HOSTILE, strict=False):
        mistake["name"] = name
    page = check(
        write_report(
            complete_run(
                tmp_path,
                config=CONFIG
                + "note: |\n  "
                + "\n  ".join(name for name in HOSTILE if name.isascii() and name.isprintable()),
                final=final,
                results=summary(
                    model=all_of_them,
                    data=all_of_them,
                    bad_images=[{"name": name, "reason": name, "split": name} for name in HOSTILE],
                    derived=[{"name": name, "value": name, "formula": name, "source": name} for name in HOSTILE],
                    notes=HOSTILE,
                ),
                environment={**ENVIRONMENT, "command": all_of_them, "machine": all_of_them, all_of_them: HOSTILE},
            )
        ).read_text(encoding="utf-8")
    )
    assert page.text.count("<script>alert(1)</script>") >= 8
    assert r"\x1b[2J" in page.text and r"\u202egnp.exe" in page.text


def test_the_report_of_a_study(tmp_path: Path) -> None:
    folder = write_study(tmp_path, devices=(1, 2), plans=("sample",), peers=(), rounds=1, failed=["sample=2 on 2"])
    document = json.dumps(json.loads((folder / "bench.json").read_text()))
    inside = json.dumps("\n\n".join(HOSTILE))[1:-1]
    for known in ("lenet", "A processor", "a layer cannot be divided", "a note"):
        document = document.replace(known, inside)
    (folder / "bench.json").write_text(document)
    written = write_files(folder)
    check(written.report.read_text(encoding="utf-8"))
    table = (folder / "table.tex").read_bytes().decode("utf-8", "replace")
    first, begin = table.splitlines()[:2]
    assert first.startswith("% ") and begin == r"\begin{tabular}{lrrrrrrr}"


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)"])
def test_a_spreadsheet_finds_no_formula(text: str) -> None:
    (row,) = csv.DictReader(io.StringIO(csv_of([{"configuration": text, "step_s": -0.5, "plan": None}]), newline=""))
    assert row == {"configuration": f"'{text}", "step_s": "-0.5", "plan": ""}


def test_a_table_has_no_control_characters() -> None:
    assert csv_of([{"configuration": "\t=1\r=2\x1b"}]) == "configuration\n\\t=1\\r=2\\x1b\n"


@pytest.mark.parametrize("text", ["sample=2", "auto: conv by sample", 'a "quoted", name', "two\nlines"])
def test_other_texts_stay(text: str) -> None:
    (row,) = csv.DictReader(io.StringIO(csv_of([{"configuration": text}]), newline=""))
    assert row == {"configuration": text}


def test_latex_is_text() -> None:
    assert escaped(r"\input{/etc/passwd}") == r"\textbackslash{}input\{/etc/passwd\}"
    assert escaped("50% & $x_1^2$ #~") == (r"50\% \& \$x\_1\textasciicircum{}2\$ \#\textasciitilde{}")
    assert escaped("a\n\nb\x1b") == r"a\textbackslash{}n\textbackslash{}nb\textbackslash{}x1b"
    assert not re.search(r"(?<!\\)[%&#$_]", escaped("%&#$_"))
