"""The updates of a visit: some to warm up, then those that are timed."""

from collections.abc import Callable, Generator
from contextlib import closing

from convoy.data import Batch
from convoy.experiments.scaling.visits.parts import INPUT
from convoy.experiments.scaling.visits.stopwatch import Stopwatch


def run_updates(
    batches: Generator[Batch, None, None],
    update: Callable[[Batch, int], None],
    stopwatch: Stopwatch,
    warm_up: int,
    barrier: Callable[[], None],
) -> None:
    """Do updates as long as there are batches, and take the time of those after the warm-up."""
    number = 0
    with closing(batches):
        while True:
            if number == warm_up:
                barrier()
                stopwatch.clear()
            stopwatch.lap()
            with stopwatch.section(INPUT):
                batch = next(batches, None)
            if batch is None:
                return
            update(batch, number)
            number += 1
