"""Which mistakes the tests find: each of `mutants.txt` is made by itself, in a copy of a revision, and tests are run.

    python tests/mutants.py --results mutants.jsonl                      # all, by the tests of its folder and the frozen
    python tests/mutants.py --results all.jsonl --tests all --limit 3600 # by every test
    python tests/mutants.py --results some.jsonl --only 3,17,40          # by their numbers; --list shows them

Stopped, the same command goes on: what stands in the results is not tried again. Before the first mutant of a folder its
tests are run as they are, with the number 0; where they fail then, nothing is learned, and the folder is passed over.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FROZEN = "tests/frozen"
ALSO = {"comm": ["tests/engine"], "plans": ["tests/engine", "tests/ops"], "ops": ["tests/engine"]}
"""Tests beside those of the mutant's own folder, where what the folder does is seen."""


@dataclass(frozen=True)
class Mutant:
    """A line of a file, and what stands in its place; a `why` says what goes wrong then."""

    number: int
    file: str
    why: str
    line: str
    replacement: str

    def tests(self, which: str) -> list[str]:
        """Files and folders for pytest."""
        folder = self.file.partition("/")[0]
        return ["tests"] if which == "all" else [FROZEN, f"tests/{folder}", *ALSO.get(folder, [])]

    @contextmanager
    def made(self, tree: Path) -> Iterator[None]:
        """While entered, the tree has the mistake."""
        path = tree / "src" / "convoy" / self.file
        before = path.read_text(encoding="utf-8")
        lines = before.splitlines(keepends=True)
        (place,) = (at for at, line in enumerate(lines) if line.strip() == self.line)
        lines[place] = lines[place].replace(self.line, self.replacement)
        path.write_text("".join(lines), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")


def table() -> list[Mutant]:
    text = (ROOT / "tests" / "mutants.txt").read_text(encoding="utf-8")
    found = re.findall(r"^([\w/]+\.py): (.*)\n- (.*)\n\+ (.*)$", text, re.MULTILINE)
    return [Mutant(number, *row) for number, row in enumerate(found, 1)]


def run(tree: Path, tests: list[str], limit_s: float, marks: str) -> dict[str, object]:
    """Run tests in a tree until the first fails; what came of it, and which."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    variables = os.environ | {"PYTHONPATH": str(tree / "src")}
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        result = {0: "survived", 1: "caught"}.get(process.returncode, "broken")
    except subprocess.TimeoutExpired:
        output, result = "", "too slow"
    finally:
        try:  # ranks that hang live on without pytest
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return {"result": result, "by": first and first[1], "seconds": round(time.monotonic() - began, 1)}


def tried(results: Path, tests: list[str], mutant: Mutant) -> dict[str, object] | None:
    """What is known of a mutant by these tests; of number 0, of the tests without any."""
    key = {**asdict(mutant), "tests": tests}
    rows = [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []
    return next((row for row in reversed(rows) if all(row[name] == value for name, value in key.items())), None)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--results", type=Path, default=Path("mutants.jsonl"), help="JSON lines, one for each mutant")
    asked.add_argument("--tests", choices=["own", "all"], default="own", help="those of the mutant's folder, or every")
    asked.add_argument("--marks", default="not slow and not matrix", help="as pytest's -m")
    asked.add_argument("--only", default="", help="numbers, with commas between")
    asked.add_argument("--limit", type=float, default=900.0, help="seconds for the tests of a mutant")
    asked.add_argument("--revision", default="HEAD")
    asked.add_argument("--list", action="store_true")
    options = asked.parse_args()
    mutants = [one for one in table() if not options.only or str(one.number) in options.only.split(",")]
    if options.list:
        print("\n".join(f"{one.number:3} {one.file}: {one.why}" for one in mutants))
        return 0

    def known(tree: Path, mutant: Mutant, tests: list[str]) -> dict[str, object]:
        """What comes of a mutant, from the results or now."""
        row = tried(options.results, tests, mutant)
        if row is None:
            row = {**asdict(mutant), "tests": tests, **run(tree, tests, options.limit, options.marks)}
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"{mutant.number:3} {row['result']:8} {mutant.file}: {mutant.why} [{row['by']}]", flush=True)
        return row

    survived = 0
    with tempfile.TemporaryDirectory(prefix="convoy-mutants-") as temporary:
        tree, git = Path(temporary) / "tree", ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), options.revision], check=True)
        try:
            for mutant in mutants:
                tests = mutant.tests(options.tests)
                control = Mutant(0, mutant.file.partition("/")[0], "the tests without a mutant", "", "")
                if known(tree, control, tests)["result"] == "survived":
                    with mutant.made(tree):
                        survived += known(tree, mutant, tests)["result"] == "survived"
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    print(f"{survived} of {len(mutants)} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
