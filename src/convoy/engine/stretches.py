"""Stretches of a program that only compute, compiled by `torch.compile`; what lies between them runs as it is."""

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Instruction:
    """Takes what is in some slots, fills others, and empties those that nobody reads any more.

    Attributes:
        alone: it does more than compute: it talks to other ranks, or keeps something.
        name: of the call that it is, empty where it is none or several.
        layer: what it belongs to, for people.
    """

    run: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    alone: bool
    free: tuple[int, ...] = ()
    name: str = ""
    layer: str = ""


def compiled(instructions: Sequence[Instruction], results: Iterable[int]) -> list[Instruction]:
    """The same program with every stretch of instructions that only compute as one.

    Args:
        instructions: of the program, in order.
        results: slots that are read after the last one.
    """
    wanted = set(results)
    found: list[Instruction] = []
    stretch: list[Instruction] = []
    for instruction in reversed(instructions):
        if instruction.alone:
            found += [*_joined(stretch, wanted), instruction]
            stretch = []
            wanted |= set(instruction.inputs)
        else:
            stretch.insert(0, instruction)
    found += _joined(stretch, wanted)
    return found[::-1]


def _joined(stretch: Sequence[Instruction], wanted: set[int]) -> list[Instruction]:
    """One instruction for a stretch; what it needs from before is `wanted` from then on."""
    if not stretch:
        return []
    made: set[int] = set()
    needed: dict[int, None] = {}
    for instruction in stretch:
        needed |= dict.fromkeys(slot for slot in instruction.inputs if slot not in made)
        made |= set(instruction.outputs)
    inputs, outputs = tuple(needed), tuple(sorted(made & wanted))
    wanted |= set(inputs)
    return [Instruction(_compile(tuple(stretch), inputs, outputs), inputs, outputs, alone=False)]


def _compile(stretch: Sequence[Instruction], inputs: Sequence[int], outputs: Sequence[int]) -> Callable[..., Any]:
    def run(*tensors: Any) -> list[Any]:
        slots = dict(zip(inputs, tensors, strict=True))
        for instruction in stretch:
            values = instruction.run(*[slots[slot] for slot in instruction.inputs])
            for slot, value in zip(instruction.outputs, values, strict=True):
                slots[slot] = value
        return [slots[slot] for slot in outputs]

    # torch.compile keeps what it has made by code object, and only so much for each: every stretch needs its own
    code = run.__code__.replace(co_name="stretch")
    own = types.FunctionType(code, run.__globals__, "stretch", None, run.__closure__)
    return torch.compile(own, dynamic=False)
