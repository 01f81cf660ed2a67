"""The strategies that a layer can have on an axis of the mesh, and how one is refused that is none of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convoy.plans.mesh import STAGE
from convoy.terminal import brief, did_you_mean


@dataclass(frozen=True)
class Strategy:
    """All that is said of a strategy, wherever it is read, checked or drawn."""

    letter: str  # stands for it in drawings
    effect: str  # on a layer, for a legend
    unit: str  # what each rank needs at least one of; empty where nothing is too small for it
    aliases: str  # words for it that people may know
    exchanges: bool = True  # whether ranks send each other activations for it in every pass


# What an axis does with a layer. The search has an order of its own (`AXIS_STRATEGIES`), since the first of two equally
# fast plans wins.
STRATEGIES = {
    "sample": Strategy("S", "divides the batch", "", "data batch dp ddp samples images n", exchanges=False),
    "filter": Strategy(
        "F",
        "divides its outputs' channels",
        "output channel",
        "model tensor tp mp filters output out_channels column f k",
    ),
    "channel": Strategy("C", "divides its inputs' channels", "input channel", "channels input in_channels row c"),
    "height": Strategy("H", "divides the rows", "output row", "spatial rows h"),
    "width": Strategy("W", "divides the columns", "output column", "columns cols w"),
    "replicate": Strategy("R", "whole on every device", "", "none whole replicated full copy serial", exchanges=False),
    "owt": Strategy("", "sample for convolutions, filter for linear layers", "", "weird one-weird-trick krizhevsky"),
}

WORDS = (*STRATEGIES, STAGE)  # the words for an axis of a plan in one line

_STAGE_ALIASES = "stage stages pipeline pipelining pipelined pipe pp gpipe pipedream submodel submodels"
_MEANINGS = {alias: word for word, strategy in STRATEGIES.items() for alias in strategy.aliases.split()}
_MEANINGS |= dict.fromkeys(_STAGE_ALIASES.split(), STAGE)


def of_layer(strategy: str, op: str) -> str:
    """The strategy that a kind of layer has: `owt`, one weird trick (Krizhevsky, 2014), stands for two others."""
    return strategy if strategy != "owt" else "filter" if op == "linear" else "sample"


def strategy_error(word: Any, words: Sequence[str] = tuple(STRATEGIES)) -> str:
    """The sentence about a word that should be one of the strategies in `words`."""
    text = show(word)
    meaning = _MEANINGS.get(text.lower())
    if meaning == STAGE and STAGE not in words:
        return f"{text} is no strategy of a layer: to divide the network, give the plan an axis {STAGE}, as in stage=2"
    otherwise = f"it must be {', '.join(words[:-1])} or {words[-1]}"
    return f"{text} is no strategy{did_you_mean(meaning or text, words, otherwise=otherwise)}"


def show(value: Any) -> str:
    """A value in a sentence, shortened."""
    text = "empty" if value is None or value == "" else str(value).lower() if isinstance(value, bool) else str(value)
    return brief(" ".join(text.split()))
