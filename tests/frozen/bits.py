"""Whether the frozen runs have the same bits under another revision: python tests/frozen/bits.py REV.

Bits differ from processor to processor, so none are stored: this tree and the other run here, one after the other, in
float32 as people train. Two to three minutes.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from frozen.runs import RUNS, SAME, arguments, bits, write_data  # noqa: E402


def run(tree: Path, data: Path, folder: Path) -> dict[str, str]:
    """The checksums of all runs by the sources of a tree."""
    path = os.pathsep.join([str(tree / "src"), str(TESTS)])
    variables = os.environ | {"PYTHONPATH": path, "CONVOY_CACHE": str(folder / "cache")}
    for name in RUNS:
        command = [sys.executable, "-m", "convoy", *arguments(name, data, folder / name, double=False)]
        subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)
    return {name: bits(folder / name) for name in RUNS}


def main(revision: str) -> int:
    with tempfile.TemporaryDirectory(prefix="convoy-bits-") as temporary:
        there, data = Path(temporary) / "there", write_data(Path(temporary) / "data")
        git = ["git", "-C", str(TESTS), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(there), revision], check=True)
        try:
            before, now = run(there, data, there.parent / "before"), run(TESTS.parent, data, there.parent / "now")
        finally:
            subprocess.run([*git, "remove", "--force", str(there)], check=True)
    for name in RUNS:
        found = "the same bits" if now[name] == before[name] else "OTHER BITS"
        print(f"{name}: {found} as {revision}, {now[name][:12]}")
    alike = len({now[name] for name in SAME}) == 1
    print(f"{' and '.join(SAME)}: {'the same bits' if alike else 'OTHER BITS'}")
    return int(now != before or not alike)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
