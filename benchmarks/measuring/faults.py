"""What a fault is, how one is done to a command of Convoy, and what has become of it.

Commands are forked from this process, which has loaded torch: seconds less for each. What they start themselves are new
processes as ever. Every one of them has the case's folder in its environment, by which it is found and ended.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image

from convoy.cli import main as convoy
from convoy.training import run, set_up, step, summary  # noqa: F401  loaded once, for all that are forked
from measuring import gate

NET = "measuring.gate:Net"
LINE = (
    f"train {NET} --data {{data}} --out {{out}} --batch 16 --microbatches 2 --lr 0.05 --reproducible --epochs 12ba "
    "--set data.image_size=28 --set checkpoint.every=3ba --set checkpoint.keep=9 --set log_every=1ba --set threads=1"
)
_FOLDER = "CONVOY_CHAOS"
_LONGEST_S, _ENDING_S = 150.0, 3.0
Do = Callable[["Case"], object]


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
        within: seconds from the blow, or from the start where there is none, until it is said.
        strike: the blow, while the run is held at `at`: the place, the updates done, the rank.
        before, after: what is prepared, and what is looked at; `Case.wrong` takes what is not as it should be.
        line: the command; `{name}` is a path of the case.
        options: more of it.
        resume: options with which a run that has ended goes on, to the weights of that left alone; None: it does not.
        prepare_resume: what is mended before.
        alone: options of the run to compare with, where that is not the usual one.
        ranks: so many hosts with a device each, in folders `host-0`, …
        output: where standard output goes: `file`, `closed`, `pipe`, or a path.
        around: a program that starts the command.
        needs: `root`, `mounts` or a program; where it is missing the row is skipped.
        fast: it is one of the few that the tests have time for.
    """

    name: str
    how: str
    out: str
    says: str = ""
    within: float = 20.0
    strike: Do | None = None
    at: tuple[str, int, int] = ("forward", 8, 0)
    before: Do | None = None
    after: Do | None = None
    line: str = LINE
    options: str = ""
    resume: str | None = None
    prepare_resume: Do | None = None
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
        return f"{noticed}, then identical" if self.resume is not None else noticed


@dataclass
class Case:
    """One fault, as it is done.

    Attributes:
        shared: the folder with the data and the runs left alone, which all cases read.
        folder: the case's own.
        data, out: of its run.
        struck: when, by the monotonic clock.
        done: updates that were done then.
        pids: the processes that were forked: one, or one for each host.
        megabytes: of memory that the largest process of the command itself has had.
        others: further processes, which end with the case.
        wrong: what did not come out.
    """

    fault: Fault
    shared: Path
    folder: Path
    slack: float = 1.0
    kills: int = 3
    struck: float = 0.0
    done: int | None = None
    pids: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num: int = 0
    reader: int = -1
    megabytes: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.data, self.out = self.shared / "data", self.folder / "run"

    def start(self, line: str, held: tuple[str, int, int] | None = None) -> None:
        """Fork the command, once for each host."""
        self.num, self.pids = self.num + 1, []
        paths = {"data": self.data, "out": self.out, "folder": self.folder, "shared": self.shared}
        paths["updates"] = str(100 + 80 * self.kills)  # type: ignore[assignment]
        arguments = [part.format(**paths) for part in shlex.split(line)]
        for rank in range(self.fault.ranks):
            own = {
                _FOLDER: str(self.folder),
                "CONVOY_CACHE": str(self.shared / "cache"),
                "TMPDIR": str(self.folder),
                "OMP_NUM_THREADS": "1",
            }
            own |= gate.held(self.folder, *held) if held else {}
            if self.fault.ranks > 1:
                own |= {"RANK": str(rank), "WORLD_SIZE": str(self.fault.ranks), "LOCAL_RANK": "0"}
                own |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                self._become(arguments, own, rank, writer)
            os.close(writer)
            self.reader = reader if self.fault.output == "pipe" else -1
            if self.reader < 0:
                os.close(reader)
            self.pids.append(pid)

    def _become(self, arguments: Sequence[str], own: dict[str, str], rank: int, pipe: int) -> None:
        """In the process that was forked: the command, with streams and a place of its own."""
        status = 70
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP):  # the benchmark may run under nohup
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            kinds = {"file": self.folder / f"out-{self.num}-{rank}", "closed": Path(os.devnull), "pipe": None}
            into = kinds.get(self.fault.output, Path(self.fault.output)) if self.num == 1 else kinds["file"]
            out = pipe if into is None else os.open(into, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            error = os.open(self.folder / f"error-{self.num}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(error, 2)
            os.closerange(3, 256)
            sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
            if self.fault.output == "closed" and self.num == 1:
                os.close(1)
                sys.stdout = None
            os.chdir(self.folder / f"host-{rank}" if self.fault.ranks > 1 else Path(gate.__file__).parents[1])
            os.environ.update(own)
            tempfile.tempdir = None  # asked for before
            sys.modules["__main__"] = ModuleType("__main__")  # which new processes would load otherwise
            if self.fault.around and self.num == 1:
                command = [*shlex.split(self.fault.around), sys.executable, "-m", "convoy", *arguments]
                os.execvpe(command[0], command, os.environ)
            sys.argv = sys.orig_argv = ["convoy", *arguments]
            status = convoy(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(status)

    def processes(self) -> dict[int, dict[str, str]]:
        """The environment of every process of this case that runs, besides those that were forked."""
        mark, found = f"{_FOLDER}={self.folder}\0".encode(), {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                text = (entry / "environ").read_bytes()
                if mark in text and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    pairs = (item.decode(errors="replace").partition("=") for item in text.split(b"\0"))
                    found[int(entry.name)] = {key: value for key, _, value in pairs}
        return found

    def rank(self, number: int) -> int:
        """The process of a rank."""
        processes = self.processes()
        ranks = [pid for pid, variables in processes.items() if variables.get("RANK") == str(number)]
        ranks = [pid for pid in ranks if _parent(pid) in self.pids]
        return ranks[0] if ranks else self.pids[0]

    def worker(self, rank: int = 0) -> int:
        """A process that makes pictures for a rank: a child of the server that the rank has started."""
        servers = {pid for pid in self.processes() if _parent(pid) == self.rank(rank)}
        return next(pid for pid in self.processes() if _parent(pid) in servers)

    def send(self, number: int, rank: int | None = None) -> None:
        """A signal for a rank, or for the process that was forked."""
        os.kill(self.pids[0] if rank is None else self.rank(rank), number)

    def said(self, num: int | None = None) -> str:
        """All that was said so far, or by one command."""
        names = sorted(self.folder.glob(f"*-{num or '*'}-*"))
        return "\n".join(name.read_text(errors="replace") for name in names if name.name[:3] in ("out", "err"))

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
        os.close(self.reader)
        self.reader = -1

    def end(self) -> list[int]:
        """Kill what still runs; the numbers of these processes."""
        found, until = [], time.monotonic() + _ENDING_S
        for pid in self.others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        while time.monotonic() < until and self.processes():
            time.sleep(0.05)
        while running := [*self.processes(), *(pid for pid in self.pids if _state(pid) not in "Z")]:
            for pid in running:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            found += running
            for pid in self.pids:
                with suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)
        return found


def _stat(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["", "0"]


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


@dataclass
class Result:
    """What became of a fault.

    Attributes:
        lost: updates that were done and had to be done again; None where there are none to lose.
        seconds: until it was noticed.
        sentence: that said so.
        identical: the weights and metrics are those of the run left alone; None where that is not promised.
        wrong: what did not come out as it has to.
        skipped: why it was not done.
    """

    name: str
    how: str
    promise: str
    lost: int | None = None
    seconds: float | None = None
    sentence: str = ""
    identical: bool | None = None
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""


def do(case: Case) -> Result:
    """Do a fault, and look at what has become of it."""
    fault = case.fault
    result = Result(fault.name, fault.how, fault.promise, wrong=case.wrong)
    try:
        if fault.before:
            fault.before(case)
        case.struck = time.monotonic()
        case.start(f"{fault.line} {fault.options}", fault.at if fault.strike else None)
        if fault.strike and _is_held(case):
            case.struck = time.monotonic()
            fault.strike(case)
            (case.folder / "go").touch()
        status, at = case.finish(fault.says)
        said = case.said(1)
        result.seconds, result.sentence = round(at - case.struck, 1), _sentence(said, fault.says)
        if status == -signal.SIGKILL:
            result.sentence = ""
        _judge(case, status, said, result)
        if fault.resume is not None:
            case.done = max(case.done, _logged(case)) if case.done is not None else None
            if fault.prepare_resume:
                fault.prepare_resume(case)
            case.start(f"train {case.out} --resume {fault.resume}")
            status, _ = case.finish()
            if status != 0:
                case.wrong.append(f"--resume ended with status {status}: {_sentence(case.said(case.num), '')}")
        if fault.out == "identical" or fault.resume is not None:
            result.lost = _lost(case)
            result.identical = same(_left_alone(case), case.out)
            case.wrong += [] if result.identical else ["the weights or metrics are others"]
        if fault.after:
            fault.after(case)
        result.sentence = result.sentence.replace(f"{case.folder}/", "").replace(socket.gethostname(), "HOST")
    except Exception as error:
        case.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        if left := case.end():
            case.wrong.append(f"{len(left)} processes were left")
        with suppress(OSError):
            os.close(case.reader)
    return result


def _left_alone(case: Case) -> Path:
    """The run to compare with, made when it is asked for first."""
    if not case.fault.alone:
        return case.shared / "healthy"
    name = f"alone-{hashlib.sha256(case.fault.alone.encode()).hexdigest()[:9]}"
    if not (case.shared / name).exists():
        fault = Fault(name, "", "fine", options=case.fault.alone)
        other = Case(fault, case.shared, case.folder / name, kills=case.kills)
        case.wrong += do(other).wrong
        other.out.rename(case.shared / name)
    return case.shared / name


def _is_held(case: Case) -> bool:
    note = case.folder / "at"
    is_held = case.wait(lambda: note.exists() or _state(case.pids[0]) in "Z", "the place of the blow")
    if is_held and note.exists():
        case.done = json.loads(note.read_text())[1]
        return True
    case.wrong.append("the run ended before the blow")
    return False


def _judge(case: Case, status: int, said: str, result: Result) -> None:
    """Whether the status and the sentence are those promised."""
    fault = case.fault
    statuses = {"identical": (0,), "fine": (0,), "refused": (2,), "noticed": (1, 2, *(-n for n in range(1, 20)))}
    if status not in statuses[fault.out]:
        case.wrong.append(f"status {status}: {_sentence(said, '')}")
    if fault.says and not re.search(fault.says, said):
        case.wrong.append(f"nothing like {fault.says!r} was said")
    if fault.out in ("refused", "noticed") and (result.seconds or 0) > fault.within * case.slack:
        case.wrong.append(f"it took {result.seconds} s")
    if "Traceback" in said:
        case.wrong.append("a traceback was printed")


def _sentence(said: str, says: str) -> str:
    """The line that says it; else the last that is Convoy's own, else the last."""
    lines = [line for line in said.splitlines() if line.strip()]
    fit = [line for line in lines if says and re.search(says, line)] or [
        line for line in lines if line.startswith(("convoy: ", "rank "))
    ]
    return (fit or lines or [""])[-1][:400]


def _logged(case: Case) -> int:
    """The last update in the metrics."""
    steps = re.findall(r'"step": (\d+)', (case.out / "metrics.jsonl").read_text()) if case.out.exists() else []
    return max(map(int, steps), default=0)


def _lost(case: Case) -> int | None:
    """Updates that were done and then done again."""
    numbers = re.findall(r"going on after ([\d,]+) of", case.said())
    if case.done is None or (case.fault.alone and case.fault.resume is None):
        return None  # it was struck at an update of which it left no word
    if not numbers:
        return case.done if case.num > 1 else 0
    return max(0, case.done - int(numbers[-1].replace(",", "")))


def same(healthy: Path, out: Path) -> bool:
    """Whether weights, and metrics but those of time, are the same bits."""
    keys = ("split", "step", "loss", "top1", "lr", "images")
    try:
        weights = [hashlib.sha256((each / "weights.safetensors").read_bytes()).digest() for each in (healthy, out)]
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
    for name, strike in (("healthy", None), ("half", lambda case: case.send(signal.SIGKILL))):
        fault = Fault(name, "", "noticed" if strike else "fine", strike=strike, at=("forward", 10, 0))
        case = Case(fault, shared, shared / f"of-{name}")
        case.out = shared / name
        if wrong := do(case).wrong:
            raise SystemExit(f"{name}: {wrong}\n{case.said()}")
        shutil.rmtree(case.folder)
