"""Local response normalization of a rank's channels."""

import torch.nn.functional as F
from torch import Tensor

from convoy.engine.kernels.kernel import Kernel, Site


def build(site: Site) -> Kernel:
    """Normalizes the channels that the rank was given, neighbours included, and gives its own."""
    call = site.call
    source = call.attributes["input"]
    size, alpha, beta, k = (call.attributes[name] for name in ("size", "alpha", "beta", "k"))
    given, own = site.parts(source, 1), site.parts(call.outputs[0], 1)
    start = own[0] - given[0] if own else 0
    cut = len(own) < len(given)

    def kernel(x: Tensor) -> list[Tensor]:
        y = F.local_response_norm(x, size, alpha, beta, k) if x.numel() else x.clone()
        return [y.narrow(1, start, len(own)) if cut else y]

    return kernel
