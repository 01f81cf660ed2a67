"""The very command of a manifest, run as processes of this machine in the place of pods."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import manifests
from convoy.cli import main
from convoy.launch.kubernetes.training import complete
from processes import children
from started import ENVIRONMENT, digest, wait_for
from tiny import write_mnist
from whole_runs import as_before

TRAIN = "tiny:TinyNet --data data --batch 24 --reproducible --workers 0 --set microbatch=3 --set checkpoint.every=5ba"


class Pods:
    """The pods of an indexed Job: processes that see no other variables than those of the manifest."""

    def __init__(self, folder: Path, updates: int) -> None:
        write_mnist(folder / "data")
        self.words = [*TRAIN.split(), "--epochs", f"{updates}ba"]
        training = manifests.training(
            complete(tuple(self.words), {}, "lenet", 2),
            name="lenet",
            devices_per_node=1,
            accelerator=None,
            data_claim=None,
        )
        (self.container,) = manifests.pod_of(manifests.read(training, "job"))["containers"]
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @contextmanager
    def start(self, index: int) -> Iterator[subprocess.Popen]:
        """One pod; all of it ends with this context."""
        variables = {name: ENVIRONMENT[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")}
        for one in self.container["env"]:
            variables[one["name"]] = one.get("value", str(index))  # what is no value is the number of the pod
        variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(self.port), "HOME": str(self.folder)}
        program, *words = (
            manifests.expanded(word, variables).replace("/runs/", f"{self.folder}/")
            for word in [*self.container["command"], *self.container["args"]]
        )
        line = [str(Path(sys.executable).with_name(program)), *words]
        with (
            (self.folder / f"pod-{index}-{time.monotonic_ns()}.log").open("w") as log,
            subprocess.Popen(
                line, env=variables, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            ) as process,
        ):
            try:
                yield process
            finally:
                kill(process)

    def are_met(self) -> bool:
        """Whether the rendezvous is there: on one machine the second pod could take its place."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.folder.glob("pod-*.log")))

    def serial(self) -> str:
        """What one device trains."""
        with pytest.MonkeyPatch.context() as patch, as_before():
            patch.chdir(self.folder)
            assert main(["train", *self.words, "--out", "serial"]) == 0
        return digest(self.folder / "serial")


def kill(process: subprocess.Popen) -> None:
    """A pod's end takes all of its processes: torch's launcher starts the ranks in sessions of their own."""
    for group in {process.pid, *children(process.pid)}:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


@pytest.mark.slow
def test_two_pods_train_together(tmp_path: Path) -> None:
    pods = Pods(tmp_path, 4)
    with ExitStack() as stack:
        processes = [stack.enter_context(pods.start(index)) for index in range(2)]
        assert [process.wait(120) for process in processes] == [0, 0], pods.logs()
    assert digest(tmp_path / "lenet") == pods.serial()


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_pod_that_is_made_anew_goes_on_with_the_run(tmp_path: Path) -> None:
    """A minute and a half: the launcher misses a lost pod by its heartbeats, and tells the new one where all meet."""
    pods = Pods(tmp_path, 400)
    with ExitStack() as stack:
        first = stack.enter_context(pods.start(0))
        wait_for(pods.are_met, 90)
        second = stack.enter_context(pods.start(1))
        wait_for(lambda: any((tmp_path / "lenet" / "checkpoints").glob("step-*")), 90)
        kill(second)
        again = stack.enter_context(pods.start(1))
        assert [first.wait(150), again.wait(150)] == [0, 0], pods.logs()
    assert digest(tmp_path / "lenet") == pods.serial()
