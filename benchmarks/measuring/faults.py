"""What a fault is, how one is done to a command of Convoy, and what has become of it.

Commands are forked from this process, which has loaded torch: seconds less for each. What they start themselves are new
processes as ever. Every one of them has the case's folder in its environment, by which it is found and ended.
"""

import ctypes
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from string import Template
from types import ModuleType
from typing import NoReturn

import numpy as np
from PIL import Image

from convoy.bench.emulated.network import EmulatedHost
from convoy.cli import main as convoy
from convoy.training import run, set_up, step  # noqa: F401  loaded once, for all that are forked
from measuring import gate

LINE = (
    "train measuring.gate:Net --data $data --out $out --batch 16 --microbatches 2 --lr 0.05 --reproducible --epochs "
    "12ba --set data.image_size=28 --set checkpoint.every=3ba --set checkpoint.keep=9 --set log_every=1ba "
    "--set threads=1 "
)
RESUME = "train $out --resume "
Do = Callable[["Case"], object]
Place = tuple[str, int, int]
_FOLDER, _GROUPS = "CONVOY_CHAOS", Path("/sys/fs/cgroup")
_LONGEST_S, _ENDING_S = 150.0, 3.0
_STATUSES = {"identical": (0,), "fine": (0,), "refused": (2,), "noticed": (1, 2, *range(-19, 0))}


@dataclass(frozen=True)
class Fault:
    """A row: what is done, and what has to come out.

    Attributes:
        name: short, by which it is chosen.
        how: it is done, in words.
        out: `identical`: the command ends with status 0, and the weights and metrics are those of the run left alone;
            `refused`: status 2 and one sentence; `noticed`: status 1, or 2 for the user to mend, with a sentence;
            `fine`: status 0, whatever its numbers.
        says: a pattern of what is said.
        strike: the blow, while the run is held at `at`: the place, the updates done, the rank. It is a function, or a
            line of a shell, as are `before`, `mend` and `after`, in the case's folder (`Case.variables`).
        options: more of the command.
        then: a command that ends with status 0 afterwards; where it resumes the run, it comes to the weights of that
            left alone.
        before, mend, after: what is prepared, what is mended before `then`, and what is looked at in the end; a status
            other than 0, or what is put into `Case.wrong`, is wrong.
        line: the command, with the same variables.
        within: seconds from the blow, or from the start where there is none, until it is said.
        alone: options of the run to compare with, where that is not the usual one.
        ranks: so many hosts with a device each, in folders `host-0`, … where there are such.
        output: where standard output goes: `file`, `closed`, `pipe`, or a path.
        around: a program that starts the command.
        needs: `root`, `mounts`, `groups` or a program; where it is missing the row is skipped.
        fast: it is one of the few that the tests have time for.
    """

    name: str
    how: str
    out: str
    says: str = ""
    strike: Do | str = ""
    options: str = ""
    then: str = ""
    at: Place = ("forward", 8, 0)
    before: Do | str = ""
    mend: Do | str = ""
    after: Do | str = ""
    line: str = LINE
    within: float = 20.0
    alone: str = ""
    ranks: int = 1
    output: str = "file"
    around: str = ""
    needs: str = ""
    fast: bool = False

    @property
    def promise(self) -> str:
        """What has to come out, in words."""
        noticed = f"{self.out} within {self.within:g} s" if self.out in ("refused", "noticed") else self.out
        return noticed + (", then identical" if RESUME in self.then else ", then fine" if self.then else "")


@dataclass
class Case:
    """One fault, as it is done, and what has become of it.

    Attributes:
        shared: the folder with the data and the runs left alone, which all cases read.
        folder: the case's own.
        data, out, cache: of its run.
        done: updates that were done when it was struck.
        pids: the processes that were forked: one, or one for each host.
        hosts, groups: network namespaces, one for each host, and control groups, if the command runs in such.
        stack: what ends with the case.
        megabytes: of memory that the largest process of the command itself has had.
        lost: updates that were done and had to be done again; None where there are none to lose.
        seconds, sentence: until it was noticed, and what said so.
        identical: the weights and metrics are those of the run left alone; None where that is not promised.
        wrong: what did not come out as it has to.
    """

    fault: Fault
    shared: Path
    folder: Path
    slack: float = 1.0
    kills: int = 3
    done: int | None = None
    pids: list[int] = field(default_factory=list)
    hosts: list[EmulatedHost] = field(default_factory=list)
    groups: list[Path] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)
    num: int = 0
    reader: int = -1
    megabytes: int = 0
    lost: int | None = None
    seconds: float | None = None
    sentence: str = ""
    identical: bool | None = None
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.data, self.out, self.cache = self.shared / "data", self.folder / "run", self.shared / "cache"

    def variables(self, text: str) -> dict[str, str]:
        """Those that a text uses, of: paths (`$data`, `$out`, `$folder`, `$shared`), `$newest` checkpoint, processes
        (`$pid`, `$rank1`, `$worker0`), control groups that are made for it (`$pids`, `$memory`), `$updates`."""
        values: dict[str, Callable[[], object]] = {
            "data": lambda: self.data,
            "out": lambda: self.out,
            "folder": lambda: self.folder,
            "shared": lambda: self.shared,
            "newest": lambda: max((self.shared / "half/checkpoints").glob("*/checkpoint.json")).parent.name,
            "pid": lambda: self.pids[0],
            "updates": lambda: 100 + 80 * self.kills,
            **{f"rank{number}": partial(self.rank, number) for number in range(2)},
            **{f"worker{number}": partial(self.worker, number) for number in range(2)},
            **{kind: partial(self.group, kind) for kind in ("pids", "memory")},
        }
        return {name: str(values[name]()) for name in re.findall(r"\$\{?(\w+)", text) if name in values}

    def group(self, kind: str) -> Path:
        """A control group in which the command runs."""
        group = _GROUPS / kind / f"convoy-chaos-{os.getpid()}"
        if group not in self.groups:
            group.mkdir()
            self.stack.callback(group.rmdir)
            self.groups.append(group)
        return group

    def start(self, line: str, held: Place | None = None) -> None:
        """Fork the command, once for each host."""
        self.num, self.pids = self.num + 1, []
        variables = self.variables(line)
        arguments = [Template(part).substitute(variables) for part in shlex.split(line)]
        self.hang_up()
        self.reader, writer = os.pipe()
        for rank in range(self.fault.ranks):
            self.pids.append(os.fork() or self._become(arguments, rank, writer, held))
        os.close(writer)

    def _environment(self, rank: int, held: Place | None) -> dict[str, str]:
        found = {_FOLDER: self.folder, "CONVOY_CACHE": self.cache, "TMPDIR": self.folder, "OMP_NUM_THREADS": 1}
        if self.fault.ranks > 1 and not self.hosts:
            found |= {"RANK": rank, "WORLD_SIZE": self.fault.ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29533}
        return {name: str(value) for name, value in found.items()} | (gate.held(self.folder, *held) if held else {})

    def _become(self, arguments: Sequence[str], rank: int, pipe: int, held: Place | None) -> NoReturn:
        """In the process that was forked: the command, with streams and a place of its own."""
        status = 70
        try:
            os.setsid()
            for group in self.groups:
                (group / "cgroup.procs").write_text(str(os.getpid()))
            if self.hosts:
                self.hosts[rank].enter()
            for number in (signal.SIGTERM, signal.SIGHUP):  # the benchmark may run under nohup
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            output = self.fault.output if self.num == 1 else "file"
            places = [self.folder / f"{name}-{self.num}-{rank}" for name in ("out", "err")]
            places[0] = Path(output) if output[0] == "/" else places[0]
            out, err = (os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for place in places)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(pipe if output == "pipe" else out, 1)
            os.dup2(err, 2)
            os.closerange(3, 256)
            sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
            if output == "closed":
                os.close(1)
                sys.stdout = None
            host = self.folder / f"host-{rank}"
            os.chdir(host if host.exists() else Path(gate.__file__).parents[1])
            os.environ.update(self._environment(rank, held))
            tempfile.tempdir = None  # asked for before
            sys.modules["__main__"] = ModuleType("__main__")  # which new processes would load otherwise
            if self.fault.around and self.num == 1:
                command = [*shlex.split(self.fault.around), sys.executable, "-m", "convoy", *arguments]
                os.execvpe(command[0], command, os.environ)
            if arguments[0] != "train":  # whose network does so, in the process that trains
                gate.watch()
            sys.argv = sys.orig_argv = ["convoy", *arguments]
            status = convoy(list(arguments))
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            for stream in (sys.stderr, sys.stdout):
                with suppress(Exception):
                    stream.flush()
            os._exit(status)

    def processes(self) -> dict[int, dict[str, str]]:
        """The environment of every process of this case that runs, besides those that were forked."""
        mark, found = f"{_FOLDER}={self.folder}\0".encode(), {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                text = (entry / "environ").read_bytes()
                if mark in text and _stat(int(entry.name))[0] != "Z":
                    pairs = (item.decode(errors="replace").partition("=") for item in text.split(b"\0"))
                    found[int(entry.name)] = {key: value for key, _, value in pairs}
        return found

    def rank(self, number: int) -> int:
        """The process of a rank."""
        ranks = [pid for pid, variables in self.processes().items() if variables.get("RANK") == str(number)]
        return next((pid for pid in ranks if int(_stat(pid)[1]) in self.pids), self.pids[0])

    def worker(self, rank: int = 0) -> int:
        """A process that makes pictures for a rank: a child of the server that the rank has started."""
        parents = {pid: int(_stat(pid)[1]) for pid in self.processes()}
        return next(pid for pid, parent in parents.items() if parents.get(parent) == self.rank(rank))

    def said(self, num: int | None = None) -> str:
        """All that was said so far, or by one command."""
        names = sorted(self.folder.glob(f"???-{num or '*'}-*"))
        return "\n".join(name.read_text(errors="replace") for name in names)

    def wait(self, until: Callable[[], bool], what: str) -> bool:
        """Wait for something, no longer than a fault may take."""
        end = time.monotonic() + _LONGEST_S
        while not until():
            if time.monotonic() > end:
                self.wrong.append(f"{what} did not come within {_LONGEST_S:g} s")
                return False
            time.sleep(0.02)
        return True

    def finish(self, says: str = "") -> tuple[int, float]:
        """Wait for the end; the status (negative: the signal), and when `says` was said first, or the end."""
        noticed: list[float] = []
        left, statuses = list(self.pids), [0]

        def all_ended() -> bool:
            if says and not noticed and re.search(says, self.said(self.num)):
                noticed.append(time.monotonic())
            for pid in list(left):
                which, status, used = os.wait4(pid, os.WNOHANG)
                if which:
                    self.megabytes = max(self.megabytes, used.ru_maxrss // 1024)
                    left.remove(pid)
                    statuses.append(os.waitstatus_to_exitcode(status))
            return not left

        self.wait(all_ended, "the end")
        return max(statuses, key=abs), (noticed or [time.monotonic()])[0]

    def hang_up(self) -> None:
        """End the reading of standard output."""
        if self.reader >= 0:
            os.close(self.reader)
        self.reader = -1

    def end(self) -> None:
        """Kill what still runs, which is wrong, and undo what was prepared."""
        killed, until = set[int](), time.monotonic() + _ENDING_S
        while time.monotonic() < until and self.processes():
            time.sleep(0.05)
        while running := {*self.processes(), *(pid for pid in self.pids if _stat(pid)[0] not in "Z")}:
            for pid in running:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            killed |= running
            for pid in self.pids:
                with suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)
        self.wrong += [f"{len(killed)} processes were left"] if killed else []
        self.hang_up()
        self.stack.close()


def _stat(pid: int) -> list[str]:
    """The state of a process and its parent."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["", "0"]


def perform(case: Case, blow: Do | str) -> None:
    """Do what a row says; of a line of a shell, every part has to end with status 0."""
    if callable(blow):
        blow(case)
    elif blow:
        line = ["sh", "-ec", blow]
        variables = os.environ | case.variables(blow)
        done = subprocess.run(line, cwd=case.folder, env=variables, capture_output=True, text=True, check=False)
        case.wrong += [f"{blow}: {done.stdout}{done.stderr}"] if done.returncode else []


def lacking(needs: str) -> str:
    """Why a fault cannot be done here, or nothing."""
    if needs == "root":
        return "" if os.geteuid() == 0 else "only root can be another user too"
    if needs == "mounts":
        return "" if _may_mount() else "needs the right to mount a small file system"
    if needs == "groups":
        able = all(os.access(_GROUPS / kind / "cgroup.procs", os.W_OK) for kind in ("pids", "memory"))
        return "" if able else "needs control groups (version 1) that it may write"
    return "" if not needs or shutil.which(needs) else f"{needs} is not installed"


@cache
def _may_mount() -> bool:
    """Whether this program may mount; what it mounts then is seen by nobody else, and goes with it."""
    is_apart = sys.platform == "linux" and ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    return is_apart and not subprocess.run(("mount", "--make-rprivate", "/"), capture_output=True).returncode


def do(case: Case) -> Case:
    """Do a fault, and look at what has become of it."""
    try:
        _do(case, case.fault)
        case.sentence = case.sentence.replace(f"{case.folder}/", "").replace(socket.gethostname(), "HOST")
    except Exception as error:
        case.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        case.end()
    return case


def _do(case: Case, fault: Fault) -> None:
    def check(is_right: bool, otherwise: str) -> None:
        case.wrong += [] if is_right else [otherwise]

    perform(case, fault.before)
    if (case.folder / "host-0").exists():
        case.data = Path("data")
    elif (case.folder / "data").exists():
        case.data = case.folder / "data"
    if (case.folder / "cache").exists():
        case.cache = case.folder / "cache"
    if (case.folder / "disk").exists():
        case.out = case.folder / "disk/run"
    case.done = 10 if (case.out / "metrics.jsonl").exists() else None  # of the run that was killed
    struck, note = time.monotonic(), case.folder / "at"
    case.start(f"{fault.line} {fault.options}", fault.at if fault.strike else None)
    if fault.strike:
        case.wait(lambda: note.exists() or _stat(case.pids[0])[0] in "Z", "the place of the blow")
        check(note.exists(), "the run ended before the blow")
        if note.exists():
            case.done, struck = json.loads(note.read_text())[1], time.monotonic()
            perform(case, fault.strike)
            (case.folder / "go").touch()
    status, noticed = case.finish(fault.says)
    said = case.said(1)
    case.seconds = round(noticed - struck, 1)
    case.sentence = "" if status == -signal.SIGKILL else _sentence(said, fault.says)
    check(status in _STATUSES[fault.out], f"status {status}: {_sentence(said, '')}")
    check(bool(re.search(fault.says, said)), f"nothing like {fault.says!r} was said")
    check("Traceback" not in said, "a traceback was printed")
    is_late = fault.out in ("refused", "noticed") and case.seconds > fault.within * case.slack
    check(not is_late, f"it took {case.seconds} s")
    if fault.then:
        case.done = None if case.done is None else max(case.done, *_steps(case.out))
        perform(case, fault.mend)
        case.start(fault.then)
        status, _ = case.finish()
        check(status == 0, f"then status {status}: {_sentence(case.said(case.num), '')}")
    if fault.out == "identical" or RESUME in fault.then:
        case.lost, case.identical = _lost(case), same(_left_alone(case), case.out)
        check(case.identical, "the weights or metrics are others")
    perform(case, fault.after)


def _left_alone(case: Case) -> Path:
    """The run to compare with, made when it is asked for first."""
    if not case.fault.alone:
        return case.shared / "healthy"
    name = f"alone-{hashlib.sha256(case.fault.alone.encode()).hexdigest()[:9]}"
    if not (case.shared / name).exists():
        other = Case(Fault(name, "", "fine", options=case.fault.alone), case.shared, case.folder / name, 1, case.kills)
        case.wrong += do(other).wrong
        other.out.rename(case.shared / name)
    return case.shared / name


def _sentence(said: str, says: str) -> str:
    """The line that says it; else the last that is Convoy's own, else the last."""
    lines = [line for line in said.splitlines() if line.strip()]
    fit = [line for line in lines if says and re.search(says, line)]
    return (fit or [line for line in lines if line.startswith(("convoy: ", "rank "))] or lines or [""])[-1][:400]


def _steps(out: Path) -> list[int]:
    """The updates in the metrics, from 0."""
    metrics = out / "metrics.jsonl"
    return [0, *map(int, re.findall(r'"step": (\d+)', metrics.read_text()) if metrics.exists() else ())]


def _lost(case: Case) -> int | None:
    """Updates that were done and then done again."""
    numbers = re.findall(r"going on after ([\d,]+) of", case.said())
    if case.done is None or (case.fault.alone and not case.fault.then):
        return None  # it was struck at an update of which it left no word
    if not numbers:
        return case.done if case.num > 1 else 0
    return max(0, case.done - int(numbers[-1].replace(",", "")))


def same(healthy: Path, out: Path) -> bool:
    """Whether weights, and metrics but those of time, are the same bits."""
    keys = ("split", "step", "loss", "top1", "lr", "images")
    try:
        weights = [(each / "weights.safetensors").read_bytes() for each in (healthy, out)]
        lines = [list(map(json.loads, (each / "metrics.jsonl").read_text().splitlines())) for each in (healthy, out)]
    except (OSError, ValueError):
        return False
    curves = [[tuple(line.get(key) for key in keys) for line in each] for each in lines]
    return weights[0] == weights[1] and curves[0] == curves[1]


def write_data(folder: Path) -> None:
    """A folder of small pictures of noise in two classes."""
    random = np.random.default_rng(0)
    for split, num in (("train", 24), ("val", 6)):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for number in range(num):
                pixels = random.integers(0, 255, (28, 28, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


def prepare(shared: Path) -> None:
    """The data, a run left alone (`healthy`), and one that was killed after 10 of 12 updates (`half`)."""
    shared.mkdir()
    write_data(shared / "data")
    for name, strike in (("healthy", ""), ("half", "kill -KILL $pid")):
        fault = Fault(name, "", "noticed" if strike else "fine", strike=strike, at=("forward", 10, 0))
        case = Case(fault, shared, shared / f"of-{name}")
        case.out = shared / name
        if wrong := do(case).wrong:
            raise SystemExit(f"{name}: {wrong}\n{case.said()}")
        shutil.rmtree(case.folder)
