"""A job on a real Slurm of two nodes that is queued again in its middle, and what its script must say."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convoy.cli import main
from convoy.errors import ConvoyError
from convoy.launch.slurm import SlurmJob, minutes_of, submit
from slurm_cluster import Cluster, slurm_cluster
from started import digest, steps, wait_for
from tiny import write_mnist
from whole_runs import as_before

TESTS = str(Path(__file__).parents[1])
TRAIN = (
    "tiny:TinyNet --data data --batch 24 --lr 0.05 --reproducible --epochs 160ba --set microbatch=3 --set log_every=1ba"
)


def wait_until(condition: Callable[[], bool], what: str, log: Path) -> None:
    try:
        wait_for(condition, 60)
    except AssertionError:
        pytest.fail(f"{what}: {log.read_text() if log.exists() else 'no log'}")


def launch(cluster: Cluster, folder: Path, *options: str) -> str:
    """Submit a job on two nodes; its number."""
    words = ["-m", "convoy", "launch", "slurm", "--nodes", "2", "--name", "it's odd", "--script", "a job.sh", *options]
    answer = cluster.run(sys.executable, *words, "--submit", "--", *TRAIN.split(), "--device", "cpu", cwd=folder)
    return answer.strip().rpartition(" ")[2]


@pytest.mark.slow
def test_a_job_that_is_queued_again_in_its_middle_ends_with_the_same_weights(tmp_path: Path) -> None:
    write_mnist(tmp_path / "data")
    with slurm_cluster() as cluster:
        cluster.environment["PYTHONPATH"] = TESTS
        job = launch(cluster, tmp_path, "--time", "5m", "--option", "comment=a $HOME b")
        run, log = tmp_path / f"runs/it-s-odd-{job}", tmp_path / f"it-s-odd-{job}.log"
        wait_until(lambda: steps(run) > 5, "the job does not train", log)
        assert cluster.state(job)["JobName"] == "it's"  # and ` odd`
        cluster.run("scancel", "--batch", "--signal=USR2", job)  # as Slurm does before the time is over
        with pytest.MonkeyPatch.context() as patch, as_before():
            patch.chdir(tmp_path)
            assert main(["train", *TRAIN.split(), "--out", "serial"]) == 0
        wait_until(lambda: (run / "weights.safetensors").exists(), "the job does not go on", log)
        wait_until(lambda: cluster.state(job)["JobState"] == "COMPLETED", "the job does not end", log)
        assert cluster.state(job)["Restarts"] == "1"
    text = log.read_text()
    assert "SIGUSR2: stopped and saved after" in text
    assert 5 <= int(text.partition("going on after ")[2].partition(" of 160 updates")[0]) < 160
    assert "on 2 devices (cpu), plan sample=2" in text
    assert digest(run) == digest(tmp_path / "serial")


def test_the_script_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    options = {"partition": "gpu", "comment": "it's $HOME", "exclusive": None}
    train = ["resnet50", "--data", "/data/a b;c"]
    script = SlurmJob(train, None, "/opt/a b/python", "my net", 2, 4, time="8h", options=options).script()
    for line in (
        "#SBATCH --job-name='my net'",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=0-08:00:00",
        "#SBATCH --signal=B:USR2@120",
        "#SBATCH --requeue",
        "#SBATCH --output=my-net-%j.log",
        "#SBATCH --exclusive",
        "out=runs/my-net-$SLURM_JOB_ID",
    ):
        assert line in script.splitlines()
    assert "'/opt/a b/python' -m convoy train resnet50 --data '/data/a b;c' --out \"$out\" --resume &" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)

    monkeypatch.chdir(tmp_path)
    line = "launch slurm --nodes 2 --devices-per-node 3 --time 8h --option partition=gpu --json --script"
    train = ["resnet18", "--data", "x y", "--out=runs/$a b", "--interface", "ib0", "--resume", "--device", "cpu"]
    assert main([*line.split(), "a job.sh", "--", *train]) == 0
    assert json.loads(capsys.readouterr().out) == {"script": "a job.sh", "job": None}
    script = Path("a job.sh").read_text()
    assert "convoy train resnet18 --data 'x y' --device cpu" in script
    assert ' --out "$out" --resume --interface ib0 &' in script and "out='runs/$a b'" in script
    assert "#SBATCH --partition=gpu" in script and "gpus-per-node" not in script
    assert (
        "srun --kill-on-bad-exit=1 --cpus-per-task=3 " in SlurmJob(["x"], None, "p", "n", cores_per_device=3).script()
    )


@pytest.mark.parametrize(
    ("status", "stop", "says"),
    [(0, 0, "ran"), (2, 0, "ran"), (1, 0, "ran ran ran"), (1, 1, "ran again"), (0, 1, "ran")],
)
def test_what_the_script_does_when_the_ranks_end(status: int, stop: bool, says: str, tmp_path: Path) -> None:
    """With an srun that ends with a status, after a signal if there is to be one."""
    end = "kill -USR2 $PPID\nfor i in {1..100}; do sleep 0.05; done\n" if stop else f"exit {status}\n"
    (tmp_path / "srun").write_text(f"#!/bin/bash\ntrap 'exit {status}' USR2\necho -n 'ran ' >> said\n{end}")
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho -n again >> said; echo $* > requeued\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(SlurmJob(["lenet"], None, "python", "n", max_restarts=2).script())
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, timeout=30, check=False)
    assert (tmp_path / "said").read_text().strip() == says
    again = says.endswith("again")
    assert done.returncode == (0 if again else status)
    assert [path.read_text() for path in tmp_path.glob("requeued")] == ["requeue 7\n"] * again


LIMITS = {"8h": "0-08:00:00", "90m": "0-01:30:00", "1d12h": "1-12:00:00", "2-12": "2-12:00:00", "8:00:00": "0-08:00:00"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nodes": 0}, "--nodes 0"),
    ({"devices_per_node": 0}, "--devices-per-node 0"),
    ({"max_restarts": -1}, "--max-restarts -1"),
    ({"time": "2m", "save_before": 60}, "--save-before 60"),
    ({"interface": "eth0; rm"}, "--interface"),
    ({"name": "n\n#SBATCH --uid=0"}, "--name 'n"),
    ({"options": {"time": "1"}}, "--option time"),
    ({"options": {"a b": "1"}}, "'a b'"),
    ({"options": {"comment": "a\n#SBATCH --uid=0"}}, "'comment'"),
]


def test_times_are_slurms_and_what_cannot_be_a_job_is_refused() -> None:
    for text, limit in LIMITS.items():
        job = SlurmJob(["lenet"], None, "python", "name", time=text, save_before=1)
        assert f"#SBATCH --time={limit}\n" in job.script()
    for text in ("", "8", "soon", "0h", "8h 3x", "-1h", "1:30"):
        with pytest.raises(ConvoyError, match="--time"):
            minutes_of(text)
    for changes, words in REFUSED:
        with pytest.raises(ConvoyError, match=words):
            SlurmJob(**{"arguments": ["lenet"], "out": None, "python": "python", "name": "n"} | changes)


def test_without_slurm_the_script_is_there_to_be_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConvoyError, match=r"there is no sbatch here: submit job\.sh"):
        submit(Path("job.sh"))
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(ConvoyError, match=r"sbatch does not take job\.sh: invalid partition"):
        submit(Path("job.sh"))


def test_a_run_is_gone_on_with_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "it").mkdir(parents=True)
    (tmp_path / "runs" / "it" / "config.yaml").write_text("model: {name: lenet}\ndata: {path: x}\n")
    train = ["--weights", "runs/it", "runs/it", "--resume", "--epochs", "9"]
    assert main(["launch", "slurm", "--", *train]) == 0
    text = (tmp_path / "it.sbatch").read_text()
    assert "out=runs/it\n" in text
    assert 'convoy train --weights runs/it --epochs 9 --out "$out" --resume &' in text
    assert main(["launch", "hosts", "a:1,b:1", "--", *train]) == 0
    assert capsys.readouterr().out.endswith("convoy train --weights runs/it runs/it --resume --epochs 9\n")


MISTAKES = {
    "--nodes 0 -- lenet": "--nodes 0 must be at least 1",
    "--option nodes=3 -- lenet": "--option nodes is set by an option of its own",
    "--script /no/such/folder/x -- lenet": "--script /no/such/folder/x cannot be written",
    "-- lenet --dvice cpu": "--dvice",
    "--nodes 2": "nothing to train",
    "-- lenett --data d": "unknown model 'lenett'",
    "-- lenet --data d --recipe imagenet-91": "there is no recipe imagenet-91",
    "-- lenet --data d --set optimizer.bogus=3": "optimizer.bogus",
    "-- runs/gone --resume": "runs/gone holds no run",
}


def test_a_mistake_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line, words in MISTAKES.items():
        assert main(["launch", "slurm", *line.split()]) == 2, line
        errors = capsys.readouterr().err
        assert words in errors and errors.count("\n") == 1, (line, errors)
    assert not list(tmp_path.iterdir())
