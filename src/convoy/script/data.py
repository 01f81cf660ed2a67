"""The data of a script's ranks: their samples of every global batch, and evaluation that counts each sample once."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, Sampler

from convoy.comm.collectives import all_reduce, gather_ints
from convoy.comm.groups import Groups
from convoy.data.order import Order
from convoy.engine.agreement import agree
from convoy.engine.network import network_of
from convoy.errors import ConvoyError
from convoy.graph.tree import replace
from convoy.plans.layout import balanced, consecutive, proportional


class BatchSampler(Sampler[list[int]]):
    """Gives each rank its own samples of every global batch, for a `DataLoader`. All ranks make it.

    >>> list(convoy.BatchSampler(net, num_samples=8, global_batch=4))  # on rank 0 of two that divide the samples
    [[0, 1], [4, 5]]
    >>> sampler = convoy.BatchSampler(net, len(dataset), 4, shuffle=True)
    >>> loader = DataLoader(dataset, batch_sampler=sampler)
    >>> for epoch in range(2):
    ...     sampler.set_epoch(epoch)
    ...     for inputs, targets in loader:
    ...         F.cross_entropy(net(inputs), targets).backward()

    Ranks that work on the same samples together (`filter`, `height`, …) get the same ones. The global batches are a
    function of the seed and the epoch alone, so that the same training goes on under another plan or on another number
    of devices; shuffled, they are those of `convoy train` with this seed.

    Args:
        net: what `convoy.parallelize` returned, or a copy of it.
        num_samples: size of the data set.
        global_batch: samples of all ranks together in one batch.
        shuffle: whether every epoch has another order; by default the data set's order.
        seed: seed of the order.
        drop_last: drop the incomplete batch at the end of an epoch, which is the default where samples are
            shuffled. Otherwise every sample comes exactly once: an epoch is divided into as many batches, of nearly
            even size, of which no rank's share is empty. (A batch may then have more than `global_batch` samples if
            that is less than twice the number of sample ranks.)
        shares: relative shares of the sample ranks, such as `(3, 1)` if the first device is three times as fast; even
            by default.

    Raises:
        ConvoyError: some rank would have no sample, ranks give different arguments, or one makes no sense.
    """

    def __init__(
        self,
        net: nn.Module,
        num_samples: int,
        global_batch: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool | None = None,
        shares: Sequence[float] | None = None,
    ) -> None:
        network = network_of(net)
        agree("convoy.BatchSampler", network.groups)
        for name, number in (("num_samples", num_samples), ("global_batch", global_batch)):
            if not isinstance(number, int) or number < 1:
                raise ConvoyError(f"BatchSampler: {name}={number!r} must be a whole number of at least 1")
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = shuffle if drop_last is None else drop_last
        self.shares = None if shares is None else tuple(shares)
        self._place, self._places = network.sample_rank, network.num_sample_ranks
        self._check(network.groups)
        self._order = Order(num_samples, 1, seed)
        if self.drop_last:
            self._batches = consecutive([global_batch] * (num_samples // global_batch))
        else:
            fewest = -(-num_samples // global_batch)
            self._batches = balanced(num_samples, min(fewest, num_samples // self._places))
        self._epoch, self._start = 0, 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch that comes next, as for torch's `DistributedSampler`.

        Args:
            epoch: its number, from 0.
            start: number of its batches to skip, which were trained on before a stop.
        """
        if epoch < 0 or not 0 <= start <= len(self):
            raise ConvoyError(
                f"set_epoch({epoch}, {start}): epochs count from 0, and each has {len(self)} batches to start from"
            )
        self._epoch, self._start = epoch, start

    def __len__(self) -> int:
        """Global batches in a whole epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        """The numbers of this rank's samples in each batch of the epoch."""
        samples = self._order.samples(self._epoch).tolist() if self.shuffle else range(self.num_samples)
        for batch in self._batches[self._start :]:
            parts = self._parts(len(batch))
            positions = parts[self._place]
            yield list(samples[batch.start + positions.start : batch.start + positions.stop])

    def _parts(self, size: int) -> tuple[range, ...]:
        if self.shares is None:
            return balanced(size, self._places)
        return consecutive(proportional(size, self.shares))

    def _check(self, groups: Groups) -> None:
        arguments = (self.num_samples, self.global_batch, self.shuffle, self.seed, self.drop_last, self.shares)
        numbers = [zlib.crc32(repr(arguments).encode()), self.num_samples]
        rows = gather_ints(numbers, groups.world)
        for other, row in enumerate(rows):
            if row != rows[groups.rank]:
                many = f"{row[1]} samples where this one has {self.num_samples}"
                what = (
                    many if row[1] != self.num_samples else "another global_batch, shuffle, seed, drop_last or shares"
                )
                raise ConvoyError(f"BatchSampler: rank {other} has {what}: make it alike on all ranks")
        if self.shares is not None and (
            len(self.shares) != self._places or not all(0 < share < math.inf for share in self.shares)
        ):
            raise ConvoyError(
                f"BatchSampler: shares={self.shares} must be {self._places} positive numbers, one for each place on "
                "the plan's sample axes"
            )
        smallest = min(self.num_samples, self.global_batch)
        if smallest < self._places:
            what = "global_batch" if smallest == self.global_batch else "num_samples"
            raise ConvoyError(
                f"BatchSampler: {what}={smallest} cannot be divided over {self._places} ranks that each need a sample: "
                f"make it at least {self._places}, or use fewer devices"
            )
        if self.drop_last and self.global_batch > self.num_samples:
            raise ConvoyError(
                f"BatchSampler: global_batch={self.global_batch} is larger than the data set, so that every epoch "
                f"would be empty: set it to at most {self.num_samples}, or drop_last=False"
            )


@overload
def evaluate(net: nn.Module, loader: Iterable[Any], measure: Callable[[Any, Any], Tensor]) -> float: ...
@overload
def evaluate(
    net: nn.Module, loader: Iterable[Any], measure: Callable[[Any, Any], Mapping[str, Tensor]]
) -> dict[str, float]: ...
def evaluate(
    net: nn.Module, loader: Iterable[Any], measure: Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
) -> float | dict[str, float]:
    """The mean of measurements over all samples of all ranks, each counted once. All ranks call it.

    >>> loader = DataLoader(dataset, batch_sampler=convoy.BatchSampler(net, len(dataset), 4))
    >>> accuracy = convoy.evaluate(net, loader, lambda outputs, labels: outputs.argmax(1) == labels)
    >>> 0 <= accuracy <= 1
    True

    The network runs in evaluation mode and without gradients; every layer's own mode comes back afterwards.

    Args:
        net: what `convoy.parallelize` returned, or a copy of it.
        loader: gives this rank's batches as pairs of inputs and targets; inputs are a tensor, a tuple of the network's
            arguments, or a dictionary of them by name. They are moved to the network's device. With a `BatchSampler`
            every sample comes once; without, see to that, and to equally many batches for all ranks.
        measure: takes the network's outputs and the targets of one batch, and returns one number for each of its
            samples (integers and booleans too), or a dictionary of such tensors.

    Returns:
        The mean, or a dictionary of means; the same on every rank.

    Raises:
        ConvoyError: ranks get different numbers of batches, samples would be left out or count twice, or `measure` does
            not return one number for each sample.
    """
    network = network_of(net)
    groups, device = network.groups, network.device
    agree("convoy.evaluate", groups)
    totals: dict[str | None, Tensor] = {}
    num_samples = 0
    with evaluating(net), torch.no_grad():
        for batch in _in_step(loader, groups):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise ConvoyError(
                    "evaluate: the loader must give pairs (inputs, targets): put several of either into a tuple, by a "
                    "collate_fn of the DataLoader"
                )
            parts = (dict(part) if isinstance(part, Mapping) else part for part in batch)  # also one of transformers
            inputs, targets = replace(tuple(parts), Tensor, lambda x: x.to(device, non_blocking=True))
            size, outputs = _run(net, inputs)
            num_samples += size
            measures = measure(outputs, targets)
            for name, values in measures.items() if isinstance(measures, Mapping) else [(None, measures)]:
                if not isinstance(values, Tensor) or values.shape != (size,):
                    what = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
                    raise ConvoyError(
                        f"evaluate: measure must return one number for each of the {size} samples of the batch, shape "
                        f"[{size}], but it returned {what}: a loss needs reduction='none'"
                    )
                total = values.to(device).double().sum()
                totals[name] = totals[name] + total if name in totals else total
    if not totals:
        raise ConvoyError("evaluate: the loader gave no batch")
    sums = torch.stack([*totals.values(), torch.tensor(num_samples, dtype=torch.float64, device=device)])
    *numerators, count = all_reduce(sums, groups.of(network.sample_axes)).tolist()
    means = {name: numerator / count for name, numerator in zip(totals, numerators, strict=True)}
    return means[None] if None in means else {str(name): mean for name, mean in means.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every layer's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _in_step(loader: Iterable[Any], groups: Groups) -> Iterator[Any]:
    """The loader's batches, as many as on all other ranks. Raises ConvoyError where ranks get different numbers of
    them, or the loader is known not to give every sample once."""
    world = groups.world
    shown = getattr(loader, "iterable", loader)  # that a progress bar is around
    sampler = getattr(shown, "batch_sampler", None)
    if isinstance(sampler, BatchSampler):
        left_out = sampler.num_samples % sampler.global_batch if sampler.drop_last else 0
        if left_out:
            raise ConvoyError(
                f"evaluate: the loader leaves out {left_out} of the {sampler.num_samples} samples: make its "
                "BatchSampler with drop_last=False"
            )
        if sampler._start:
            raise ConvoyError(
                f"evaluate: the loader begins with batch {sampler._start} of its epoch and leaves the others out: "
                "call set_epoch(0)"
            )
        yield from loader
        return
    if isinstance(getattr(shown, "sampler", None), DistributedSampler) and world is not None:
        raise ConvoyError(
            "evaluate: torch's DistributedSampler repeats samples to give all ranks equally many, and knows nothing of "
            "ranks that share samples: use DataLoader(…, batch_sampler=convoy.BatchSampler(net, len(dataset), batch))"
        )
    batches = iter(loader)
    while True:
        batch = next(batches, _END)
        rows = gather_ints([batch is not _END], world)
        if rows != [rows[0]] * len(rows):
            more, fewer = rows.index([1]), rows.index([0])
            raise ConvoyError(
                f"evaluate: rank {fewer} has no more batches where rank {more} has one: give all ranks equally many, "
                "as convoy.BatchSampler does"
            )
        if batch is _END:
            return
        yield batch


_END = object()


def _run(net: nn.Module, inputs: Any) -> tuple[int, Any]:
    if isinstance(inputs, Tensor):
        return len(inputs), net(inputs)
    if isinstance(inputs, Mapping):
        return len(next(iter(inputs.values()))), net(**inputs)
    return len(inputs[0]), net(*inputs)
