"""What recipes are written in: lengths of training (`90ep`, `5000ba`, `5%` of the whole run), spans of time (`6h`), and
sections, which are typed, unchangeable and strict about names that they do not know."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

FORMS = "epochs as 90ep or 0.5ep, or weight updates as 5000ba"
SPANS = "90s, 30min, 6h or 2d"

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(ep|ba|%)")
_SPAN = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Duration:
    """A length or a point of training: a number of epochs (`ep`), a whole number of weight updates (`ba`), each of one
    global batch, or a share of the whole run (`%`, at most 100). It is not negative.
    """

    value: float
    unit: str

    @classmethod
    def parse(cls, text: Any) -> Self:
        """Read `90ep`, `0.5ep`, `5000ba` or `5%`; a number without a unit counts epochs."""
        is_number = isinstance(text, int | float) and not isinstance(text, bool)
        form = _FORM.fullmatch(f"{text}ep" if is_number else text.strip() if isinstance(text, str) else "")
        if form is None or not math.isfinite(value := float(form[1])):
            raise ValueError(f"{text!r} is not a duration: write {FORMS}")
        if form[2] == "ba" and not value.is_integer():
            raise ValueError(f"{text!r} is not a whole number of weight updates: write {FORMS}")
        if form[2] == "%" and value > 100:
            raise ValueError(f"{text!r} is more than the whole run: write at most 100%")
        return cls(value, form[2])

    def updates(self, updates_per_epoch: int, total: int | None = None) -> int:
        """The nearest whole number of weight updates, of which an epoch has so many, and the whole run `total`.

        Something above zero in `ep` or `ba` is at least one update; a small share of a short run may be none.
        """
        if self.unit == "ba":
            return int(self.value)
        if self.unit == "%":
            assert total is not None, f"{self} needs the length of the whole run"
            return math.floor(self.value * total / 100 + 0.5)
        return max(math.floor(self.value * updates_per_epoch + 0.5), 1 if self.value > 0 else 0)

    def longer_than(self, other: "Duration") -> bool:
        """Whether this is longer than `other` whatever the data; False where only the data can tell."""
        return self.unit == other.unit and self.value > other.value

    def __bool__(self) -> bool:
        return self.value > 0

    def __str__(self) -> str:
        number = int(self.value) if self.value == int(self.value) else self.value
        return f"{number}{self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls.parse(value),
            serialization=core_schema.to_string_ser_schema(),
        )


def seconds_of(text: str) -> float:
    """A span of time: `90s`, `30min`, `6h` or `2d`; a ValueError says what it may be."""
    form = _SPAN.fullmatch(text.strip())
    if form is None:
        raise ValueError(f"{text!r} is not a span of time: write {SPANS}")
    if float(form[1]) == 0:
        raise ValueError(f"{text} is no time at all: write more than 0")
    return float(form[1]) * _SECONDS[form[2]]


def in_words(seconds: float) -> str:
    """A measured time with its unit: `0.083 s`, `31 s`, `5.2 min`, `6 h`."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


class Section(BaseModel):
    """A part of a recipe. Unknown keys, infinities and NaN are refused; a value never changes after it was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _time_span(text: str) -> str:
    seconds_of(text)
    return text


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
TimeSpan = Annotated[str, AfterValidator(_time_span)]
