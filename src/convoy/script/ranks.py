"""The ranks of a script: their numbers, what is printed once, and that they are refused alike."""

import builtins
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from convoy.comm.ranks import gather_objects
from convoy.engine.network import Network
from convoy.errors import ConvoyError
from convoy.slurm import translate


def rank() -> int:
    """This process's number among all ranks, from 0; before `parallelize` too, and 0 on one device.

    >>> weights = convoy.state_dict(net)  # on every rank
    >>> if convoy.rank() == 0:
    ...     torch.save(weights, "weights.pt")
    """
    return dist.get_rank() if dist.is_initialized() else _variable("RANK", 0)


def num_ranks() -> int:
    """How many ranks there are; before `parallelize` too, and 1 on one device.

    >>> plan = f"sample={convoy.num_ranks()}" if convoy.num_ranks() > 1 else "serial"
    >>> plan
    'sample=2'
    """
    return dist.get_world_size() if dist.is_initialized() else _variable("WORLD_SIZE", 1)


def _variable(name: str, alone: int) -> int:
    translate()
    return int(os.environ.get(name) or alone)


def print(*values: object, **options: Any) -> None:
    """Python's `print` on rank 0, nothing on the others. What is printed must not need the other ranks.

    >>> convoy.print("epoch", 1)
    epoch 1
    """
    if rank() == 0:
        builtins.print(*values, **options)


@contextmanager
def fail_on_all_ranks(network: Network) -> Iterator[None]:
    """Run a block that fails on all ranks where one is refused, with the first rank's sentence. All ranks enter it."""
    group = network.groups.world
    failure: Exception | None = None
    sentence = None
    try:
        yield
    except Exception as error:
        failure = error
        sentence = str(error) if isinstance(error, ConvoyError) else f"{type(error).__name__}: {error}"
    sentences = gather_objects(sentence, group)
    refusal = next(((rank, text) for rank, text in enumerate(sentences) if text is not None), None)
    if failure is not None and (not isinstance(failure, ConvoyError) or group is None):
        raise failure
    if refusal is not None:
        rank, text = refusal
        raise ConvoyError(text if sentences.count(text) == len(sentences) else f"rank {rank}: {text}")


def check_same_on_all_ranks(network: Network, facts: Mapping[str, str]) -> None:
    """See that all ranks have the same facts; a ConvoyError names the first that is not the same. All ranks call it."""
    rows = gather_objects(list(facts.items()), network.groups.world)
    if all(row == rows[0] for row in rows):
        return
    first, *_ = every = [dict(row) for row in rows]
    for rank, other in enumerate(every):
        key = next((name for name in {**first, **other} if other.get(name) != first.get(name)), None)
        if key is not None:
            raise ConvoyError(
                f"{key} is not the same on rank {rank} as on rank 0, but a checkpoint holds one for all ranks: let all "
                "ranks do the same, and of networks give what convoy.parallelize returned, or copies of it"
            )
    raise ConvoyError("ranks give the same things in another order: give them in one order on all ranks")
