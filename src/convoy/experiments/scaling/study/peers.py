"""The other tools that a study measures beside Convoy: their names, what they need, and what they do not do."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoy.errors import ConvoyError

if TYPE_CHECKING:
    from convoy.training import Recipe

PEERS = {"ddp": "DistributedDataParallel", "fabric": "Lightning Fabric", "accelerate": "accelerate"}
"""What plain PyTorch users would take, by their names on the command line."""
EXTRAS = {"fabric": "lightning", "accelerate": "accelerate"}
"""The package, and the extra of Convoy's, that a peer needs."""


def check_peers(peers: Sequence[str]) -> None:
    """Refuse what is no peer.

    Raises:
        ConvoyError: it is none.
    """
    for peer in peers:
        if peer not in PEERS:
            raise ConvoyError(f"--peers {peer} is no peer: choose among {', '.join(PEERS)}")


def missing(kind: str) -> str | None:
    """The package that a peer needs and that is not installed."""
    package = EXTRAS.get(kind)
    return package if package is not None and importlib.util.find_spec(package) is None else None


def check_installed(kind: str) -> None:
    """Refuse a peer that is not installed.

    Raises:
        ConvoyError: it is not; the sentence names the extra.
    """
    package = missing(kind)
    if package is not None:
        raise ConvoyError(f"--peers {kind} needs {package}, which is not installed: pip install 'convoy-nn[{package}]'")


def check_recipe(recipe: "Recipe") -> None:
    """Refuse what only Convoy's trainer does.

    Raises:
        ConvoyError: the peers cannot train by this recipe.
    """
    for asked, what in (
        (recipe.precision == "fp16", "precision=fp16 (bf16 can be)"),
        (recipe.ema is not None, "ema"),
        (recipe.reproducible, "reproducible"),
    ):
        if asked:
            raise ConvoyError(f"--peers do not train with {what}: leave that or --peers out")
