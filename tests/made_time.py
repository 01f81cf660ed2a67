"""Time that goes on only when a test says so: what is measured is exact, whatever else the machine does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch


class MadeTime:
    """Stands in for the module `time`: all threads have one clock, and each its own of the processor."""

    def __init__(self) -> None:
        self.now = 0.0
        self._processor = threading.local()
        self._lock = threading.Lock()

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def thread_time(self) -> float:
        return getattr(self._processor, "seconds", 0.0)

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds

    def work(self, seconds: float) -> None:
        """Seconds for which this thread has a core."""
        self.sleep(seconds)
        self._processor.seconds = self.thread_time() + seconds

    def before(self, function: Callable[..., Any], seconds: Callable[[], float]) -> Callable[..., Any]:
        """The function, where a call takes so long."""

        def taking(*args: Any, **options: Any) -> Any:
            self.sleep(seconds())
            return function(*args, **options)

        return taking


@contextmanager
def made_time(*modules: ModuleType) -> Iterator[MadeTime]:
    """Some modules have a clock that goes on only by `sleep` and `work`."""
    clock = MadeTime()
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "time", clock))
        yield clock
