"""Gradients of microbatches, added in one fixed binary tree.

Floating-point addition is not associative, so a sum depends on its order. Here the order depends on the number of
microbatches alone: neighbours are added first, then neighbours of those sums, as one carries in binary counting.
Whoever computes a microbatch, the weights come out bit for bit the same.
"""

from collections.abc import Sequence

from torch import Tensor, nn

Gradients = list[Tensor | None]


class GradientTree:
    """Collects the gradient of one microbatch after the other and leaves their sum in `.grad`.

    At most log2(microbatches) + 1 sets of gradients are kept at a time.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._partial: list[tuple[int, Gradients]] = []

    def add(self) -> None:
        """Take the gradient of the next microbatch out of `.grad`, which is left empty."""
        leaf: Gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        height = 0
        while self._partial and self._partial[-1][0] == height:
            leaf = _sum(self._partial.pop()[1], leaf)
            height += 1
        self._partial.append((height, leaf))

    def finish(self) -> None:
        """Put the sum over all microbatches into `.grad` and begin anew."""
        total = self._partial.pop()[1]
        while self._partial:
            total = _sum(self._partial.pop()[1], total)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient


def _sum(left: Gradients, right: Gradients) -> Gradients:
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]
