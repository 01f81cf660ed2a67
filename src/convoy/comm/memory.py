"""Memory that does not suffice: what torch says of it, and the sentence that says where, and what needs less."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from convoy.comm.position import current, place_in_words
from convoy.errors import MachineError, RankFailedError, TooLargeError
from convoy.units import size

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGTPE]?i?B|\d+ bytes)")
_FREE = re.compile(r"capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
NEEDS_LESS = "smaller microbatches, a plan over more devices or --precision bf16 need less"


def lack_of_memory(error: BaseException) -> str | None:
    """What was asked for in vain, to end a sentence: `: it asked for 2.00 GiB where 1.02 GiB of 79.10 GiB were free`.
    Empty where the error does not say; None where it is about anything but memory."""
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not (
        isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
    ):
        return None
    request, free = _ASKED.search(text), _FREE.search(text)
    if request is None:
        return ""
    number, _, unit = request[1].partition(" ")
    of_memory = f" where {free[2]} of {free[1]} were free" if free is not None else ""
    return f": it asked for {size(int(number)) if unit == 'bytes' else request[1]}{of_memory}"


@contextmanager
def memory_explained(rank: int, num_ranks: int, has_gone_well: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Say in one sentence that this rank's device ran out of memory, where, and what needs less: as a mistake, or as
    the machine's failure where the same `has_gone_well` before and may do so again."""

    def kind() -> type[MachineError | TooLargeError]:
        return MachineError if has_gone_well() else TooLargeError

    try:
        yield
    except RankFailedError as error:  # says all already
        if not error.out_of_memory:
            raise
        raise kind()(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        needed = lack_of_memory(error)
        if needed is None:
            raise
        who = f"rank {rank}" if num_ranks > 1 else "the device"
        layer = current.layer or _layer_of(error)
        where = place_in_words(current.update, current.part, layer)
        where += f", layer {layer}" if layer and layer not in where else ""
        sentence = f"{who} ran out of memory ({where}){needed}; {NEEDS_LESS}"
        raise kind()(sentence) from error


def _layer_of(error: BaseException) -> str:
    """The innermost layer in whose forward pass an exception was raised; empty where it was in none."""
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [module for module in selves if isinstance(module, nn.Module)]
    names = {id(layer): name for name, layer in modules[0].named_modules()} if modules else {}
    return next((names[id(module)] for module in reversed(modules) if id(module) in names), "")
