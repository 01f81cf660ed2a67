"""The `checkpoint` section of a recipe."""

from typing import Literal

from pydantic import Field

from convoy.training.config.section import PositiveDuration, Section
from convoy.training.config.timespan import TimeSpan


class CheckpointConfig(Section):
    """When the state is saved, and what to do where that fails."""

    every: PositiveDuration | Literal["auto"] = Field(
        "auto", description="e.g. 1ep or 500ba; auto follows from the measured cost of a checkpoint and mtbf"
    )
    mtbf: TimeSpan = Field(
        TimeSpan(6, "h"), description="mean time between failures of the run that auto reckons with, e.g. 30min or 2d"
    )
    keep: int = Field(3, ge=1, description="how many of the last are kept, beside the best")
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="what the run does when a checkpoint cannot be written, e.g. on a full disk"
    )
