"""Ways to break the engine on purpose: the tests of exactness must notice every one of them."""

from torch import nn

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
