"""Which mistakes the tests find: each of `mutants.txt` is made by itself in a copy of HEAD, and tests are run.

    python tests/mutants.py mutants.jsonl                        # by the tests of the mutant's folder, and the frozen
    python tests/mutants.py all.jsonl --tests all --limit 3600   # by every test, or by the frozen alone
    python tests/mutants.py some.jsonl --only 'windows|halo'     # those whose file or reason matches

Stopped, the same command goes on after what stands in its results. Tests are first run without a mutant: where
they fail, nothing would be learned, and the mutant is passed over.
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
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALSO = {"comm": ["tests/engine"], "plans": ["tests/engine", "tests/ops", "tests/comm"], "ops": ["tests/engine"]}
"""Tests beside those of the mutant's own folder, where what the folder does is seen."""


def mutants() -> list[tuple[str, ...]]:
    """File, what goes wrong, the line, what stands in its place."""
    text = (ROOT / "tests" / "mutants.txt").read_text(encoding="utf-8")
    return re.findall(r"^([\w/]+\.py): (.*)\n- (.*)\n\+ (.*)$", text, re.MULTILINE)


def mutated(source: str, line: str, replacement: str) -> str | None:
    """A source with another line; None where that does not stand in it once."""
    lines = source.splitlines(keepends=True)
    places = [at for at, each in enumerate(lines) if each.strip() == line]
    for place in places:
        lines[place] = lines[place].replace(line, replacement)
    return "".join(lines) if len(places) == 1 else None


def run(tree: Path, tests: list[str], marks: str, limit_s: float) -> dict[str, object]:
    """Run tests in a tree until the first fails: what came of it, by which, and how long it took."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    variables, pipe = os.environ | {"PYTHONPATH": str(tree / "src")}, subprocess.PIPE
    began, output, result = time.monotonic(), "", "too slow"
    process = subprocess.Popen(command, cwd=tree, env=variables, stdout=pipe, text=True, start_new_session=True)
    with suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=limit_s)
        result = {0: "survived", 1: "caught"}.get(process.returncode, "broken")
    with suppress(ProcessLookupError):  # ranks that hang live on without pytest
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return {"result": result, "by": first and first[1], "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("results", type=Path, help="JSON lines, one for each mutant")
    asked.add_argument("--tests", choices=["frozen", "own", "all"], default="own", help="own: of the mutant's folder")
    asked.add_argument("--marks", default="not slow and not matrix", help="as pytest's -m")
    asked.add_argument("--only", default="", help="regular expression")
    asked.add_argument("--limit", type=float, default=900.0, help="seconds for the tests of one mutant")
    options = asked.parse_args()
    rows = options.results.read_text("utf-8").splitlines() if options.results.exists() else []
    known = {tuple(row["mutant"]): row["result"] for row in map(json.loads, rows)}
    with tempfile.TemporaryDirectory(prefix="convoy-mutants-") as temporary:
        tree, git = Path(temporary) / "tree", ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), "HEAD"], check=True)

        def result_of(*mutant: str, tests: list[str]) -> str:
            """From before, or now."""
            if mutant not in known:
                row = {"mutant": mutant, "tests": tests, **run(tree, tests, options.marks, options.limit)}
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                print(f"{row['result']:8}  {mutant[0]}: {mutant[1]}  [{row['by']}, {row['seconds']} s]", flush=True)
                known[mutant] = str(row["result"])
            return known[mutant]

        try:
            for file, why, line, replacement in mutants():
                folder = file.partition("/")[0]
                own = ["tests/frozen", f"tests/{folder}", *ALSO.get(folder, [])]
                tests = {"frozen": own[:1], "own": own, "all": ["tests"]}[options.tests]
                if not re.search(options.only, f"{file}: {why}"):
                    continue
                path = tree / "src" / "convoy" / file
                source = path.read_text(encoding="utf-8") if path.exists() else ""
                mistaken = mutated(source, line, replacement)
                if mistaken is None:
                    print(f"gone      {file}: {why}: mend its row in mutants.txt", flush=True)
                elif result_of(" ".join(tests), "without a mutant", tests=tests) == "survived":
                    path.write_text(mistaken, encoding="utf-8")
                    result_of(file, why, line, replacement, tests=tests)
                    path.write_text(source, encoding="utf-8")
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    survived = [mutant for mutant, result in known.items() if len(mutant) > 2 and result == "survived"]
    print(f"{len(survived)} of {sum(len(mutant) > 2 for mutant in known)} survived")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
