"""What a process has, and the tensors that an update makes."""

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from convoy.ops.context import Rerun

MIB = 2**20


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    line = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert line is not None, f"no {key} in /proc/self/status"
    return int(line[1]) * 1024


def forget_peak() -> None:
    """Let VmHWM begin again at what the process has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Living(TorchDispatchMode):
    """Counts bytes of the tensors that forward passes make, also where they run again; not what `.grad` is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self._reruns = 0
        self._storages: set[int] = set()

    def __enter__(self) -> "Living":
        original = Rerun.again

        @contextmanager
        def again(rerun: Rerun) -> Iterator[None]:
            self._reruns += 1
            try:
                with original(rerun):
                    yield
            finally:
                self._reruns -= 1

        self._patch = mock.patch.object(Rerun, "again", again)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        backward = torch._C._current_graph_task_id() != -1
        if not backward or self._reruns:
            inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for x in tree_leaves(made):
                if isinstance(x, Tensor) and x.untyped_storage()._cdata not in inputs | self._storages:
                    self._note(x.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._storages.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._storages.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)
