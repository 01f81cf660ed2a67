"""Threads that make batches ahead where that is copying alone, beside a GPU that computes."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from convoy.data.batch import Batch, BatchMaker, Filled
from convoy.data.buffers import Buffers
from convoy.data.workers import Request
from convoy.resources import own_share

_AHEAD = 3  # batches that are made before they are asked for
_MOST_THREADS = 4


def batches_by_threads(
    maker: BatchMaker, requests: Iterator[Request], largest: int, *, pixels: Tensor | None, pin_memory: bool
) -> Generator[Batch, None, None]:
    """Batches in their order, each made by one thread; closing the generator ends the threads. With `pixels` on a
    device only the places of crops are made, and the device cuts them out. Raises ConvoyError as `BatchMaker.fill`
    does."""
    shape, dtype = (maker.shape, "uint8") if pixels is None else ((4,), "int64")
    write = maker.fill if pixels is None else maker.fill_places
    buffers = Buffers(_AHEAD, largest, shape, dtype, pin_memory=pin_memory)

    def make(request: Request, slot: int) -> Filled:
        return write(buffers[slot][0][: len(request.samples)], request.samples, request.epoch)

    def finished(request: Request, slot: int, filled: Filled) -> Batch:
        rows, labels = buffers.hand_out(slot, copied=not buffers.free)
        batch = maker.batch(rows, filled, request.epoch, labels, pixels)
        return batch.pin_memory() if pin_memory and not buffers.pinned else batch

    pool = ThreadPoolExecutor(max(1, min(_MOST_THREADS, int(own_share()) - 1)), "convoy-pictures")
    pending = deque[tuple[Request, int, Future[Filled]]]()
    try:
        while True:
            while len(pending) < _AHEAD and buffers.free and (request := next(requests, None)) is not None:
                slot = buffers.free.popleft()
                pending.append((request, slot, pool.submit(make, request, slot)))
            if not pending:
                return
            request, slot, future = pending.popleft()
            yield finished(request, slot, future.result())
    finally:
        pool.shutdown(cancel_futures=True)
