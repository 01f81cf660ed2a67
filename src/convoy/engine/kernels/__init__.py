"""What a rank computes for each kind of call."""

from collections.abc import Callable

from convoy.engine.kernels.kernel import Kernel, Site

KERNELS: dict[str, Callable[[Site], Kernel]] = {}

__all__ = ["KERNELS", "Kernel", "Site"]
