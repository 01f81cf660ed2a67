"""Ways to break the engine on purpose: the tests of exactness must notice every one of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from convoy.comm.redistribution import Redistribution, Transfer
from convoy.engine import program
from convoy.engine.network import Network, network_of


def local_batch_norm(net: nn.Module) -> None:
    """Statistics over each rank's samples."""
    network_of(net).context.batch_norm = "local"


def unweighted_mean(net: nn.Module) -> None:
    """Every rank's mean counts the same, however many samples it has."""
    network = network_of(net)
    network.weigh = lambda output, samples: Network.weigh(network, output, (1,) * len(samples))


def missing_gradient_sum(net: nn.Module) -> None:
    """Parameters keep their own rank's gradient."""
    reducer = network_of(net).reducer
    assert reducer is not None
    reducer.remove()


def missing_backward_reduction(net: nn.Module, which: str) -> None:
    """One of the sums over ranks in the backward pass, number `which` in the order of the forward pass, has only this
    rank's term."""
    network = network_of(net)
    make, build = network._program, program.redistribute

    def sabotaged(*arguments: Any) -> Any:
        found: list[Transfer] = []

        def noting(*args: Any) -> Redistribution:
            made = build(*args)
            found.extend(transfer for transfer in made.transfers if transfer.step.kind in ("copy", "move"))
            return made

        program.redistribute = noting
        try:
            result = make(*arguments)
        finally:
            program.redistribute = build
        if net.training and found:  # else the program is an old one
            broken = found[int(which)]
            broken.backward = _alone(broken.backward)
        return result

    network._program = sabotaged


def _alone(backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What the conjugate of a transfer gives where no other rank has a gradient: one rank at a time has its own."""

    def run(gradient: Tensor) -> Tensor:
        turns = [
            backward(gradient if rank == dist.get_rank() else torch.zeros_like(gradient))
            for rank in range(dist.get_world_size())
        ]
        return turns[dist.get_rank()]

    return run


def wrong_dropout_key(net: nn.Module) -> None:
    """Every rank draws its masks from a seed of its own."""
    network_of(net).context.seed += dist.get_rank()
