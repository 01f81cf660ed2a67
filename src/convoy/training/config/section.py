"""What every section of a recipe has in common: typed, unchangeable, and strict about names it does not know."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from convoy.training.config.duration import Duration


class Section(BaseModel):
    """A part of a recipe. Unknown keys, infinities and NaN are refused; a value never changes after it was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _positive(value: Duration) -> Duration:
    if not value:
        raise ValueError(f"{value} is no time at all: write more than 0")
    return value


def _absolute(value: Duration) -> Duration:
    if value.unit == "%":
        raise ValueError(f"{value} would be a share of itself: write epochs as 90ep or weight updates as 5000ba")
    return _positive(value)


PositiveDuration = Annotated[Duration, AfterValidator(_positive)]
AbsoluteDuration = Annotated[Duration, AfterValidator(_absolute)]
