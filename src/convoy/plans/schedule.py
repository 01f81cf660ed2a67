"""In which order a stage runs the parts of a batch: GPipe, 1F1B and zero-bubble.

GPipe (Huang et al., 2019) runs all parts forward and then all of them back. 1F1B (PipeDream-flush: Narayanan et al.,
2021) takes each back as soon as it can, so that a stage keeps the activations of no more parts than there are stages
from it to the last. Zero-bubble (after ZB-H2 of Qi et al., "Zero Bubble Pipeline Parallelism", 2024) sends gradients of
activations on first, and computes those of weights, for which no other stage waits, where it would wait itself and at
the end, where it can for several parts at once. In all of them gradients are those of the weights at the beginning of
the update.
"""

from collections.abc import Iterator
from typing import Literal, get_args

Schedule = Literal["gpipe", "1f1b", "zero-bubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
# the kind of pass, and the part of it; `weights` computes the missing weight gradients of all parts up to that one
Action = tuple[Literal["forward", "backward", "weights"], int]

PARTS_PER_STAGE = 4  # parts of the batch for each stage by default: at most a fifth of the time is waited


def actions(schedule: Schedule, parts: int, stage: int, stages: int) -> list[Action]:
    """The passes of a stage, numbered from 0, in one update: forward and backward of the parts of the batch, in order.

    >>> actions("1f1b", parts=3, stage=0, stages=2)
    [('forward', 0), ('forward', 1), ('backward', 0), ('forward', 2), ('backward', 1), ('backward', 2)]
    >>> actions("zero-bubble", parts=2, stage=0, stages=2)
    [('forward', 0), ('forward', 1), ('backward', 0), ('weights', 0), ('backward', 1), ('weights', 1)]
    """
    ahead = _ahead(schedule, parts, stage, stages)
    passes: list[Action] = [("forward", part) for part in range(ahead)]
    for part in range(parts):
        waits = part + ahead - parts  # the number of this backward pass among those with no forward pass before them
        if schedule == "zero-bubble" and waits > 0:
            # as long as the forward pass for which the next stage lets this one wait
            passes.append(("weights", waits - 1))
        passes.append(("backward", part))
        if part + ahead < parts:
            passes.append(("forward", part + ahead))
    if schedule == "zero-bubble":
        passes.append(("weights", parts - 1))
    return passes


def in_flight(schedule: Schedule, parts: int, stage: int, stages: int) -> int:
    """The most parts of the batch whose activations a stage keeps at once; arguments as for `actions`. Zero-bubble
    keeps those of all parts, or instead what weight gradients are computed from, which may be more."""
    return parts if schedule == "zero-bubble" else _ahead(schedule, parts, stage, stages)


def taken_back(schedule: Schedule, parts: int, stage: int, stages: int, part: int) -> int:
    """How many parts have gone back on a stage before it runs a part forward; other arguments as for `actions`.

    >>> [taken_back("1f1b", parts=4, stage=0, stages=2, part=part) for part in range(4)]
    [0, 0, 1, 2]
    """
    return max(0, part + 1 - _ahead(schedule, parts, stage, stages))


def returning(schedule: Schedule, parts: int, source: int, stage: int, stages: int) -> int:
    """The number of parts whose gradients a stage keeps after sending them to an earlier one (`source`), as it cannot
    know that they have arrived, while it still runs parts forward; other arguments as for `actions`.

    >>> returning("1f1b", parts=8, source=1, stage=2, stages=4)
    1
    """
    return _ahead(schedule, parts, source, stages) - _ahead(schedule, parts, stage, stages)


def _ahead(schedule: Schedule, parts: int, stage: int, stages: int) -> int:
    """How many parts go forward before the first goes back."""
    later = stages - 1 - stage
    if schedule == "gpipe" or (schedule == "zero-bubble" and stage == 0 and later):
        return parts  # under zero-bubble nobody waits for gradients of the first stage, and all wait for its values
    # zero-bubble: 1 + 2 · later would do if nothing had to be sent; with more, a stage has work until gradients arrive
    return min(parts, {"1f1b": 1 + later, "zero-bubble": 1 + 3 * later}[schedule])


def bubble(schedule: Schedule, parts: int, stages: int) -> float:
    """The share of the time that stages of equal work wait, beside messages: (S − 1) / (M + S − 1) with M parts and S
    stages. Under zero-bubble the last stage alone waits, for the first forward passes, each a third of a part's
    work."""
    work = 3 * parts if schedule == "zero-bubble" else parts
    return (stages - 1) / (work + stages - 1)


def in_order(schedule: Schedule, passes: int, stages: int) -> Iterator[tuple[int, Action]]:
    """What all stages do in an update, each as far as the passes that it is sent by the stage before (of gradients, by
    the one after) have been listed."""
    orders = [iter(actions(schedule, passes, stage, stages)) for stage in range(stages)]
    following = [next(order, None) for order in orders]
    done: set[tuple[int, Action]] = set()
    while any(following):
        for stage, order in enumerate(orders):
            while (action := following[stage]) is not None:
                sender = stage - 1 if action[0] == "forward" else stage + 1
                if action[0] != "weights" and 0 <= sender < stages and (sender, action) not in done:
                    break
                done.add((stage, action))
                following[stage] = next(order, None)
                yield stage, action
