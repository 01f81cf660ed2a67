"""An optimizer whose work the ranks of a network share, where that is faster."""

from torch import nn
from torch.optim import Optimizer

from convoy.engine.gradients import GradientReducer, ShardedOptimizer, sharding_pays
from convoy.engine.network import network_of


def divide_update(net: nn.Module, optimizer: Optimizer) -> Optimizer:
    """The optimizer to use: one that shares the update of large parameters, or the given one where that does not pay.

    All ranks call it, before the first update. Where the update is shared each rank has the sum of its own piece of a
    large gradient only, so that `optimizer` must not be used any more.

    Args:
        net: as `parallelize` gave it.
        optimizer: of its parameters.
    """
    network = network_of(net)
    parameters = [(p, tuple(sorted(network.layouts[name].copied))) for name, p in net.named_parameters()]
    if network.reducer is None or not sharding_pays(optimizer, parameters, network.groups):
        return optimizer
    network.reducer.remove()
    network.reducer = GradientReducer(parameters, network.groups, scatter=True)
    return ShardedOptimizer(optimizer, network.reducer)
