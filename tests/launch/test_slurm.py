"""What the script of a Slurm job says, what it does when ranks end, and what cannot be one."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from convoy.cli import main
from convoy.errors import ConvoyError
from convoy.launch.clusters import job_script


def script(train: list[str], name: str = "n", **changes: Any) -> str:
    values: dict[str, Any] = {"python": "python", "gpus": True, "options": {}, "nodes": 1, "devices_per_node": 1}
    values |= {"cores_per_device": None, "time": "1h", "save_before": 120, "max_restarts": 3}
    return job_script(train, None, name, **values | changes)


def test_the_script_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text(encoding="utf-8")
    train = ["resnet50", "--data", "/data/image net", "--recipe", "imagenet-90"]
    options = {"nodes": 2, "devices_per_node": 4, "time": "8h", "options": {"partition": "gpu"}}
    documented = script([*train, "--resume"], "resnet50", python="/opt/convoy/bin/python", **options)
    assert documented == page.partition("```bash\n")[2].partition("```")[0]
    text = script(["x"], cores_per_device=3, options={"comment": "it's $HOME", "exclusive": None})
    assert "#SBATCH --comment='it'\"'\"'s $HOME'\n#SBATCH --exclusive\n" in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=3 " in text

    monkeypatch.chdir(tmp_path)
    line = "launch slurm --nodes 2 --devices-per-node 3 --time 8h --interface ib0 --json"
    train = ["resnet18", "--data", "x y", "--out=runs/$a b", "--device", "cpu"]
    assert main([*line.split(), "--script", "a job.sh", "--", *train]) == 0
    assert json.loads(capsys.readouterr().out) == {"script": "a job.sh", "job": None}
    text = Path("a job.sh").read_text()
    words = "convoy train resnet18 --data 'x y' '--out=runs/$a b' --device cpu --resume --interface ib0 &"
    assert words in text and "out='runs/$a b'" in text
    assert "gpus-per-node" not in text


@pytest.mark.parametrize(
    ("status", "stop", "says"), [(2, 0, "ran"), (1, 0, "ran ran ran"), (1, 1, "ran again"), (0, 1, "ran")]
)
def test_what_the_script_does_when_the_ranks_end(status: int, stop: bool, says: str, tmp_path: Path) -> None:
    """With an srun that ends with a status, after a signal if there is to be one."""
    end = "kill -USR2 $PPID\nfor i in {1..100}; do sleep 0.05; done\n" if stop else f"exit {status}\n"
    (tmp_path / "srun").write_text(f"#!/bin/bash\ntrap 'exit {status}' USR2\necho -n 'ran ' >> said\n{end}")
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho -n again >> said; echo $* > requeued\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(script(["lenet"], max_restarts=2))
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, timeout=30, check=False)
    assert (tmp_path / "said").read_text().strip() == says
    again = says.endswith("again")
    assert done.returncode == (0 if again else status)
    assert [path.read_text() for path in tmp_path.glob("requeued")] == ["requeue 7\n"] * again


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"time": text}, "--time") for text in ("8", "8h 3x")),
    ({"time": "2m", "save_before": 60}, "--save-before 60"),
    ({"name": "n\n#SBATCH --uid=0"}, "--name 'n"),
    ({"options": {"comment": "a\n#SBATCH --uid=0"}}, "'comment'"),
]


def test_times_are_slurms_and_what_cannot_be_a_job_is_refused() -> None:
    for text, limit in {"90m": "0-01:30:00", "1d12h": "1-12:00:00", "2-12": "2-12:00:00"}.items():
        assert f"#SBATCH --time={limit}\n" in script(["lenet"], time=text, save_before=1)
    for changes, words in REFUSED:
        with pytest.raises(ConvoyError, match=words):
            script(["lenet"], **changes)
