"""Batches in the order of the run, made in this process or in worker processes: the same ones either way."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice

import numpy as np

from convoy.comm.position import current
from convoy.data.batch import Batch, BatchMaker
from convoy.data.config import DataConfig
from convoy.data.dataset import DataSet
from convoy.data.order import Order
from convoy.data.sources import Source
from convoy.data.transforms import Geometry
from convoy.data.workers import Request, Workers
from convoy.errors import ConvoyError
from convoy.resources import own_share

_MAX_AUTOMATIC = 32
_AHEAD = 3  # batches that a thread makes before they are asked for


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
    """The batches of some updates of the run, across its epochs: batch k depends on (seed, k) alone. `positions` are
    those of this rank in every batch, None all. Close the generator to end the worker processes. Raises ConvoyError for
    a picture that cannot be read, MachineError where a worker died."""
    maker = batch_maker(data, config, data.train, seed)
    part = slice(None) if positions is None else slice(positions.start, positions.stop)

    updates = map(order.update, range(first_update, first_update + num_updates))
    requests = (Request(samples[part], epoch) for epoch, samples in updates)
    largest = len(range(order.batch)[part])
    workers = min(num_workers(data, config)[0], num_updates)
    return _run(maker, requests, largest, workers, pin_memory)


def evaluation_batches(
    data: DataSet, config: DataConfig, *, batch: int, part: int = 0, num_parts: int = 1, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """Every sample of the test split exactly once, in order, resized and cut in the center. `num_parts` ranks take
    turns at the batches; all get equally many, so that the last ones may be smaller or empty."""
    if batch < 1:
        raise ConvoyError(f"batch {batch} is not a number of samples: set it to at least 1")
    maker = batch_maker(data, config, data.test, seed=0)
    num_batches = -(-len(data.test) // (batch * num_parts))
    starts = range(part * batch, num_batches * num_parts * batch, num_parts * batch)
    requests = (Request(np.arange(start, max(start, min(start + batch, len(data.test))))) for start in starts)
    workers = min(num_workers(data, config)[0], num_batches)
    largest = min(batch, len(data.test))
    return _run(maker, requests, largest, workers, pin_memory)


def num_workers(data: DataSet, config: DataConfig) -> tuple[int, str]:
    """The number of worker processes, and why: 0 where a batch is taken from memory at once; else one per core of this
    process's share, up to 32, which is what one GPU can use up."""
    if config.workers is not None:
        return config.workers, "as the recipe says"
    if batch_maker(data, config, data.train, seed=0).vectorised:
        return 0, "pictures in memory need no worker processes"
    share = own_share()
    return min(max(int(share), 1), _MAX_AUTOMATIC), f"min({share:.3g} cores of this process, {_MAX_AUTOMATIC})"


def batch_maker(data: DataSet, config: DataConfig, source: Source, seed: int) -> BatchMaker:
    """The maker of the batches of one of the splits."""
    geometry = Geometry(data.image_size, data.resize, config.augment)
    skip_bad, decoder = config.bad_images == "skip", config.decoder or "pillow"
    return BatchMaker(source, geometry, data.channels, seed=seed, skip_bad=skip_bad, decoder=decoder)


def _run(
    maker: BatchMaker, requests: Iterator[Request], largest: int, workers: int, pin_memory: bool
) -> Generator[Batch, None, None]:
    """The batches of some requests, made by worker processes, by a thread beside a GPU, or by this process."""
    if workers and largest:
        with closing(Workers(maker, requests, largest, workers, pin_memory).batches()) as batches:
            yield from batches
    elif pin_memory:
        with closing(_by_thread(maker, requests)) as batches:
            yield from batches
    else:
        for request in requests:
            with current.waiting_for_samples(partial(_reads, maker.source, request)):
                batch = maker.make(request.samples, request.epoch)
            yield batch


def _by_thread(maker: BatchMaker, requests: Iterator[Request]) -> Generator[Batch, None, None]:
    """Batches in their order, made ahead by a thread; closing the generator ends it. To gather and pin 256 pictures of
    224 px takes 25 to 38 ms, in which numpy leaves the interpreter to others: a GPU would wait for it each time."""
    pool = ThreadPoolExecutor(1, "convoy-pictures")

    def make(request: Request) -> Batch:
        return maker.make(request.samples, request.epoch).pin_memory()

    pending = deque[tuple[Request, Future[Batch]]]()
    try:
        while True:
            coming = islice(requests, _AHEAD - len(pending))
            pending.extend((request, pool.submit(make, request)) for request in coming)
            if not pending:
                return
            request, batch = pending.popleft()
            with current.waiting_for_samples(partial(_reads, maker.source, request)):
                made = batch.result()
            yield made
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a file system that does not answer holds up nobody


def _reads(source: Source, request: Request) -> str:
    return f"this process reads {source.names(request.samples)}"
