"""The networks that are cut into stages, the plans for them, and where torch's own pipelining cuts them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from measuring.cases import Case

UNET = "measuring.networks:unet"


@dataclass(frozen=True)
class StageCase(Case):
    """One network at one global batch."""

    microbatch: int = 0  # samples over which batch norm takes its statistics; 0 where the network has none
    # plans without stages by number of devices, beside `sample` and the planner's own
    divided: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    staged: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # plans with stages, by number of devices
    # into how many parts the batch is cut that go through the stages one after the other: those tried
    parts: tuple[int, ...] = (4, 8)
    # by number of stages the modules at which torch's stages begin, those after the first: those tried
    cuts: Mapping[int, tuple[tuple[str, ...], ...]] = field(default_factory=dict)

    def changed(self, batch: int | None, updates: int | None) -> "StageCase":
        """The case at another batch, for which passes and parts of other sizes are tried too, or with other updates."""
        of = batch or self.batch
        passes = {*self.passes, *(samples * of // self.batch for samples in self.passes)}
        parts = {*self.parts, *(number * of // self.batch for number in self.parts)}
        return replace(
            self,
            batch=of,
            updates=updates or self.updates,
            passes=tuple(sorted(passes - {0, of})),
            parts=tuple(sorted(parts - {0})),
        )


CASES = {
    case.name: case
    for case in (
        StageCase(
            "resnet50",
            "resnet50",
            64,
            64,
            updates=5,
            batch_norm=True,
            microbatch=8,
            passes=(8, 16, 32),
            staged={2: ("stage=2",), 4: ("stage=4", "stage=2,sample=2")},
            parts=(2, 4),
            cuts={2: (("layer3.0",), ("layer3.1",)), 4: (("layer2.0", "layer3.0", "layer4.0"),)},
        ),
        StageCase(
            "resnet50-224",
            "resnet50",
            224,
            64,
            updates=1,
            batch_norm=True,
            microbatch=8,
            passes=(8, 32),
            staged={2: ("stage=2",), 4: ("stage=4", "stage=2,sample=2")},
            parts=(4, 8),
            cuts={2: (("layer3.0",),), 4: (("layer2.0", "layer3.0", "layer4.0"),)},
        ),
        StageCase(
            "vgg16",
            "vgg16",
            64,
            64,
            updates=3,
            passes=(16, 32),
            divided={2: ("owt=2",), 4: ("owt=4",)},
            staged={2: ("stage=2",), 4: ("stage=4", "stage=2,sample=2")},
            parts=(2, 4),
            cuts={2: (("features.10",), ("features.17",)), 4: (("features.5", "features.14", "classifier.0"),)},
        ),
        StageCase(
            "unet",
            UNET,
            128,
            16,
            updates=3,
            options={"groups": 8},
            dense=True,
            passes=(2, 4, 8),
            divided={2: ("height=2",), 4: ("height=4",)},
            staged={2: ("stage=2",), 4: ("stage=4", "stage=2,sample=2")},
            parts=(4, 8, 16),
            cuts={2: (("up.1",),), 4: (("down.1", "up.1", "up.3"),)},
        ),
        StageCase(
            "unet-512",
            UNET,
            512,
            4,
            updates=1,
            options={"groups": 4, "width": 16},
            dense=True,
            passes=(1, 2),
            divided={2: ("height=2",), 4: ("height=4", "sample=2,height=2")},
            staged={2: ("stage=2",), 4: ("stage=4", "stage=2,height=2", "stage=2,sample=2")},
            parts=(4,),
            cuts={2: (("up.1",),), 4: (("down.1", "up.1", "up.3"),)},
        ),
    )
}
