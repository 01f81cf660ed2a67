"""How a rank says why it failed, and which of several failures is the cause of the others."""

import json
import os
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from convoy.errors import ConvoyError, MachineError

Kind = Literal["mistake", "interrupted", "error", "hung", "killed", "lost"]
_ORDER: dict[Kind, int] = {"mistake": 0, "interrupted": 0, "error": 0, "hung": 0, "killed": 1, "lost": 2}
_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused", "socket closed")


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    Attributes:
        kind: a mistake of the user or Ctrl-C, an unexpected error, a wait for others that took too long, a signal that
            killed it, or the loss of another rank.
        sentence: what to say.
        trace: the traceback, where there is one.
        time: when, in seconds of the machine's clock.
        clear: the sentence says enough; the traceback is for those who ask for it.
    """

    rank: int
    kind: Kind
    sentence: str
    trace: str
    time: float
    clear: bool = False

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
        """The rank and what to say, in a line; a mistake or Ctrl-C is nobody's, and who hangs says it himself."""
        first = self.sentence.partition("\n")[0]
        return first if self.kind in ("mistake", "interrupted", "hung") else f"rank {self.rank} failed: {first}"

    def text(self, verbose: bool = False) -> str:
        """What is printed: the reason, and the traceback where it says more."""
        if self.kind == "mistake":
            return f"{self.trace}convoy: {self.sentence}" if verbose else f"convoy: {self.sentence}"
        if self.kind in ("interrupted", "hung"):
            return self.sentence
        trace = "" if self.clear and not verbose else self.trace
        return f"rank {self.rank} failed: {self.sentence}" + (f"\n{trace.rstrip()}" if trace else "")

    def write(self, folder: Path) -> None:
        """Leave it for whoever started the ranks."""
        place = folder / f"failure-{self.rank}.json"
        temporary = place.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(place)


def failure_of(rank: int, error: BaseException) -> Failure:
    """What an exception says about a rank."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, MachineError):
        return Failure(rank, "error", str(error), trace, time.time(), clear=True)
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
    return Failure(rank, "error", sentence, trace, time.time())


def is_loss(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(sign in text for sign in _LOST) or type(error).__name__ in ("DistBackendError", "DistNetworkError")


def read_failures(folder: Path) -> list[Failure]:
    """What the ranks left."""
    return [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("failure-*.json")]


def silent_ends(folder: Path) -> list[Failure]:
    """The ranks of an attempt that ended without a word, as only a kill does."""
    found = []
    for place in folder.glob("pid-*"):
        rank = int(place.name.partition("-")[2])
        if not any((folder / name).exists() for name in (f"failure-{rank}.json", f"ended-{rank}")):
            found.append(Failure(rank, "killed", "it was killed, or ended without a word", "", place.stat().st_mtime))
    return found


def end_of(status: int | None) -> str:
    """How a process without a word ended, by its exit status, which is below 0 where a signal ended it."""
    if status is None or status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}" + ("; the machine may be out of memory" if name == "SIGKILL" else "")


def cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that came first, those that follow from others last."""
    return min(failures, key=lambda failure: (_ORDER[failure.kind], failure.time), default=None)


def leave_word(failure: Failure) -> None:
    """Write the failure where torchrun looks for it, if that started this rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": failure.trace, "timestamp": str(int(failure.time))}
    record = {"message": {"message": failure.text(), "extraInfo": extra}}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record), encoding="utf-8")
