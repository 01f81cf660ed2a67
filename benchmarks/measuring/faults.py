"""What a fault is (`faults.yaml`), and the processes to which one is done.

Commands are forked from this process, which has loaded torch: seconds less for each. What they start themselves are new
processes as ever. Every one of them has the case's folder in its environment, by which it is found and ended.
"""

import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any, NoReturn

import yaml

from convoy.bench.namespaces import EmulatedHost
from convoy.cli import main as convoy
from convoy.training import set_up, step, trainer  # noqa: F401  loaded once, for all that are forked
from measuring import gate

LINE = (
    "train measuring.gate:Net --data $data --out $out --batch 16 --microbatches 2 --lr 0.05 --reproducible --epochs "
    "12ba --set data.image_size=28 --set checkpoint.every=3ba --set checkpoint.keep=9 --set log_every=1ba "
    "--set threads=1 "
)
RESUME = "train $out --resume"
Place = tuple[str, int, int]
GROUPS, _FOLDER = Path("/sys/fs/cgroup"), "CONVOY_CHAOS"
_LONGEST_S, _ENDING_S = 150.0, 3.0


@dataclass(frozen=True)
class Fault:
    """A row: what is done, and what has to come out.

    What is done is a function of `blows.py`, or a line of a shell in the case's folder (`Case.variables`); a status
    other than 0, or what is put into `Case.wrong`, is wrong. `out` is `identical`: the command ends with status 0, and
    the weights and metrics are those of the run left alone; `refused`: status 2 and one sentence; `noticed`: status 1,
    or 2 for the user to mend, with a sentence; `fine`: status 0, whatever its numbers.
    """

    name: str  # short, by which it is chosen
    how: str  # it is done, in words
    out: str
    says: str = ""  # a pattern of what is said
    strike: str = ""  # the blow, while the run is held at `at`
    options: str = ""  # more of the command
    # a command that ends with status 0 afterwards; where it resumes the run, it comes to the weights of that left alone
    then: str = ""
    at: Place = ("forward", 8, 0)  # the place, the updates done, the rank
    before: str = ""  # what is prepared
    mend: str = ""  # before `then`
    after: str = ""  # what is looked at in the end
    line: str = LINE  # the command, with the same variables
    within: float = 20.0  # seconds from the blow, or from the start where there is none, until it is said
    alone: str = ""  # options of the run to compare with, where that is not the usual one
    ranks: int = 1  # so many hosts with a device each, in folders `host-0`, … where there are such
    output: str = "file"  # where standard output goes: `file`, `closed`, `pipe`, or a path
    around: str = ""  # a program that starts the command
    needs: str = ""  # `root`, `mounts`, `groups` or a program; where it is missing the row is skipped
    fast: bool = False  # it is one of the few that the tests have time for

    @property
    def promise(self) -> str:
        """What has to come out, in words."""
        noticed = f"{self.out} within {self.within:g} s" if self.out in ("refused", "noticed") else self.out
        return noticed + (", then identical" if RESUME in self.then else ", then fine" if self.then else "")

    @staticmethod
    def of(words: dict[str, Any], meanings: dict[str, str]) -> "Fault":
        """From a row of the table."""

        def meant(text: Any) -> Any:
            if not isinstance(text, str):
                return text
            return Template(Template(text).safe_substitute(meanings)).safe_substitute(python=sys.executable)

        values = {key: meant(value) for key, value in words.items()}
        values["at"] = tuple(values.get("at", Fault.at))
        return Fault(**values)


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FAULTS = tuple(Fault.of(row, _TABLE["words"]) for row in _TABLE["faults"])


@dataclass
class Case:
    """One fault, as it is done, and what has become of it."""

    fault: Fault
    shared: Path  # the folder with the data and the runs left alone, which all cases read
    folder: Path  # the case's own
    slack: float = 1.0
    kills: int = 3
    done: int | None = None  # updates that were done when it was struck
    pids: list[int] = field(default_factory=list)  # that were forked: one, or one for each host
    hosts: list[EmulatedHost] = field(default_factory=list)  # network namespaces, if the command runs in such
    groups: list[Path] = field(default_factory=list)  # control groups, likewise
    stack: ExitStack = field(default_factory=ExitStack)  # what ends with the case
    num: int = 0  # commands so far
    reader: int = -1  # of the pipe into which the command writes
    megabytes: int = 0  # of memory that the largest process of the command itself has had
    lost: int | None = None  # updates that were done and had to be done again; None where there are none to lose
    seconds: float | None = None  # until it was noticed
    sentence: str = ""  # what said so
    identical: bool | None = None  # the weights and metrics are those of the run left alone; None where not promised
    wrong: list[str] = field(default_factory=list)  # what did not come out as it has to

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
        group = GROUPS / kind / f"convoy-chaos-{os.getpid()}"
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
                if mark in text and state_of(int(entry.name))[0] != "Z":
                    pairs = (item.decode(errors="replace").partition("=") for item in text.split(b"\0"))
                    found[int(entry.name)] = {key: value for key, _, value in pairs}
        return found

    def rank(self, number: int) -> int:
        """The process of a rank."""
        ranks = [pid for pid, variables in self.processes().items() if variables.get("RANK") == str(number)]
        return next((pid for pid in ranks if int(state_of(pid)[1]) in self.pids), self.pids[0])

    def worker(self, rank: int = 0) -> int:
        """A process that makes pictures for a rank, once it has begun: a child of the server that the rank starts."""

        def begun() -> list[int]:
            parents = {pid: int(state_of(pid)[1]) for pid in self.processes()}
            return [pid for pid, parent in parents.items() if parents.get(parent) == self.rank(rank)]

        self.wait(lambda: bool(begun()), "a process that makes pictures")
        return begun()[0]

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
        while running := {*self.processes(), *(pid for pid in self.pids if state_of(pid)[0] not in "Z")}:
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


def state_of(pid: int) -> list[str]:
    """The state of a process and its parent."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["", "0"]
