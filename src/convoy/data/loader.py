"""Batches in the order of the run, made in this process or in worker processes: the same ones either way."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from convoy.comm.memory import lack_of_memory
from convoy.data.batch import Batch, BatchMaker
from convoy.data.config import DataConfig
from convoy.data.dataset import DataSet
from convoy.data.order import Order
from convoy.data.sources import Source
from convoy.data.transforms import Geometry
from convoy.errors import ConvoyError, MachineError
from convoy.launch.cores import PINNED, cores_allowed, own_cores

_MAX_AUTOMATIC = 32
_NO_WARNING = "ignore:resource_tracker:UserWarning"


def training_batches(
    data: DataSet,
    config: DataConfig,
    order: Order,
    *,
    first_update: int,
    num_updates: int,
    seed: int,
    positions: range | None = None,
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """The batches of updates `first_update` to `first_update + num_updates - 1` of the run, across its epochs.

    Batch k depends on (seed, k) alone, so starting at k is resuming at k. Close the generator
    (`contextlib.closing`) or drop it to end its worker processes.

    Args:
        data: what `open_data` returned for this configuration.
        config: the recipe's section.
        order: which samples belong to which update.
        first_update: counted from 0 over the whole run.
        num_updates: how many batches to make.
        seed: of the augmentation.
        positions: which samples of every batch; None = all of them.
        pin_memory: put the batches into pinned memory (for a GPU).

    Raises:
        ConvoyError: a picture cannot be read and bad ones are not skipped, or an augmentation lacks its library.
        MachineError: a worker process died, or lacks memory.
    """
    maker = _maker(data, config, data.train, seed)
    part = slice(None) if positions is None else slice(positions.start, positions.stop)
    updates = range(first_update, first_update + num_updates)
    return _run(partial(_training, maker, order, part), updates, num_workers(data, config)[0], pin_memory)


def _training(maker: BatchMaker, order: Order, part: slice, update: int) -> Batch:
    epoch, samples = order.update(update)
    return maker.training(samples[part], epoch)


def evaluation_batches(
    data: DataSet, config: DataConfig, *, batch: int, part: int = 0, num_parts: int = 1, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """Every sample of the test split exactly once, in order, resized and cut in the center.

    The last batch may be smaller. Several parts take turns at the batches. All get equally many, so that the last ones
    may be empty.

    Args:
        data: what `open_data` returned for this configuration.
        config: the recipe's section.
        batch: samples in a batch.
        part: which part, from 0.
        num_parts: how many there are.
        pin_memory: put the batches into pinned memory (for a GPU).

    Raises:
        ConvoyError: a picture cannot be read and bad ones are not skipped.
        MachineError: a worker process died, or lacks memory.
    """
    if batch < 1:
        raise ConvoyError(f"batch {batch} is not a number of samples: set it to at least 1")
    maker = _maker(data, config, data.test, seed=0)
    num_batches = -(-len(data.test) // (batch * num_parts))
    numbers = range(part, num_batches * num_parts, num_parts)
    workers = min(num_workers(data, config)[0], num_batches)
    return _run(partial(_evaluation, maker, batch), numbers, workers, pin_memory)


def _evaluation(maker: BatchMaker, batch: int, number: int) -> Batch:
    return maker.evaluation(np.arange(number * batch, min((number + 1) * batch, len(maker.source))))


def num_workers(data: DataSet, config: DataConfig) -> tuple[int, str]:
    """How many worker processes to use, and why.

    None where a batch is taken from memory at once; else a core of this process's share for each, up to 32: what one
    GPU can use up. Cores are those that the process may run on, or as many as control groups leave time for.
    """
    if config.workers is not None:
        return config.workers, "as the recipe says"
    if _maker(data, config, data.train, seed=0).vectorised:
        return 0, "pictures in memory need no worker processes"
    local = max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
    ranks = 1 if PINNED in os.environ else local  # cores to which a rank is pinned are its own
    cores = int(min(len(own_cores()), cores_allowed() * ranks / local))
    return min(
        max(cores // ranks, 1), _MAX_AUTOMATIC
    ), f"min({cores} cores / {ranks} training process{'es' if ranks > 1 else ''}, {_MAX_AUTOMATIC})"


def _maker(data: DataSet, config: DataConfig, source: Source, seed: int) -> BatchMaker:
    geometry = Geometry(data.image_size, data.resize, config.augment)
    return BatchMaker(source, geometry, data.channels, seed=seed, skip_bad=config.bad_images == "skip")


@dataclass
class _Refusal:
    """A ConvoyError on its way out of a worker process: there, an exception would become a traceback as text."""

    sentence: str


@dataclass
class _Batches(Dataset[Batch | _Refusal]):
    """Batches by their numbers."""

    make: Callable[[int], Batch]

    def __getitem__(self, number: int) -> Batch | _Refusal:
        try:
            return self.make(number)
        except ConvoyError as error:
            return _Refusal(str(error))


def _run(
    make: Callable[[int], Batch], numbers: range, workers: int, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """The batches of some numbers, made by worker processes, or by this one if there are none."""
    loader = DataLoader(
        _Batches(make),
        sampler=numbers,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        multiprocessing_context=_context() if workers else None,
        worker_init_fn=_follow_parent,
        # Its own generator: otherwise each loader would draw a number from torch's global one.
        generator=torch.Generator(),
    )
    iterator = iter(loader)
    try:
        while (item := _next(iterator)) is not None:
            if isinstance(item, _Refusal):
                raise ConvoyError(item.sentence)
            yield item
    finally:
        # At once, not when the last reference goes: a traceback may keep one for long.
        shut_down: Callable[[], None] | None = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def _as_it_is(item: Any) -> Any:
    return item


def _next(iterator: Iterator[Batch | _Refusal]) -> Batch | _Refusal | None:
    """The next item; None at the end."""
    try:
        return next(iterator, None)
    except (RuntimeError, OSError, EOFError, MemoryError) as error:
        # What torch and multiprocessing say, depending on the moment when a worker dies.
        by_torch = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")
        by_python = hasattr(iterator, "_workers") and not isinstance(error, RuntimeError)
        first = str(error).partition("\n")[0]
        if first.startswith("Caught ") or isinstance(error, MemoryError) or not (by_torch or by_python):
            if " in DataLoader worker " in first and lack_of_memory(error) is not None:
                raise MachineError("a process that loads pictures ran out of memory: lower data.workers") from error
            raise
        died = first or type(error).__name__
    raise MachineError(
        f"a process that loads pictures died ({died}): it may have run out of memory or of /dev/shm (in a container, "
        "raise --shm-size), so lower data.workers; a script of your own that starts training needs "
        "`if __name__ == '__main__':`"
    )


def _follow_parent(_: int) -> None:
    """In a worker: end with the training process, however that ended, and not by a signal to its group.

    The process that workers are forked from has left the group, unless another library had started it before.
    Torch's own watch is for the process that forked the worker, and that is the fork server, which in turn stays as
    long as it has workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(OSError):
        os.setpgid(0, 0)

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _context() -> BaseContext:
    """Workers come from a server process that has no threads: forking this one, which has some, could deadlock."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["convoy.data.worker_server"])
    _start_tracker()
    return context


def _start_tracker() -> None:
    """Start Python's process that removes what this one leaves when it is killed: the named semaphores of the queues
    to the workers. Its warning is silenced: it would stand among the messages on the killed process.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{before},{_NO_WARNING}" if before else _NO_WARNING
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before
