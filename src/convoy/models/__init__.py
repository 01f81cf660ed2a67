"""The networks: what they are, where else they come from, how large they are, and weights for them."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.models.counting import Counts as Counts
    from convoy.models.counting import count as count
    from convoy.models.factory import accepts as accepts
    from convoy.models.factory import create as create
    from convoy.models.factory import describe as describe
    from convoy.models.factory import published as published
    from convoy.models.registry import list_models as list_models
    from convoy.models.weights import image_channels as image_channels
    from convoy.models.weights import load_weights as load_weights

__getattr__ = lazily(
    __name__,
    {
        "counting": "Counts count",
        "factory": "accepts create describe published",
        "registry": "list_models",
        "weights": "image_channels load_weights",
    },
)
