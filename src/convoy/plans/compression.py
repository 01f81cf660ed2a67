"""What of a sum of tensors is sent where it need not be exact: as bf16, in matrices of low rank, or the largest."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, cast

_PART = 1 / 5  # of the time that averaging may take, where devices wait for it
FORMS = "bf16, powersgd:RANK, as powersgd:4, or topk:PART, as topk:0.01"


@dataclass(frozen=True)
class Compression:
    """bf16 has two bytes a number. PowerSGD (Vogels et al., 2019) sends two factors of a matrix of some rank. Top-k
    (Lin et al., Deep Gradient Compression, 2018) sends the largest part of each tensor's numbers, with their places.
    """

    kind: Literal["bf16", "powersgd", "topk"]
    amount: float = 0.0  # the rank, or the part

    @staticmethod
    def parse(text: str) -> "Compression":
        """Read one of the forms; a ValueError says which there are.

        >>> Compression.parse("powersgd:4")
        Compression(kind='powersgd', amount=4.0)
        """
        kind, _, number = text.partition(":")
        try:
            amount = float(number or 0)
        except ValueError:
            amount = -1.0
        fits = {"bf16": text == kind, "powersgd": amount >= 1 and amount.is_integer(), "topk": 0 < amount <= 1}
        if not fits.get(kind, False):
            limits = {"powersgd": ": the rank is 1 or more", "topk": ": the part is more than 0 and at most 1"}
            raise ValueError(f"{text!r} is no way to compress{limits.get(kind, '')}: write {FORMS}")
        return Compression(cast(Literal["bf16", "powersgd", "topk"], kind), amount)

    def rank(self, shape: Sequence[int]) -> int:
        """The rank of a tensor's two factors, as a matrix of its first dimension by all others; 0 where they would have
        no fewer numbers than the tensor, which is then sent as it is."""
        if self.kind != "powersgd" or len(shape) < 2 or not prod(shape):
            return 0
        rows, columns = shape[0], prod(shape[1:])
        rank = min(int(self.amount), rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    def num_kept(self, count: int) -> int:
        """How many of a tensor's numbers are sent."""
        return min(count, ceil(self.amount * count))

    @property
    def passes(self) -> int:
        """About how many times as long as an update of SGD with momentum it takes to compress: as measured on one core
        for ResNet-18, a network of the CIFAR kind and AlexNet."""
        return {"bf16": 6, "powersgd": 3, "topk": 12}[self.kind]

    def message_bytes(self, shapes: Sequence[Sequence[int]], itemsize: int) -> float:
        """Of a rank's message."""
        if self.kind == "topk":
            return sum(self.num_kept(prod(shape)) for shape in shapes) * (itemsize + 4)
        if self.kind == "bf16":
            return 2 * sum(map(prod, shapes))
        return itemsize * sum(self.rank(s) * (s[0] + prod(s[1:])) if self.rank(s) else prod(s) for s in shapes)

    def sent_bytes(self, shapes: Sequence[Sequence[int]], itemsize: int, ranks: int) -> float:
        """What a rank sends for one sum: of an all-reduce in a ring, or, of the largest, to every other rank."""
        hops = ranks - 1 if self.kind == "topk" else 2 * (ranks - 1) / ranks
        return hops * self.message_bytes(shapes, itemsize)

    def __str__(self) -> str:
        if self.kind == "bf16":
            return "in bf16"
        if self.kind == "powersgd":
            return f"in rank {self.amount:g} (PowerSGD)"
        return f"as the largest {100 * self.amount:.3g} %"


def rounds_of(ratio: float, staleness: int) -> int:
    """After how many updates to average weights, which takes `ratio` times as long as an update."""
    return max(1, ceil(ratio if staleness else ratio * (1 - _PART) / _PART))
