"""A real Slurm for tests: a controller and two nodes in emulated hosts, in a folder of its own, gone afterwards."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from emulated_hosts import TestHost, emulated_hosts

_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
# A requeued job waits until the credential of its first start has expired: two minutes by default, and if that is below
# 5 s.
_CONFIGURATION = """\
ClusterName=convoytest
SlurmctldHost=node0({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
ReturnToService=2
KillWait=5
NodeName=node1 NodeAddr={addresses[1]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=node2 NodeAddr={addresses[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """One that runs."""

    login: TestHost  # the host of the controller, from which jobs are submitted
    environment: dict[str, str]  # that finds the cluster

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """What a command on the login host prints."""
        done = self.login.run(list(command), env=self.environment, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job, by its names."""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Daemons of Slurm and munge, which are stopped when the context is left."""
    missing = [name for name in _DAEMONS if shutil.which(name, path=_path()) is None]
    if missing:
        pytest.skip(f"a real Slurm needs {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    with emulated_hosts(3) as hosts, tempfile.TemporaryDirectory(prefix="convoy-slurm-") as name:
        folder = Path(name)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        addresses = [host.address for host in hosts]
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, addresses=addresses))
        environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "log", "pid", "seed")]
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
        daemons = [(hosts[0], munge), (hosts[0], ["slurmctld", "-D"])]
        daemons += [(host, ["slurmd", "-D"]) for host in hosts[1:]]
        started: list[subprocess.Popen] = []
        cluster = Cluster(hosts[0], environment)
        try:
            for host, command in daemons:
                log = (folder / f"{host.name}-{command[0]}.out").open("w")
                with log:
                    started.append(host.start(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
                if command[0] == "munged":
                    _wait(lambda: (folder / "munge.socket").exists(), folder)
            _wait(lambda: _idle(cluster), folder)
            yield cluster
        finally:
            for process in reversed(started):
                process.send_signal(signal.SIGTERM)
            for process in reversed(started):
                try:
                    process.wait(3)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _idle(cluster: Cluster) -> bool:
    done = cluster.login.run(["sinfo", "--noheader", "--format=%T %D"], env=cluster.environment)
    return done.stdout.strip() == "idle 2"


def _wait(condition: object, folder: Path) -> None:
    until = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        if time.monotonic() > until:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in folder.glob("*.out"))
            pytest.fail(f"Slurm does not start\n{logs}")
        time.sleep(0.1)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
