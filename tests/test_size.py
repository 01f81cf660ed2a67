"""How many lines every folder may have: a table that only ever goes down."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("**/*.py", "**/*.css", "**/*.js", "**/*.jinja")
SLACK = 50
LINES = {
    "src/convoy": 1873,
    "src/convoy/bench": 4310,
    "src/convoy/checkpoint": 448,
    "src/convoy/cli": 3348,
    "src/convoy/comm": 2581,
    "src/convoy/data": 4803,
    "src/convoy/doctor": 1401,
    "src/convoy/engine": 5759,
    "src/convoy/graph": 1560,
    "src/convoy/hardware": 783,
    "src/convoy/launch": 1290,
    "src/convoy/models": 1689,
    "src/convoy/ops": 4951,
    "src/convoy/planner": 7536,
    "src/convoy/plans": 2636,
    "src/convoy/recipe": 1355,
    "src/convoy/report": 2784,
    "src/convoy/run": 734,
    "src/convoy/script": 1459,
    "src/convoy/tasks": 1027,
    "src/convoy/training": 6595,
    "tests": 20854,
    "benchmarks": 5996,
    "docs": 3353,
}
"""Lines by folder: of code with those below it, of `docs` the guides, of `src/convoy` what lies there itself."""


def size(folder: str) -> int:
    patterns = {"docs": ("*.md",), "src/convoy": ("*.py",)}.get(folder, CODE)
    files = {path for pattern in patterns for path in (ROOT / folder).glob(pattern)}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


@pytest.mark.parametrize("folder", LINES)
def test_a_folder_has_no_more_lines_than_its_row_and_hardly_fewer(folder: str) -> None:
    now, row = size(folder), LINES[folder]
    assert now <= row, f"{folder} has {now - row} lines more than its row: take as many out of it before you add some"
    assert now >= row - SLACK, f"{folder} has become smaller: set its row in tests/test_size.py to {now}"


def test_every_folder_has_a_row() -> None:
    folders = {f"src/convoy/{path.parent.name}" for path in (ROOT / "src" / "convoy").glob("*/__init__.py")}
    assert set(LINES) == folders | {"src/convoy", "tests", "benchmarks", "docs"}
