"""The networks and batches that are measured, and the plans that are tried for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Plan = str | dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One network at one global batch."""

    name: str  # on the command line and in the table
    model: str  # name in `convoy.models`
    image_size: int  # height and width of the images
    batch: int  # samples of one weight update, on all devices together
    updates: int  # timed in each round, after one or two that are not
    num_classes: int = 10
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    # tried on two devices beside `sample=2`, by their names in the table
    plans: Mapping[str, Plan] = field(default_factory=dict)
    batch_norm: bool = False  # whether the network has batch norm
    dense: bool = False  # every pixel has a label, not every image
    passes: tuple[int, ...] = (32, 64)  # samples of a pass that are tried on one device, beside the whole batch

    def changed(self, batch: int | None, updates: int | None) -> "Case":
        """The case at another batch, or with another number of updates."""
        return replace(self, batch=batch or self.batch, updates=updates or self.updates)


def hybrid(**layers: str) -> dict[str, Any]:
    """A plan on two devices: a strategy for each of the named layers, all others by samples.

    Names of layers have `__` for a point: `hybrid(classifier__1="filter")`.
    """
    named = {name.replace("__", "."): {"device": strategy} for name, strategy in layers.items()}
    return {"mesh": {"device": 2}, "layers": {**named, "*": {"device": "sample"}}}


def _pairs(first: str, second: str, last: str) -> dict[str, Plan]:
    """Plans that save an exchange between two fully connected layers: the second takes the channels it is given."""
    pair = {first: "filter", second: "channel"}
    return {
        "owt=2": "owt=2",
        "pair": hybrid(**pair),
        "pair + filter": hybrid(**pair, **{last: "filter"}),
        "pair + channel": hybrid(**pair, **{last: "channel"}),
    }


ALEXNET_PLANS = _pairs("classifier__1", "classifier__4", "classifier__6")
VGG_PLANS = _pairs("classifier__0", "classifier__3", "classifier__6")

CASES = {
    case.name: case
    for case in (
        Case("alexnet-256", "alexnet", 224, 256, updates=1, num_classes=1000, plans=ALEXNET_PLANS),
        Case("alexnet-32", "alexnet", 224, 32, updates=5, num_classes=1000, plans=ALEXNET_PLANS),
        Case("vgg11", "vgg11-cifar", 32, 128, updates=4, plans=VGG_PLANS),
        Case(
            "resnet18",
            "resnet18",
            64,
            128,
            updates=2,
            plans={"owt=2": "owt=2", "filter=2": "filter=2"},
            batch_norm=True,
        ),
        Case("googlenet", "googlenet-cifar", 32, 128, updates=1, options={"aux_logits": False}, batch_norm=True),
        Case("squeezenet", "squeezenet1_1-cifar", 32, 128, updates=2),
    )
}
OTHERS = {
    case.name: case
    for case in (
        Case("alexnet-128", "alexnet", 224, 128, updates=2, num_classes=1000, plans=ALEXNET_PLANS),
        Case("lenet", "lenet", 28, 32, updates=5, plans={"owt=2": "owt=2"}, options={"in_channels": 1}),
    )
}
