"""Convoy's part in torchrun's agent, which loads this with all packages' entry points: its rendezvous, and one sentence
on the cause in place of torchrun's pages when ranks that left word (`convoy.failure.leave_word`) have failed. Other
jobs end as they would without Convoy."""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from convoy.errors import ConvoyError
from convoy.failure import AGENTS, TRACEBACK, Failure, end_of, text_of, word_in

BACKEND = "convoy"
# Beginnings of torch's messages about ranks that failed, by logger.
_PAGES = {
    "torch.distributed.elastic.multiprocessing.api": ("Sending process", "failed (exitcode"),
    "torch.distributed.elastic.multiprocessing.errors.error_handler": ("no error file defined",),
}


def entry_point() -> Callable[[Any], Any]:
    """The function that makes a host's part in a rendezvous, as torchrun asks for it."""
    say_failures()
    return _make


def _make(params: Any) -> Any:
    from convoy.launch.rendezvous import make  # which needs what torch is importing while it asks for entry points

    return make(params)


def say_failures() -> None:
    """Print the word that Convoy's ranks have left in place of torchrun's pages."""
    old_hook = sys.excepthook
    if getattr(old_hook, "of_agent", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        text = None
        if kind.__name__ == "ChildFailedError":
            with contextlib.suppress(Exception):  # an unknown version of torch: its own pages are better than none
                text = _text(error)
        elif isinstance(error, ConvoyError) and not os.environ.get(TRACEBACK):
            text = f"convoy: {error}"
        if text is None:
            old_hook(kind, error, trace)
        else:
            print(text, file=sys.stderr, flush=True)

    hook.of_agent = True  # type: ignore[attr-defined]
    sys.excepthook = hook
    os.environ[AGENTS] = f"{os.environ.get(AGENTS, '')} {os.getpid()}".strip()
    for name in _PAGES:
        logging.getLogger(name).addFilter(_is_wanted)


def _text(error: BaseException) -> str | None:
    """The cause of torch's ChildFailedError; None where the ranks are not Convoy's."""
    failures: dict[int, Any] = error.failures  # type: ignore[attr-defined]
    words = {rank: word_in(failed.error_file) for rank, failed in failures.items()}
    silent = [
        Failure(rank, "killed", f"it {end_of(failed.exitcode)}", "", time.time())
        for rank, failed in failures.items()
        if words[rank] is None and failed.exitcode != -signal.SIGTERM  # with which the agent ends the other ranks
    ]
    return text_of([word for word in words.values() if word is not None], silent)


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether a line of torch's is to be printed: it is not where Convoy's ranks have left word."""
    if not str(record.msg).startswith(_PAGES[record.name]):
        return True
    words = [word for path in _error_files(record) if (word := word_in(path)) is not None]
    if not words:
        return True
    if str(record.msg).startswith("failed") and words[0].attempt < words[0].max_attempts:
        number = f"restart {words[0].attempt + 1} of {words[0].max_attempts}"
        print(f"{text_of(words)}; all ranks start again ({number})", file=sys.stderr, flush=True)
    return False


def _error_files(record: logging.LogRecord) -> Iterator[str]:
    """The files in which the ranks leave word, from the arguments of a log record or the torch object that logs it."""
    if isinstance(record.args, tuple):
        yield from (arg for arg in record.args if isinstance(arg, str) and arg.endswith("error.json"))
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        files = getattr(frame.f_locals.get("self"), "error_files", None)
        if isinstance(files, dict):
            yield from files.values()
            return
