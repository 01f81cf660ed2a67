"""The very command of a manifest, run as processes of this machine in the place of pods."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import manifests
from convoy.launch.kubernetes.training import complete
from processes import children

TRAIN = ("lenet", "--data", "mnist-mini", "--batch", "256", "--reproducible", "--seed", "1", "--workers", "0")
TRAIN = (*TRAIN, "--set", "evaluate_every=1000ba")


class Pods:
    """The pods of an indexed Job: processes that see no other variables than those of the manifest."""

    def __init__(self, folder: Path, updates: int, *settings: str) -> None:
        arguments = complete((*TRAIN, "--epochs", f"{updates}ba", *settings), {}, "lenet", 2)
        asked = manifests.training(arguments, name="lenet", devices_per_node=1, accelerator=None, data_claim=None)
        (container,) = manifests.pod_of(manifests.read(asked, "job"))["containers"]
        self.container, self.folder = container, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @contextmanager
    def start(self, index: int) -> Iterator[subprocess.Popen]:
        """One pod; all of it ends with this context."""
        variables = self._variables(index)
        program, *words = (
            self._place(manifests.expanded(word, variables))
            for word in [*self.container["command"], *self.container["args"]]
        )
        program = str(Path(sys.executable).with_name(program))
        log = (self.folder / f"pod-{index}-{time.monotonic_ns()}.log").open("w")
        with (
            log,
            subprocess.Popen(
                [program, *words], env=variables, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            ) as process,
        ):
            try:
                yield process
            finally:
                kill(process)

    def _variables(self, index: int) -> dict[str, str]:
        found: dict[str, str] = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        found["CONVOY_CACHE"] = str(self.folder / "cache")
        for one in self.container["env"]:
            found[one["name"]] = one.get("value", str(index))  # what is no value is the number of the pod
        return found | {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(self.port), "HOME": str(self.folder)}

    def _place(self, word: str) -> str:
        return word.replace("/runs/", f"{self.folder}/")

    def first_listens(self) -> bool:
        """Whether the rendezvous is there: on one machine the second pod could take its place."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.folder.glob("pod-*.log")))


def kill(process: subprocess.Popen) -> None:
    """A pod's end takes all of its processes: torch's launcher starts the ranks in sessions of their own."""
    for group in {process.pid, *children(process.pid)}:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def await_that(condition: Callable[[], bool], pods: Pods) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, pods.logs()
        time.sleep(0.05)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "lenet" / "weights.safetensors")


@pytest.mark.slow
def test_two_pods_train_together(tmp_path: Path) -> None:
    pods = Pods(tmp_path, 4)
    with ExitStack() as stack:
        started: list[Any] = [stack.enter_context(pods.start(index)) for index in range(2)]
        assert [one.wait(120) for one in started] == [0, 0], pods.logs()
    assert weights(tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_pod_that_is_made_anew_goes_on_with_the_run(tmp_path: Path) -> None:
    """Bit for bit with the run that nothing happened to. A minute and a half: the launcher misses a lost pod by its
    heartbeats."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    settings = ("--set", "checkpoint.every=5ba")
    with ExitStack() as stack:
        pods = Pods(whole, 60, *settings)
        started = [stack.enter_context(pods.start(index)) for index in range(2)]
        assert [one.wait(120) for one in started] == [0, 0], pods.logs()
    with ExitStack() as stack:
        pods = Pods(cut, 60, *settings)
        first = stack.enter_context(pods.start(0))
        await_that(pods.first_listens, pods)
        second = stack.enter_context(pods.start(1))
        await_that(lambda: any((cut / "lenet" / "checkpoints").glob("step-*")), pods)
        kill(second)
        again = stack.enter_context(pods.start(1))
        assert [first.wait(150), again.wait(150)] == [0, 0], pods.logs()
    undisturbed, resumed = weights(whole), weights(cut)
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)
