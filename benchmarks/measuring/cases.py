"""The networks and batches that are measured, and the plans that are tried for each (`cases.yaml`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Plan = str | dict[str, Any]


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
    # tried on two devices, by their names in the table; of parallel.py beside `sample=2`
    plans: Mapping[str, Plan] = field(default_factory=dict)

    # of cases with stages
    microbatch: int = 0  # samples over which batch norm takes its statistics; 0 where the network has none
    # plans by number of devices, beside `sample` and the planner's own
    divided: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    # into how many parts the batch is cut that go through the stages one after the other: those tried
    parts: tuple[int, ...] = (4, 8)
    # by number of stages the modules at which torch's stages begin, those after the first: those tried
    cuts: Mapping[int, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CASES, STAGED, HELD, MEMORY = (
    {row["name"]: Case(**row) for row in _TABLE[key]} for key in ("parallel", "stages", "ranks", "memory")
)
SUBJECTS = tuple(Case(**row) for row in _TABLE["planner"])
