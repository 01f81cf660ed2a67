"""Cross-entropy for one or several classifier heads, and how many samples were right."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from convoy.errors import ConvoyError


@dataclass(frozen=True)
class ClassificationLoss:
    """Mean cross-entropy over the samples given; auxiliary heads count with a weight of their own.

    GoogLeNet's two auxiliary classifiers count 0.3 each (Szegedy et al., 2015, section 5). Label smoothing is that of
    Szegedy et al., 2016: the target is (1 - ε) for the label plus ε / classes for every class.
    """

    label_smoothing: float = 0.0
    aux_weight: float = 0.3

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss, a scalar, of logits [samples, classes], or of a tuple of them with the main head first; the targets
        are labels [samples] or class probabilities [samples, classes].
        """
        main, *others = heads(outputs)
        loss = F.cross_entropy(main, targets, label_smoothing=self.label_smoothing)
        for logits in others:
            loss = loss + self.aux_weight * F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        return loss


def heads(outputs: Any) -> tuple[Tensor, ...]:
    """The logits of every head of a network's outputs, the main head first; a ConvoyError where they are something else
    than logits [samples, classes].
    """
    found = tuple(_logits(outputs))
    if not found or any(logits.dim() != 2 for logits in found):
        shapes = ", ".join(str(list(logits.shape)) for logits in found) or type(outputs).__name__
        raise ConvoyError(f"the network gives {shapes} where logits [samples, classes] are needed; train a classifier")
    return found


def num_correct(outputs: Any, targets: Tensor) -> Tensor:
    """Samples whose largest logit of the main head is their label (or their most probable class): an integer scalar."""
    labels = targets if targets.dim() == 1 else targets.argmax(1)
    return (heads(outputs)[0].detach().argmax(1) == labels).count_nonzero()


def _logits(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        yield from _logits(tuple(outputs.values()))
    elif isinstance(outputs, tuple | list):
        for output in outputs:
            yield from _logits(output)
