"""What ranks with samples of their own agree on, approximately: sums that are compressed before they are sent, and the
mean of weights that every rank has changed by itself for some updates.

A compressor leaves something out. Each rank keeps that and sends it with its next tensors (error feedback: Seide et
al., 1-bit SGD, 2014; Karimireddy et al., 2019), so that over time nothing of its own is lost; a sum in bf16 is rounded
on its way, too.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from convoy.comm.collectives import Group, start_all_gather, start_all_reduce
from convoy.plans.compression import Compression

Sums = Callable[[], list[Tensor]]  # waits for sums over the ranks, and gives them; as often as it is called


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([x.numel() for x in like])
    return [piece.view(x.shape).to(x.dtype) for piece, x in zip(pieces, like, strict=True)]


def whole_sum(tensors: Sequence[Tensor], group: Group, dtype: torch.dtype | None = None, beside: bool = False) -> Sums:
    """In one message, of that type."""
    flat = torch.cat([x.flatten().to(dtype or x.dtype) for x in tensors])
    pending = start_all_reduce(flat, group, beside)
    return cache(lambda: _apart(pending.wait(), tensors))


class CompressedSum:
    """Adds up tensors, those of one update or round after the other, each time as many of the same shapes; all ranks of
    the group call it alike. `beside`: what is begun goes on while the ranks compute, also where they share memory."""

    def __init__(
        self, like: Sequence[Tensor], group: Group, compression: Compression | None, beside: bool = False
    ) -> None:
        self._group, self._compression, self._beside = group, compression, beside
        self._errors = [torch.zeros_like(x) for x in like] if compression is not None else []
        self._ranks = [compression.rank(x.shape) if compression is not None else 0 for x in like]
        self._factors = [self._new_factor(i, x) for i, x in enumerate(like) if self._ranks[i]]

    def _new_factor(self, i: int, x: Tensor) -> Tensor:
        """The second factor of PowerSGD to begin with, the same on all ranks; each sum begins with that of the last."""
        generator = torch.Generator().manual_seed(i)
        return torch.randn(x[0].numel(), self._ranks[i], generator=generator, dtype=x.dtype).to(x.device)

    @property
    def state(self) -> list[Tensor]:
        """What the next sum depends on."""
        return [*self._errors, *self._factors]

    @torch.no_grad()
    def start(self, tensors: Sequence[Tensor]) -> Sums:
        if self._compression is None or self._group is None:
            return whole_sum(tensors, self._group, beside=self._beside)
        tensors = list(torch._foreach_add(list(tensors), self._errors))
        start = {"bf16": self._rounded, "topk": self._largest, "powersgd": self._factored}
        return start[self._compression.kind](tensors)

    def _keep(self, tensors: list[Tensor], sent: list[Tensor]) -> None:
        torch._foreach_copy_(self._errors, torch._foreach_sub(tensors, sent))

    def _rounded(self, tensors: list[Tensor]) -> Sums:
        self._keep(tensors, [x.to(torch.bfloat16).to(x.dtype) for x in tensors])
        return whole_sum(tensors, self._group, torch.bfloat16, self._beside)

    def _largest(self, tensors: list[Tensor]) -> Sums:
        """The largest of each tensor by itself: ranks that hold the same one, or the same part of it, choose alike."""
        assert self._compression is not None
        kept, numbers, start = [], [], 0
        for x in map(torch.flatten, tensors):
            place = x.abs().topk(self._compression.num_kept(x.numel()), sorted=False).indices
            numbers.append(x[place])
            kept.append(place + start)
            start += x.numel()
        places, values = torch.cat(kept), torch.cat(numbers)
        sent = values.new_zeros(start).index_copy_(0, places, values)
        self._keep(tensors, _apart(sent, tensors))
        messages = places.to(torch.int32), values
        pending = [start_all_gather(x, self._group, self._beside) for x in messages]

        def finish() -> list[Tensor]:
            total = torch.zeros_like(sent)
            for at, add in zip(*(work.wait() for work in pending), strict=True):  # in the same order everywhere
                total.index_add_(0, at, add)
            return _apart(total, tensors)

        return cache(finish)

    def _factored(self, tensors: list[Tensor]) -> Sums:
        """PowerSGD (Vogels et al., 2019, algorithm 1): one step of a power iteration on the sum of the ranks' matrices,
        P = MQ, made orthogonal, and Q = MᵀP; what has no factors is sent whole, with the P."""
        divided = [i for i, rank in enumerate(self._ranks) if rank]
        matrices = [tensors[i].flatten(1) for i in divided]
        products = [m @ q for m, q in zip(matrices, self._factors, strict=True)]
        rest = [x for x, rank in zip(tensors, self._ranks, strict=True) if not rank]
        sums = whole_sum([*products, *rest], self._group)()
        bases = [torch.linalg.qr(p).Q for p in sums[: len(divided)]]
        parts = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
        # Copies begin where memory is aligned, as they do after a resume: products of matrices may depend on that.
        self._factors = [x.clone() for x in whole_sum(parts, self._group)()] if parts else []
        result, sent, others = list(tensors), list(tensors), iter(sums[len(divided) :])
        for i, p, q, part in zip(divided, bases, self._factors, parts, strict=True):
            result[i], sent[i] = (p @ q.T).view(tensors[i].shape), (p @ part.T).view(tensors[i].shape)
        result = [x if rank else next(others) for x, rank in zip(result, self._ranks, strict=True)]
        self._keep(tensors, sent)
        return lambda: result


class WeightAverage:
    """Weights that every rank changes by itself, and that meet in rounds.

    At the end of a round each rank sends how far its weights have come in it, and the sum of that, weighed by `share`s,
    is a step of the weights that all have in common, `anchor`: to the mean (local SGD: Stich, 2019), or further, by an
    outer optimizer with momentum: SlowMo (Wang et al., 2020), or DiLoCo with Nesterov's (Douillard et al., 2023).
    With `staleness` S that step is taken S rounds later: meanwhile a rank goes on from what it has, waits for nobody
    who is less than S rounds behind, and its own way in these rounds then gives way to that of all (as in Wang, Liang
    and Joshi, Overlap Local SGD, 2020). So the weights do not depend on how fast anybody was.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        total: CompressedSum,
        share: float,
        *,
        lr: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        staleness: int = 0,
    ) -> None:
        self._weights, self._total, self.share = list(weights), total, share
        self._lr, self._staleness = lr, staleness
        self._anchor = [x.detach().clone() for x in weights]
        self._outer = torch.optim.SGD(self._anchor, lr=lr, momentum=momentum, nesterov=nesterov)
        self._momentum = [torch.zeros_like(x) for x in self._anchor] if momentum else []
        for x, average in zip(self._anchor, self._momentum, strict=False):
            self._outer.state[x]["momentum_buffer"] = average
        self._follows_rate = bool(momentum) and not nesterov
        self.rates: list[float] = []  # of the rounds on their way
        self._pending: list[tuple[list[Tensor], Sums]] = []  # this rank's way in each of them, and the sum

    @torch.no_grad()
    def meet(self, rate: float) -> None:
        """End a round, in which the learning rate was that."""
        way = torch._foreach_sub(self._expected(), self._weights)
        self._pending.append((list(way), self._total.start(torch._foreach_mul(way, self.share))))
        self.rates.append(rate)
        if len(self._pending) > self._staleness:
            _, total = self._pending.pop(0)
            self._step(total(), self.rates.pop(0))
        torch._foreach_copy_(self._weights, self._expected())

    def _expected(self) -> list[Tensor]:
        """This rank's weights at the beginning of a round."""
        weights = list(self._anchor)
        for way, _ in self._pending:
            weights = list(torch._foreach_sub(weights, way))
        return weights

    def _step(self, way: list[Tensor], rate: float) -> None:
        # SlowMo's momentum is one of gradients, so that it does not shrink with the learning rate: equation 2 there
        scale = rate if self._follows_rate and rate else 1.0
        self._outer.param_groups[0]["lr"] = self._lr * scale
        for x, change in zip(self._anchor, way, strict=True):
            x.grad = change / scale
        self._outer.step()
        self._outer.zero_grad()

    def state(self, rates: Sequence[float] = ()) -> list[Tensor]:
        """What the rounds to come depend on, beside the weights, after a wait for those on their way: messages that
        nobody waits for would be taken for later ones. First make room for rounds of so many rates."""
        for rate in rates:
            way, total = ([torch.zeros_like(x) for x in self._anchor] for _ in range(2))
            self._pending.append((way, partial(list, total)))
            self.rates.append(rate)
        pending = [x for way, total in self._pending for x in (*way, *total())]
        return [*self._anchor, *self._momentum, *self._total.state, *pending]
