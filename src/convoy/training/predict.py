"""Says what is on pictures: batches of files in turns on one rank or several, answers in the order of the files."""

import copy
import itertools
import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from convoy.comm.ranks import Ranks
from convoy.data import BadImage, Normalize
from convoy.training.classification import heads
from convoy.training.environment import num_cores
from convoy.training.precision import autocast_of, set_numerics
from convoy.training.restore import TrainedRun

_MAX_THREADS = 16
_SOON_S = 0.05  # names that come within this time are read ahead; before a longer wait, the answers so far are given


@dataclass(frozen=True)
class FileClasses:
    """What is on a picture file."""

    name: str
    best: tuple[tuple[int, float], ...] = ()  # classes, by number, with probabilities, the likeliest first
    bad: str | None = None  # why the picture cannot be used; `best` is then empty


class Classifier:
    """A trained network that says which classes pictures are of: the `top` likeliest ones, or all where there are
    fewer.

    A batch is computed by one thread, and several batches at a time: so the answers do not depend on how many cores
    there are, as the order of sums within a batch would.
    """

    def __init__(self, run: TrainedRun, device: torch.device, top: int = 5) -> None:
        set_numerics(run.recipe)
        torch.set_num_threads(1)
        run.to(device)
        self._run = run
        self._device = device
        self._top = min(top, len(run.classes))
        self._normalize = Normalize(run.given.mean, run.given.std, device, run.memory_format)
        # One for each thread, with the same weights: a network may keep things in itself while it computes.
        self._networks: queue.SimpleQueue[nn.Module] = queue.SimpleQueue()
        self.num_threads = min(num_cores(), _MAX_THREADS)
        for network in _copies(run.network, self.num_threads):
            self._networks.put(network)

    def __call__(self, names: list[str]) -> list[FileClasses]:
        """What is on the pictures of a batch of files. Several threads may call it."""
        pictures = [self._read(name) for name in names]
        good = [picture for picture in pictures if not isinstance(picture, BadImage)]
        best = iter(self._best(torch.from_numpy(np.stack(good)))) if good else iter(())
        return [
            FileClasses(name, bad=picture.reason) if isinstance(picture, BadImage) else FileClasses(name, next(best))
            for name, picture in zip(names, pictures, strict=True)
        ]

    def _read(self, name: str) -> np.ndarray | BadImage:
        try:
            return self._run.transform.pixels(name)
        except BadImage as bad:
            return bad

    def _best(self, images: Tensor) -> list[tuple[tuple[int, float], ...]]:
        network = self._networks.get()
        try:
            with torch.inference_mode(), autocast_of(self._run.recipe, self._device):
                logits = heads(network(self._normalize(images.to(self._device))))[0].float().cpu()
        finally:
            self._networks.put(network)
        # As in an evaluation: of equally likely classes the first one.
        found = logits.softmax(1).sort(dim=1, descending=True, stable=True)
        classes, probabilities = (part[:, : self._top].tolist() for part in (found.indices, found.values))
        return [tuple(zip(*row, strict=True)) for row in zip(classes, probabilities, strict=True)]


def _copies(network: nn.Module, number: int) -> Iterator[nn.Module]:
    """A network and copies of it that share its weights; it alone where it cannot be copied."""
    yield network
    shared = {id(tensor): tensor for tensor in itertools.chain(network.parameters(), network.buffers())}
    for _ in range(number - 1):
        try:
            yield copy.deepcopy(network, dict(shared))
        except Exception:  # whatever somebody's module says to being copied
            return


def classify(
    classifier: Classifier,
    names: Iterable[str] | None,
    batch: int,
    ranks: Ranks | None = None,
    is_to_end: Callable[[], bool] = lambda: False,
) -> Iterator[list[FileClasses]]:
    """Classify picture files, `batch` at a time, while the names of the next ones are read: by rank 0, the other ranks
    have None. Yields the answers of the next batches, in the order of the names, the same on all ranks.

    Ranks and their threads take turns at the batches, each with the whole network: the batches, and so the answers, are
    the same on any number of them. `is_to_end` is asked on rank 0 before each turn, for whoever wants no more answers.
    """
    ranks = ranks or Ranks()
    num_threads = ranks.broadcast(classifier.num_threads)
    reader = _Reader(names, batch, ranks.num * num_threads) if names is not None else None
    waiting: list[Future[list[FileClasses]]] | None = None

    def turn_of_all() -> list[list[str]] | None:
        return None if reader is None or is_to_end() else reader.next(None if waiting is None else _SOON_S)

    # The threads switch warnings off and on while they read pictures, each for all.
    with ThreadPoolExecutor(num_threads, "convoy-predict") as pool, warnings.catch_warnings():
        while True:
            turn = ranks.first(turn_of_all)
            begun = [pool.submit(classifier, mine) for mine in turn[ranks.rank :: ranks.num]] if turn else None
            if waiting is not None:
                parts = ranks.gather([future.result() for future in waiting])
                in_order = itertools.chain.from_iterable(itertools.zip_longest(*parts, fillvalue=[]))
                yield list(itertools.chain.from_iterable(in_order))
            if turn is None:
                return
            waiting = begun


class _Reader:
    """Reads names ahead in a thread of its own, up to `most` batches for a turn: nobody waits for the next ones who
    need not.
    """

    def __init__(self, names: Iterable[str], batch: int, most: int) -> None:
        self._most = most
        self._batches: queue.Queue[list[str] | BaseException | None] = queue.Queue(maxsize=2 * most)
        self._end: BaseException | None = None
        self._ended = False
        threading.Thread(target=self._read, args=(iter(names), batch), daemon=True, name="convoy-names").start()

    def _read(self, names: Iterator[str], batch: int) -> None:
        try:
            while together := list(itertools.islice(names, batch)):
                self._batches.put(together)
            self._batches.put(None)
        except BaseException as error:
            self._batches.put(error)

    def next(self, patience: float | None) -> list[list[str]] | None:
        """The batches that are there; none where the next does not come within so many seconds, None at the end."""
        turn: list[list[str]] = []
        while len(turn) < self._most and not self._ended:
            try:
                found = self._batches.get(timeout=_SOON_S if turn else patience)
            except queue.Empty:
                return turn
            if isinstance(found, list):
                turn.append(found)
            else:
                self._ended, self._end = True, found
        if turn:
            return turn
        if self._end is not None:
            raise self._end
        return None if self._ended else []
