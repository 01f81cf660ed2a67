"""The first commands, or lines of Python, of each page of the cookbook run as they stand there."""

import re
import shlex
from pathlib import Path

import pytest

from convoy.cli import main

PAGES = sorted((Path(__file__).parents[2] / "docs" / "cookbook").glob("*.md"))


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_a_page_begins_with_commands_that_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    if (lines := re.search(r"^```python\n(import convoy\n.*?)^```", text, re.DOTALL | re.MULTILINE)) is not None:
        exec(lines[1], {})
        return
    block = re.search(r"^```\n(convoy.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    if (code := re.search(r"^`mine.py`:\n\n```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)) is not None:
        (tmp_path / "mine.py").write_text(code[1])
    for line in block[1].replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["convoy"]:
            assert main(words[1:]) == 0, line
