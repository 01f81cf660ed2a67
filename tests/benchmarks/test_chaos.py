"""The benchmark that breaks trainings: a few of its faults, one that must not pass, and ended before it is done."""

import os
import subprocess
import sys
from pathlib import Path

import chaos
import pytest

# The last row promises what is not so: another seed gives other weights.
SOME = """
import sys, chaos
from measuring.faults import Fault
fast = tuple(fault for fault in chaos.FAULTS if fault.fast)
chaos.FAULTS = (*fast, Fault("another seed", "", "identical", options="--seed 1"))
sys.argv = ["chaos.py", "--slack", "3"]
sys.exit(chaos.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_come_out_as_promised_and_what_does_not_is_told(tmp_path: Path) -> None:
    folder = str(Path(chaos.__file__).parent)
    deep = tmp_path / "a-temporary-directory-whose-path-is-longer-than-that-of-a-socket-may-be"
    deep.mkdir()
    variables = os.environ | {"TMPDIR": str(deep), "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    line = [sys.executable, "-c", SOME]
    run = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=380, check=False)
    lines = run.stdout.partition("\n\n")[0].splitlines()
    assert lines.pop() == "another seed: the weights or metrics are others", run.stdout + run.stderr
    assert [each for each in lines if not each.endswith(": as promised")] == []
    assert len(lines) == sum(fault.fast for fault in chaos.FAULTS)
    assert run.returncode == 1
    assert list(deep.iterdir()) == []
