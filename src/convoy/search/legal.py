"""Which strategies a layer can have: those that its rule does not refuse and that differ from each other."""

import itertools
from collections.abc import Iterable

from convoy.errors import ConvoyError
from convoy.graph.graph import Call
from convoy.plans.rules import RULES, Batch, Situation
from convoy.search.prices import NOWHERE, Prices
from convoy.search.space import Strategy


def allowed(
    prices: Prices, batch: Batch, calls: Iterable[Call], given: Iterable[Strategy], narrow: bool = True
) -> list[Strategy]:
    """The strategies that a layer can have.

    Left out, with the proof that nothing is lost: what the rules refuse; of convolutions, what asks for the same
    layouts and gives the same as another strategy; and `height` and `width` of linear layers on a vector for each
    sample, whose rule then does what `sample` or `replicate` does, whichever the input is in already.

    Args:
        prices: of the graph and mesh.
        batch: how the samples are divided.
        calls: of the layer, those whose rules look at its strategy.
        given: the candidates.
        narrow: leave out what is no more than another one; what is refused is left out in any case.

    Raises:
        ConvoyError: the layer can have none of them; the rule's own sentence.
    """
    found: dict[tuple[object, ...], Strategy] = {}
    calls, given = list(calls), list(given)
    candidates = set(given)
    vectors = len(calls) == 1 and _is_on_vectors(calls[0], prices, batch)
    drawing = all(call.op == "random" for call in calls)
    alike = all(call.op in ("conv", "random") for call in calls)  # linear layers follow more of their input
    refused: tuple[Call, Strategy] | None = None
    for strategy in given:
        if drawing:  # by samples or not at all
            strategy = tuple("sample" if each == "sample" else "replicate" for each in strategy)
        rows = {"height", "width"} & set(strategy)
        if narrow and vectors and rows and _instead(strategy, batch) <= candidates:
            continue
        answers = []
        for call in calls:
            answer = prices.answer(call, batch, strategy, [NOWHERE] * len(call.inputs))
            if isinstance(answer, ConvoyError):
                refused = call, strategy
                break
            answers.append((answer.wants, answer.gives))
        else:
            found.setdefault(tuple(answers) if narrow and alike else strategy, strategy)
    if not found and refused is not None:
        call, strategy = refused  # its rule names this layer, not one that is like it
        RULES[call.op](Situation(prices.graph, prices.mesh, batch, call, strategy, {}))
    return list(found.values())


def _instead(strategy: Strategy, batch: Batch) -> set[Strategy]:
    """What a linear layer on vectors does where it would divide rows or columns: one of these, as its input lies."""
    choices: list[tuple[str, ...]] = []
    for axis, each in enumerate(strategy):
        if each in ("height", "width"):
            choices.append(("sample", "replicate") if axis in batch.axes else ("replicate",))
        else:
            choices.append((each,))
    return set(itertools.product(*choices))


def _is_on_vectors(call: Call, prices: Prices, batch: Batch) -> bool:
    if call.op != "linear":
        return False
    shape = prices.graph.shape(call.attributes["input"])
    return len(shape) == 2 and shape[0] == batch.num_samples
