"""Spans of wall-clock time in the words people use: `90s`, `30min`, `6h`, `2d`."""

import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

FORMS = "90s, 30min, 6h or 2d"
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_FORM = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h|d)")


@dataclass(frozen=True)
class TimeSpan:
    """A span of time.

    Attributes:
        value: more than 0.
        unit: `s`, `min`, `h` or `d`.
    """

    value: float
    unit: str

    @classmethod
    def parse(cls, text: Any) -> "TimeSpan":
        """Read `6h` and the like.

        Raises:
            ValueError: the text has another form, or says no time at all.
        """
        form = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
        if form is None:
            raise ValueError(f"{text!r} is not a span of time: write {FORMS}")
        if float(form[1]) == 0:
            raise ValueError(f"{text} is no time at all: write more than 0")
        return cls(float(form[1]), form[2])

    @property
    def seconds(self) -> float:
        """In seconds."""
        return self.value * _SECONDS[self.unit]

    def __str__(self) -> str:
        return f"{self.value:.9g}{self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls.parse(value),
            serialization=core_schema.to_string_ser_schema(),
        )


def in_words(seconds: float) -> str:
    """A measured time with its unit: `0.083 s`, `31 s`, `5.2 min`, `6 h`."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
