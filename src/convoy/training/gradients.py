"""The gradients of an update: how those of all ranks' passes become those of the global batch, on the network as this
rank's part of it, or, approximately, how weights become those of all ranks; and the noise in them.

The gradient noise scale (McCandlish et al., 2018) says up to about which batch more samples an update help. The
expected squared norm of the mean gradient of B samples is |G|² + tr Σ / B. From those of one microbatch and of the
whole batch follow both unknowns without bias (appendix A.1), and from their averages the scale tr Σ / |G|², in samples.
"""

import math
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.comm.collectives import all_gather, gather_ints
from convoy.comm.groups import everyone
from convoy.comm.ranks import received
from convoy.engine.gradients.averaging import CompressedSum, WeightAverage, whole_sum
from convoy.engine.gradients.divided import WholeNorms, clip_grad_norm, global_norm
from convoy.engine.gradients.reducer import GradientReducer
from convoy.engine.gradients.tree import TreeReducer
from convoy.engine.network import Network
from convoy.engine.parallelize import Options, take_part
from convoy.engine.stages import StagedNetwork
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan
from convoy.recipe.recipe import Recipe
from convoy.training.division import Division
from convoy.training.optimizer import set_frozen


def divided_network(model: nn.Module, plan: Plan, example: Tensor, recipe: Recipe) -> Network:
    """Make the plain model, on its device, this rank's part of it, in place. All ranks call it; a ConvoyError says that
    a layer cannot be divided as the plan says. `example` are images of one microbatch; only shape, type and device
    matter."""
    options = Options(recipe.batch_norm, "part", recipe.seed, compile=recipe.compile, recompute=recipe.recompute)
    network = take_part(model, plan, example, options, devices=plan.mesh.num_devices)
    if network.counts_passes and plan.mesh.num_devices > 1:
        why = network.captured.partition(", as ")[2]
        raise ConvoyError(
            f"{why}, but how many passes an update has depends on the plan, so that results would too: take that "
            "out of forward, or train with convoy.parallelize in a loop of your own"
        )
    network.context.statistics.in_order = recipe.reproducible
    network.context.in_turns = True
    if isinstance(network, StagedNetwork):
        network.returns_memory = recipe.parallel.memory_limit is not None
    return network


# What is said where an approximate method goes on from a checkpoint of other devices, or of none of its kind
_ANEW = (
    "goes on from the mean of all devices' weights: what each of them had kept to send later, rounds on their way and "
    "an outer momentum were of other devices or options, and begin anew"
)


class Exchange:
    """Adds the gradients of an update's passes over the ranks: as they are, in the fixed tree over the microbatches of
    a reproducible run, or, where a method is approximate, so over ranks that have the same samples alone, and over the
    others compressed; with local SGD it averages weights in their place, from update `first` on. All ranks make the
    same calls."""

    def __init__(self, network: Network, recipe: Recipe, first: int = 0) -> None:
        self.network, self._recipe, self._first, section = network, recipe, first, recipe.parallel
        # With local SGD, and with nothing else, weights and the optimizer's state become this rank's own.
        self.local_mean = section.local_sgd is not None
        self.version = network.sample_rank if self.local_mean else 0  # which of the optimizer's states is this rank's
        self.is_due = False  # whether gradients of passes are there that no exchange has taken with it
        self.every = None if section.local_sgd == "auto" else section.local_sgd  # updates of a round, once known
        self._tree: TreeReducer | None = None
        self._average: WeightAverage | None = None
        parameters = dict(network.model.named_parameters())
        self._split = [(p, tuple(sorted(network.layouts[name].split_axes))) for name, p in parameters.items()]
        axes = frozenset(network.sample_axes if section.approximate is not None else ())
        reduced = network.reduced()
        # Parameters whose approximate sum or mean goes over the sample axes, in the order of the network
        merged = {p for p, of_p in reduced if axes and axes <= set(of_p) and p.requires_grad}
        self._share = 1.0  # what a rank's way is multiplied by, so that those of all add up to the mean
        self._merged = [parameter for parameter in parameters.values() if parameter in merged]
        self._reduced = [(p, tuple(sorted(set(of_p) - axes)) if p in merged else of_p) for p, of_p in reduced]
        self._group = network.groups.of(axes)
        if self.local_mean:
            self._check_divided(axes)
        self._gradients: CompressedSum | None = None
        if self._merged and self._group is not None:
            compression = None if self.local_mean else section.compression
            self._gradients = CompressedSum(self._merged, self._group, compression)
        if recipe.reproducible or section.approximate is not None:
            self._make_reducer()
        network.context.statistics.is_local = self.local_mean

    def _check_divided(self, axes: frozenset[int]) -> None:
        """Refuse a plan under which ranks with samples of their own share the work of a layer."""
        for name, layout in self.network.layouts.items():
            if layout.split_axes & axes:
                raise ConvoyError(
                    f"local SGD lets devices with other samples go on by themselves, but the plan {self.network.plan} "
                    f"divides {name} over them: choose one that divides layers on another axis, e.g. sample=2,filter=2"
                )

    @property
    def divides_gradients(self) -> bool:
        """Whether ranks hold other gradients than each other, of parts or of their own samples."""
        return self.local_mean or any(axes for _, axes in self._split)

    def _make_reducer(self) -> None:
        """For the parameters that are trained by now; where the tree adds gradients, that is made once it is known who
        has which microbatches."""
        network = self.network
        if network.reducer is not None:
            network.reducer.remove()
            network.reducer = None
            if not self._recipe.reproducible:
                network.reducer = GradientReducer(self._reduced, network.groups)

    def train_others(self, frozen: Collection[str], thawed: Collection[str]) -> None:
        """Let parameters be frozen, and others be trained, from the next update on. All ranks call it."""
        set_frozen(self.network.model, frozen, True)
        set_frozen(self.network.model, thawed, False)
        self.network.train_others()
        self._make_reducer()
        if self._tree is not None:
            self._tree.remove()
            self._tree = self._new_tree(*self._divided)

    def _new_tree(self, division: Division, num_passes: int) -> TreeReducer:
        groups, axes, shares = self.network.groups, self.network.sample_axes, division.counts
        return TreeReducer(self._reduced, groups, sample_axes=axes, shares=shares, passes=num_passes)

    def divide(self, division: Division, num_passes: int) -> None:
        """Divide the updates from the next on so, in so many passes each."""
        self._divided = division, num_passes
        if self._tree is not None:
            self._tree.set_shares(division.counts, num_passes)
        elif self._recipe.reproducible:
            self._tree = self._new_tree(division, num_passes)
        self.weigh(division)

    def weigh(self, division: Division) -> None:
        """The ranks' samples are divided so."""
        if self.local_mean:
            self._share = len(division.positions(self.network.sample_rank)) / sum(division.sizes)
        if self._average is not None:
            self._average.share = self._share

    @contextmanager
    def in_pass(self, is_last: bool) -> Iterator[None]:
        """While entered, a backward pass runs. After the `last` one, gradients of all passes are added over the ranks,
        as they are: the loss is its pass's part of the global mean."""
        reducer = self.network.reducer
        is_last = is_last and self.network.context.postponed is None
        with nullcontext() if is_last or reducer is None else reducer.paused():
            yield
        self.is_due = reducer is not None and not is_last  # the last pass takes with it what those before have left

    def finish(self) -> None:
        """After the last pass: `.grad` and buffers become those of the global batch."""
        if self.is_due and self.network.reducer is not None:
            self.network.reducer.reduce()
        self.is_due = False
        if self._tree is not None:
            self._tree.finish()
        self.network.context.statistics.fold(self.network.groups)
        if isinstance(self.network, StagedNetwork):
            self.network.finish_update()

    def abandon(self) -> None:
        """Forget the passes of an update that broke off."""
        self.is_due = False
        self.network.abandon()
        if self._tree is not None:
            self._tree.abandon()

    def norm(self) -> Tensor:
        """The norm of the gradient, taken over the whole parameters."""
        gradients = [(p.new_zeros(0) if p.grad is None else p.grad, axes) for p, axes in self._split]
        return global_norm(gradients, self.network.groups)

    def clip(self, max_norm: float) -> None:
        """Scale the gradient down to a norm, taken over the whole parameters."""
        clip_grad_norm(self._split, self.network.groups, max_norm)

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """While entered, norms that the optimizer takes are those of whole tensors."""
        if type(optimizer).__module__.startswith("torch.") or not any(axes for _, axes in self._split):
            return nullcontext()
        return WholeNorms(self._split, self.network.groups)

    def is_local(self, update: int) -> bool:
        """Whether this rank's loss in an update is the mean over its own samples."""
        return self.local_mean and update >= self._first

    def merge(self, update: int) -> None:
        """Before an update: add up the gradients that a method sends otherwise than exactly, or before weights are
        averaged in their place."""
        if self._gradients is None:
            return
        if self.is_local(update):
            self._average = self._average or self._new_average()
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._merged]
        totals = self._gradients.start(gradients)()
        for parameter, total in zip(self._merged, totals, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(total)
            elif bool(total.any()):  # another rank has used it
                parameter.grad = total

    def _new_average(self) -> WeightAverage:
        section, options = self._recipe.parallel, self._recipe.parallel.averaging
        total = CompressedSum(self._merged, self._group, section.compression, beside=options.staleness > 0)
        outer: dict[str, Any] = {"momentum": options.outer_momentum, "nesterov": options.outer_nesterov}
        outer |= {"lr": options.outer_lr, "staleness": options.staleness}
        return WeightAverage([p.detach() for p in self._merged], total, self._share, **outer)

    def updated(self, update: int, rate: float) -> None:
        """After an update, at that learning rate."""
        if self._average is not None and self.every is not None and (update + 1 - self._first) % self.every == 0:
            self._average.meet(rate)

    @property
    def lag(self) -> int:
        """How many updates a rank may be behind another."""
        return (self.every or 1) * self._recipe.parallel.averaging.staleness

    def averaging_seconds(self) -> float:
        """Of one meeting, by some that change nothing. All ranks call it."""
        total = CompressedSum(self._merged, self._group, self._recipe.parallel.compression)
        tensors = [parameter.detach() for parameter in self._merged]
        seconds = []
        for _ in range(4 if tensors else 0):
            began = time.perf_counter()
            total.start(tensors)()[0].flatten()[:1].tolist()  # a GPU is waited for
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:]) if seconds else 0.0

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """While entered, all ranks have the same weights and running statistics, the mean of theirs, where a method
        lets them drift apart; nothing of that changes how they go on."""
        if not self.local_mean or self._group is None:
            yield
            return
        self._state()  # with what is on its way
        tensors = self._drifting()
        before = [tensor.clone() for tensor in tensors]
        torch._foreach_copy_(tensors, whole_sum([tensor * self._share for tensor in tensors], self._group)())
        try:
            yield
        finally:
            torch._foreach_copy_(tensors, before)

    def _drifting(self) -> list[Tensor]:
        buffers = [buffer for buffer in self.network.model.buffers() if buffer.is_floating_point()]
        return [tensor.detach() for tensor in (*self._merged, *buffers)]

    def _state(self, rates: Sequence[float] = ()) -> list[Tensor]:
        """What the updates to come depend on, of this rank alone, beside what all have."""
        tensors = self._gradients.state if self._gradients is not None else []
        if self.local_mean:
            tensors = [*self._drifting(), *tensors]
        return tensors if self._average is None else [*tensors, *self._average.state(rates)]

    @property
    def _place(self) -> str:
        return f"{self.network.plan} {self._recipe.parallel.approximate}"

    def saved(self) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
        """What a checkpoint keeps of an approximate method: numbers, and the tensors of each rank. All ranks call it,
        and go through the tensors."""
        if self._group is None:
            return {}, iter(())
        rates = list(self._average.rates) if self._average is not None else None
        numbers = {"place": self._place, "every": self.every, "rates": rates}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            state = [tensor.contiguous().flatten().view(torch.uint8) for tensor in self._state()]
            for i in range(max(count for (count,) in gather_ints([len(state)], everyone()))):
                piece = state[i] if i < len(state) else torch.empty(0, dtype=torch.uint8, device=self.network.device)
                sizes = [size for (size,) in gather_ints([len(piece)], everyone())]
                padded = piece.new_zeros(max(sizes))
                padded[: len(piece)] = piece
                for rank, (row, size) in enumerate(zip(all_gather(padded, everyone()), sizes, strict=True)):
                    yield f"rank-{rank}.{i:05}", row[:size]

        return numbers, tensors()

    @torch.no_grad()
    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> str | None:
        """Go on from what `saved` gave, by rank and name; a sentence where that was of other devices. All ranks call
        it."""
        if not numbers or numbers["place"] != self._place:
            return _ANEW if numbers or self._group is not None else None
        self.every = numbers["every"]
        if numbers["rates"] is not None:
            self._average = self._new_average()
        state = self._state(numbers["rates"] or ())
        for kind, pieces in sorted(tensors.items()):
            for name, piece in sorted(pieces.items()):
                value = received(piece)  # all ranks ask for all
                if kind == f"rank-{self.network.groups.rank}" and int(name) < len(state):
                    target = state[int(name)]
                    target.copy_(value.view(target.dtype).view(target.shape))
        return None

    def versions(self, whole: Tensor) -> list[Tensor]:
        """A whole as each sample rank has it, where a method lets them drift apart, else once."""
        axes = self.network.sample_axes if self.local_mean else ()
        return list(all_gather(whole.contiguous(), self.network.groups.of(axes)))


# A pass of one microbatch takes longer than its part of a merged one, and one that is not replayed longer still.
_SHARE, _SLOWER, _NOT_REPLAYED = 0.01, 2, 5
_KEPT = 0.9  # of both averages at each sampled update: they are of about the last ten


def estimate_noise(small: float, big: float, samples: int, batch: int) -> tuple[float, float]:
    """|G|² and tr Σ from the squared norms of the mean gradients of some samples and of a batch."""
    return (batch * big - samples * small) / (batch - samples), (small - big) / (1 / samples - 1 / batch)


def noise_scale(averages: Mapping[str, float]) -> float | None:
    """The scale in samples; None where nothing was sampled yet, or noise hides the gradient."""
    squared, variance = averages.get("gradient_squared", 0.0), averages.get("gradient_variance", 0.0)
    return variance / squared if squared > 0 and variance > 0 else None


def noise_interval(division: Division, num_stages: int, replayed: bool) -> int:
    """Every how many updates one is sampled, so that a pass of one microbatch, for which all devices wait, takes a
    hundredth of the time at most. Of LeNet on a CPU it took a quarter of an update of 16, hence a floor of 50."""
    updates = _SLOWER * len(division.counts) * num_stages / len(division.sizes)  # as long as such a pass
    return max(50, math.ceil(updates / _SHARE)) * (_NOT_REPLAYED if replayed else 1)


@dataclass
class GradientNoise:
    """In which updates the gradient of the first microbatch is measured alone, and the averages of what follows. The
    microbatch has the same samples on any number of devices; others take part in its pass with none."""

    every: int  # updates from one that is sampled to the next; 0 samples none
    division: Division  # of the batch
    averages: MutableMapping[str, float]  # kept over a stop

    def due(self, update: int) -> bool:
        """Whether an update, counted from 0, is sampled."""
        return self.every > 0 and update % self.every == self.every // 2

    @property
    def one(self) -> Division:
        """The first microbatch alone."""
        return Division(self.division.sizes[:1], (1, *(0 for _ in self.division.counts[1:])))

    def add(self, small: float, big: float) -> None:
        """Take the squared norms of the microbatch's and the batch's mean gradient into account."""
        if math.isfinite(small) and math.isfinite(big):
            sizes = self.division.sizes
            numbers = estimate_noise(small, big, sizes[0], sum(sizes))
            for name, number in zip(("gradient_squared", "gradient_variance"), numbers, strict=True):
                self.averages[name] = _KEPT * self.averages.get(name, number) + (1 - _KEPT) * number
