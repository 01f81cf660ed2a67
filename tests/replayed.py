"""Stands in for a CUDA graph where there is no GPU: operations noted once, and done again on the same memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from convoy.comm import collectives
from convoy.engine import recorded
from convoy.script import recorded as script
from convoy.training import build, session


class ReplayedGraph(TorchDispatchMode):
    """As `recorded.CudaGraph`: what the host computes while it records stays as it was then."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        with self:
            return work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            results = func(*args, **kwargs)
        given = {_storage(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        made = [(i, x) for i, x in enumerate(tree_flatten(results)[0]) if isinstance(x, Tensor)]
        self._calls.append((func, args, kwargs, [(i, x.detach()) for i, x in made if _storage(x) not in given]))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._replay()

    def _replay(self) -> None:
        pending: list[Any] = []
        for func, args, kwargs, made in self._calls:
            if func.namespace != "c10d":
                while pending:
                    pending.pop(0).wait()
            results = tree_flatten(func(*args, **kwargs))[0]
            if func.namespace == "c10d":  # sends and receives that belong together follow each other
                pending += [Work.unbox(x) for x in results if isinstance(x, torch.ScriptObject)]
            for i, x in made:
                x.copy_(results[i])
        while pending:
            pending.pop(0).wait()


class BrokenGraph(ReplayedGraph):
    """Recording breaks off in the middle of a backward pass, as where memory lacks for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution_backward" in str(func):
            raise RuntimeError("it breaks off")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@contextmanager
def recording(graph: type[ReplayedGraph] = ReplayedGraph) -> Iterator[None]:
    """Let CPUs record updates, and ranks exchange by operations that can be noted."""
    with ExitStack() as stack:
        for module in (recorded, build, session, script):
            stack.enter_context(mock.patch.object(module, "graph_on", lambda device: graph))
        stack.enter_context(mock.patch.object(collectives, "_channel", lambda x, group: None))
        yield
