"""The networks and batches that are measured, and the plans that are tried for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Plan = str | dict[str, Any]
UNET = "measuring.networks:unet"


@dataclass(frozen=True)
class Case:
    """One network at one global batch."""

    name: str  # on the command line and in the table
    model: str  # name in `convoy.models`
    image_size: int  # height and width of the images
    batch: int  # samples of one weight update, on all devices together
    updates: int = 1  # timed in each round, after some that are not
    num_classes: int = 10
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    batch_norm: bool = False  # whether the network has batch norm
    dense: bool = False  # every pixel has a label, not every image
    passes: tuple[int, ...] = (32, 64)  # samples of a pass that are tried on one device, beside the whole batch
    # tried on two devices beside `sample=2`, by their names in the table
    plans: Mapping[str, Plan] = field(default_factory=dict)

    # of cases with stages
    microbatch: int = 0  # samples over which batch norm takes its statistics; 0 where the network has none
    # plans by number of devices, beside `sample` and the planner's own
    divided: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    # into how many parts the batch is cut that go through the stages one after the other: those tried
    parts: tuple[int, ...] = (4, 8)
    # by number of stages the modules at which torch's stages begin, those after the first: those tried
    cuts: Mapping[int, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


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


def _by_name(*cases: Case) -> dict[str, Case]:
    return {case.name: case for case in cases}


ALEXNET_PLANS = _pairs("classifier__1", "classifier__4", "classifier__6")
VGG_PLANS = _pairs("classifier__0", "classifier__3", "classifier__6")
RESNET_PLANS: dict[str, Plan] = {"owt=2": "owt=2", "filter=2": "filter=2"}
WITHOUT_HEADS = {"aux_logits": False}
CASES = _by_name(
    Case("alexnet-256", "alexnet", 224, 256, 1, num_classes=1000, plans=ALEXNET_PLANS),
    Case("alexnet-32", "alexnet", 224, 32, 5, num_classes=1000, plans=ALEXNET_PLANS),
    Case("vgg11", "vgg11-cifar", 32, 128, 4, plans=VGG_PLANS),
    Case("resnet18", "resnet18", 64, 128, 2, plans=RESNET_PLANS, batch_norm=True),
    Case("googlenet", "googlenet-cifar", 32, 128, 1, options=WITHOUT_HEADS, batch_norm=True),
    Case("squeezenet", "squeezenet1_1-cifar", 32, 128, 2),
)

CUT = {2: ("stage=2",), 4: ("stage=4", "stage=2,sample=2")}
UNET_CUTS = {2: (("up.1",),), 4: (("down.1", "up.1", "up.3"),)}
STAGED = _by_name(
    Case(
        "resnet50",
        "resnet50",
        64,
        64,
        updates=5,
        microbatch=8,
        passes=(8, 16, 32),
        divided=CUT,
        parts=(2, 4),
        cuts={2: (("layer3.0",), ("layer3.1",)), 4: (("layer2.0", "layer3.0", "layer4.0"),)},
    ),
    Case(
        "vgg16",
        "vgg16",
        64,
        64,
        updates=3,
        passes=(16, 32),
        divided={2: ("owt=2", *CUT[2]), 4: ("owt=4", *CUT[4])},
        parts=(2, 4),
        cuts={2: (("features.10",), ("features.17",)), 4: (("features.5", "features.14", "classifier.0"),)},
    ),
    Case(
        "unet",
        UNET,
        128,
        16,
        updates=3,
        options={"groups": 8},
        dense=True,
        passes=(2, 4, 8),
        divided={2: ("height=2", *CUT[2]), 4: ("height=4", *CUT[4])},
        parts=(4, 8, 16),
        cuts=UNET_CUTS,
    ),
    Case(
        "unet-512",
        UNET,
        512,
        4,
        options={"groups": 4, "width": 16},
        dense=True,
        passes=(1, 2),
        divided={
            2: ("height=2", "stage=2"),
            4: ("height=4", "sample=2,height=2", "stage=4", "stage=2,height=2", "stage=2,sample=2"),
        },
        parts=(4,),
        cuts=UNET_CUTS,
    ),
)
