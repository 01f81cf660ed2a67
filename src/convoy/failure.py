"""Why a rank failed, how it reports that, and which of several failures is the cause of the others.

Under torchrun the agent, which loads Convoy for its rendezvous, prints the cause (`launch/torchrun.py`): a rank would
do so beside all others, above forty lines of torchrun's that name none.
"""

import contextlib
import json
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from convoy.errors import ConvoyError, GoneError, MachineError

Kind = Literal["mistake", "interrupted", "error", "hung", "killed", "lost"]
_ORDER: dict[Kind, int] = {"mistake": 0, "interrupted": 0, "error": 0, "hung": 0, "killed": 1, "lost": 2}
INSTALLED = tuple(
    {
        f"{Path(__file__).parent}{os.sep}",
        *(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused", "socket closed")


@dataclass(frozen=True)
class Failure:
    """Why a rank ended."""

    rank: int
    kind: Kind
    sentence: str
    trace: str  # the traceback; empty where there is none
    time: float  # in seconds of the machine's clock
    clear: bool = False  # the sentence says enough, and the traceback is for those who ask for it
    verbose: bool = False  # somebody asks for it
    attempt: int = 0  # how often the ranks had been started again
    max_attempts: int = 0  # how often that may be

    @property
    def status(self) -> int:
        """The exit status of the whole run."""
        return 2 if self.kind == "mistake" else 1

    @property
    def final(self) -> bool:
        """Whether starting the ranks again would not mend it."""
        return self.kind in ("mistake", "interrupted")

    @property
    def reason(self) -> str:
        """The failure in a line, with the rank unless it is a mistake, Ctrl-C, or a hang, whose sentence names it."""
        first = self.sentence.partition("\n")[0]
        return first if self.kind in ("mistake", "interrupted", "hung") else f"rank {self.rank} failed: {first}"

    def text(self, verbose: bool = False) -> str:
        """The text to print: the reason, and the traceback where it says more."""
        if self.kind == "mistake":
            return f"{self.trace}convoy: {self.sentence}" if verbose else f"convoy: {self.sentence}"
        if self.kind in ("interrupted", "hung"):
            return self.sentence
        trace = "" if self.clear and not verbose else self.trace
        return f"rank {self.rank} failed: {self.sentence}" + (f"\n{trace.rstrip()}" if trace else "")


def failure_of(rank: int, error: BaseException) -> Failure:
    """The failure of a rank by an exception."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, GoneError):
        return Failure(rank, "interrupted", str(error), trace, time.time())
    if isinstance(error, MachineError):
        kind: Kind = "lost" if error.__cause__ is not None and is_loss(error.__cause__) else "error"
        return Failure(rank, kind, str(error), trace, time.time(), clear=True)
    if isinstance(error, ConvoyError):
        return Failure(rank, "mistake", str(error), trace, time.time())
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, "interrupted", "interrupted", "", time.time())
    first = str(error).partition("\n")[0]
    sentence = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if first and not isinstance(error, Exception):  # asked to end, by a signal
        sentence = first
    if is_loss(error):
        return Failure(rank, "lost", f"it lost the connection to another rank ({sentence})", trace, time.time())
    place = place_of(error) if isinstance(error, Exception) else None
    return Failure(rank, "error", f"{sentence} ({place})" if place is not None else sentence, trace, time.time())


def place_of(error: BaseException) -> str | None:
    """Where in the user's own code an exception was raised, or came through last: `mine.py, line 12, in forward`.

    None where it came through none: the user's own is what lies neither in Convoy nor where packages are installed.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((*INSTALLED, "<")):
            name = frame.f_code.co_name
            place = f"{Path(file).name}, line {line}" + (f", in {name}" if name != "<module>" else "")
    return place


def is_loss(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(sign in text for sign in _LOST) or type(error).__name__ in ("DistBackendError", "DistNetworkError")


def end_of(status: int | None) -> str:
    """How a process without a word ended, by its exit status, which is below 0 where a signal ended it."""
    if status is None or status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}" + ("; the machine may be out of memory" if name == "SIGKILL" else "")


def cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that came first, those that follow from others last."""
    return min(failures, key=lambda failure: (_ORDER[failure.kind], failure.time), default=None)


# Variable with the numbers of the processes that say why the ranks that they started failed: torchrun's agents, and
# `convoy.launch.start`.
AGENTS = "CONVOY_AGENTS"
TRACEBACK = "CONVOY_TRACEBACK"  # variable that asks for tracebacks beside sentences
# Seconds that a failed rank of a script stays, as torchrun's agent ends all ranks with the first: so that others can
# say the same, or, where it lost the connection to one, what became of that.
_STAY_S, _STAY_LOST_S = 0.5, 2.0
_MARK = "convoy"


def write_error_file(failure: Failure, verbose: bool = False) -> bool:
    """Write the failure where who started this rank looks for it; whether that says it: torchrun's agent, or Convoy's.

    The file is what torch's own `record` writes, with Convoy's entry beside: an agent that knows nothing of Convoy
    prints the sentence within its own page.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    attempt, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    failure = replace(failure, verbose=verbose, attempt=attempt, max_attempts=most)
    shown = failure.trace if failure.trace and not failure.clear else failure.text(verbose)
    extra = {"py_callstack": shown, "timestamp": str(int(failure.time))}
    record = {"message": {"message": failure.text(), "extraInfo": extra}, _MARK: asdict(failure)}
    try:
        Path(path).write_text(json.dumps(record), encoding="utf-8")
    except OSError:  # no room for it
        return False
    return has_agent()


def has_agent() -> bool:
    """Whether the process that started this one says why its ranks failed."""
    return "TORCHELASTIC_ERROR_FILE" in os.environ and str(os.getppid()) in os.environ.get(AGENTS, "").split()


def read_error_file(path: str | Path) -> Failure | None:
    """The failure that a rank has left in a file; None where there is none of Convoy's."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return Failure(**json.loads(Path(path).read_text(encoding="utf-8"))[_MARK])
    return None


def text_of(words: Iterable[Failure], silent: Iterable[Failure] = ()) -> str | None:
    """The text that torchrun's agent prints at the end: the cause, with its rank where others do not say the same; None
    where no rank left a word. Those that are `silent` ended without one."""
    left = {word.rank: word for word in words}.values()
    failure = cause([*left, *silent])
    if not left or failure is None:
        return None
    if failure.kind == "mistake" and len(left) > 1 and [word.sentence for word in left].count(failure.sentence) == 1:
        failure = replace(failure, sentence=f"rank {failure.rank}: {failure.sentence}")
    return failure.text(failure.verbose)


_saying: list[BaseException] = []


def say_uncaught(first: Callable[[], bool]) -> None:
    """Have what a rank's script does not catch said once, last and shortly, instead of by every rank.

    A `ConvoyError` is one sentence, with the line of the script; other exceptions keep the traceback that Python
    prints. Where torchrun's agent says it (`convoy.launch.torchrun`) this process writes its error file, otherwise the
    `first` of the ranks prints it. With CONVOY_TRACEBACK=1 the traceback of a `ConvoyError` is shown too.

    Without torchrun's variables, on one device, nothing is changed.
    """
    before = sys.excepthook
    rank = os.environ.get("RANK", "")
    if getattr(before, "of_convoy", False) or not rank.isdecimal():
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        clear = isinstance(error, ConvoyError) or (has_agent() and is_loss(error))
        inner = bool(_saying)  # another hook of these, around that of torch, has called this one
        _saying.append(error)
        try:
            if inner or not clear:
                before(kind, error, trace)
            if not inner and isinstance(error, Exception) and (clear or has_agent()):
                _say(int(rank), error, clear, first)
        finally:
            _saying.pop()

    hook.of_convoy = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _say(rank: int, error: Exception, clear: bool, first: Callable[[], bool]) -> None:
    """Write the error file of an exception, whose traceback is printed already if it is not clear by itself."""
    failure = failure_of(rank, error)
    if isinstance(error, ConvoyError) and (place := place_of(error)) is not None:
        failure = replace(failure, sentence=f"{failure.sentence} ({place})")
    failure = replace(failure, clear=clear, trace=failure.trace if clear else "")
    verbose = os.environ.get(TRACEBACK, "0") not in ("", "0")
    if write_error_file(failure, verbose):
        time.sleep(_STAY_LOST_S if failure.kind == "lost" else _STAY_S)
    elif clear and first():
        print(failure.text(verbose), file=sys.stderr, flush=True)
