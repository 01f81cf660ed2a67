"""The networks: what they are, where else they come from, how large they are, and weights for them."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.models.counting import Counts, count
    from convoy.models.factory import accepts, create, describe
    from convoy.models.googlenet import GoogLeNetOutputs
    from convoy.models.heads import classifier_names, image_channels
    from convoy.models.registry import ModelInfo, list_models
    from convoy.models.weights import load_weights

__all__ = [
    "Counts",
    "GoogLeNetOutputs",
    "ModelInfo",
    "accepts",
    "classifier_names",
    "count",
    "create",
    "describe",
    "image_channels",
    "list_models",
    "load_weights",
]

__getattr__ = lazily(
    __name__,
    {
        "counting": "Counts count",
        "factory": "accepts create describe",
        "googlenet": "GoogLeNetOutputs",
        "heads": "classifier_names image_channels",
        "registry": "ModelInfo list_models",
        "weights": "load_weights",
    },
)
