"""Run a test function on several real processes: `run_ranks(function, world, *args)`.

    def body(scale):                       # at module level; runs on every rank with the process group joined
        x = torch.ones(1) * scale
        dist.all_reduce(x)
        return x.item()

    def test_sum():
        assert run_ranks(body, 2, 3.0) == [6.0, 6.0]

The processes are forked from a server that has torch imported and live until the session ends, so that a run takes
milliseconds. Each run joins a new gloo group, by one store for all runs, and leaves it; torchrun's variables, the
seed, the default dtype and one thread are set before. A failing or hanging rank has all processes replaced and raises
RankFailed with the traceback of the first rank that failed, or with the stack of every rank that did not come back.
"""

import atexit
import faulthandler
import functools
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from convoy.comm.joining import leave
from short import measure_shortly

_PRELOAD = ["pytest", "numpy", "torch", "torch.distributed", "torch.distributed.nn", "torch.testing", "torch._dynamo"]
_PRELOAD += ["convoy.bench.measure", "convoy.training.trainer"]  # which load what they need
_START_S = 300.0
"""To start processes and load modules, which takes a minute where many do so at the same time."""


class RankFailed(AssertionError):  # noqa: N818 (it is the failure of a test)
    """A rank raised, died or did not come back."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, join: bool = True) -> list:
    """What `function(*args)` returns on each of `world` processes, in order of rank.

    Args:
        function: of a module's top level.
        world: number of processes.
        args: for the function; they and the results are pickled.
        timeout: seconds for everything, once all processes have started and loaded the module; a collective waits for
            half of it.
        join: whether the process group is joined before; torchrun's variables are set in any case.
    """
    return _pool.run(function, world, args, timeout, join)


def replace_processes() -> None:
    """Start new processes for the next run: those that there are may keep much memory, or have changed for good."""
    _pool.close()


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.stacks = tempfile.NamedTemporaryFile(prefix="convoy-stacks-", delete=False)  # noqa: SIM115
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.stacks.name), daemon=True)
        self.process.start()
        theirs.close()

    def stack(self) -> str:
        """Where the process is now."""
        if self.process.pid and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return Path(self.stacks.name).read_text(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.stacks.close()
        Path(self.stacks.name).unlink(missing_ok=True)


class _Pool:
    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.store: dist.TCPStore | None = None
        self.runs = 0

    def run(self, function: Callable[..., Any], world: int, args: tuple, timeout: float, join: bool) -> list:
        self.store = self.store or _open_store()
        store = self.store if join else _open_store()
        self.runs += 1
        while len(self.workers) < world:
            self.workers.append(_Worker())
        workers = self.workers[:world]
        module = sys.modules[function.__module__]
        payload, name = pickle.dumps(args), function.__qualname__
        run = self.runs if join else None
        try:
            for worker in workers:
                worker.pipe.send((_load, (module.__name__, module.__file__)))
            self._collect(workers, name, time.monotonic() + _START_S)
            for rank, worker in enumerate(workers):
                variables = _variables(rank, world, store.port)
                worker.pipe.send((_run, (module.__name__, name, payload, str(Path.cwd()), variables, timeout, run)))
            return self._collect(workers, name, time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise

    def _collect(self, workers: list[_Worker], name: str, deadline: float) -> list:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        ranks = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while len(results) + len(failures) < len(workers):
            left = [pipe for pipe, rank in ranks.items() if rank not in results and rank not in failures]
            ready = wait(left, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = ranks[pipe]
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    workers[rank].process.join(5)
                    status = workers[rank].process.exitcode
                    failures = {rank: f"rank {rank} died with exit status {status}\n{workers[rank].stack()}"} | failures
                    deadline = 0.0
                    continue
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = f"rank {rank} failed:\n{value}"
                    deadline = min(deadline, time.monotonic() + 0.3)  # others may know more
        if len(results) == len(workers):
            return [results[rank] for rank in range(len(workers))]
        left = sorted(set(range(len(workers))) - set(results) - set(failures))
        stuck = [f"rank {rank} did not come back, it is at:\n{workers[rank].stack()}" for rank in left]
        raise RankFailed("\n".join([f"{name} on {len(workers)} ranks", *failures.values(), *stuck]))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []


_pool = _Pool()
atexit.register(_pool.close)


def _open_store() -> dist.TCPStore:
    """A store for one run or for many, on IPv4: an IPv6 socket has torch look up every connection's name."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _variables(rank: int, world: int, port: int) -> dict[str, str]:
    """As torchrun's agent, which holds the store, sets them."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    fixed = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    return fixed | {name: str(number) for name, number in numbers.items()}


def _serve(pipe: Connection, stacks: str) -> None:
    """A process of the pool: one task after another until the parent is gone."""
    measure_shortly()
    with Path(stacks).open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file=file)
        while True:
            try:
                task, args = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                return
            try:
                answer = pickle.dumps((True, task(*args)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)


def _run(
    module: str, name: str, payload: bytes, folder: str, variables: dict[str, str], timeout: float, run: int | None
) -> Any:
    function: Any = sys.modules[module]
    for part in name.split("."):
        function = getattr(function, part)
    args = pickle.loads(payload)
    before = dict(os.environ)
    os.environ.update(variables)
    os.chdir(folder)  # processes are shared by tests, and the first may have begun in another folder
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if run is not None:
            _join(variables, run, timedelta(seconds=timeout / 2))
        result = function(*args)
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would cut the connections of the others
        return result
    finally:
        leave()
        os.environ.clear()
        os.environ.update(before)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


@functools.cache
def _connection(port: int) -> dist.TCPStore:
    """One for all runs: when torch connects, it asks name servers for the loopback's name, and waits for 5 seconds
    where an answer is lost."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _join(variables: dict[str, str], run: int, timeout: timedelta) -> None:
    """Join the process group of a run."""
    connection = _connection(int(variables["MASTER_PORT"]))
    connection.set_timeout(timeout)
    store = dist.PrefixStore(f"run {run}", connection)
    rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _load(name: str, file: str) -> None:
    """Load the test's module under the name that pytest gave it."""
    torch.set_default_dtype(torch.float32)  # before a module makes its tensors
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        gc.collect()
        gc.freeze()  # what modules keep is no garbage, and need not be looked through
