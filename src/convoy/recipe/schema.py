"""What recipes are written in: lengths of training (`90ep`, `5000ba`, `5%` of the whole run), spans of time (`6h`), and
sections, which are typed, unchangeable and strict about names that they do not know; their keys, for people, and what
is wrong with one in a sentence: the dotted key, the problem, what is accepted instead.
"""

import difflib
import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from convoy.documents import dotted, show
from convoy.plans.plan import Plan

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
        if form is None and str(text).startswith("-"):
            raise ValueError(f"{text} is below 0: write {FORMS}")
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


def checked(read: Callable[[str], object]) -> AfterValidator:
    """Of a text that can be read so, and stays a text."""

    def check(text: str) -> str:
        read(text)
        return text

    return AfterValidator(check)


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
TimeSpan = Annotated[str, checked(seconds_of)]


# Words of pydantic's, and what people call the same in YAML.
_FOR_PEOPLE = {
    "a valid boolean": "true or false",
    "a valid integer": "a whole number",
    "a valid array": "a list in square brackets",
    "a valid string": "text; put it in quotes if it looks like a number",
    "an object": "a section with keys of its own, as {A: 1, B: 3}",
    "a valid ": "a ",
    " or be ": " or ",
    "'": "",
}


@dataclass(frozen=True)
class Key:
    """A key for people."""

    key: str  # dotted, with the kind of its section where that has several
    type: str  # of its values, or these themselves where there are few
    default: str  # as YAML writes it; empty where a value is needed
    description: str


def fields_of(model: type[BaseModel], prefix: str = "", kind: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    """Every dotted key that a document can have in order, the kind of its section where that has several, and its
    field.
    """
    for name, field in model.model_fields.items():
        kinds = _kinds(field.annotation)
        for section in kinds:
            yield from fields_of(section, f"{prefix}{name}.", f" ({_name(section)})" if len(kinds) > 1 else kind)
        if not kinds:
            yield f"{prefix}{name}", kind, field


def describe_keys(model: type[BaseModel]) -> Iterator[Key]:
    """Every key of a document in order, those of each kind of a section after one another."""
    for key, kind, field in fields_of(model):
        default = "" if field.is_required() else show(field.get_default(call_default_factory=True, validated_data={}))
        accepts = " | ".join(dict.fromkeys(map(_type, _leaves(field.annotation))))
        yield Key(f"{key}{kind}", accepts, default, field.description or "")


def field_at(model: type[BaseModel], key: str) -> FieldInfo:
    """The field of a dotted key, in the first kind of each section."""
    return next(field for name, _, field in fields_of(model) if name == key)


def number_type(annotation: Any) -> type[int] | type[float] | None:
    """The type of a key's value where that is a number (or null), and no word."""
    leaves = list(_leaves(annotation))
    words = any(get_origin(leaf) is Literal for leaf in leaves)
    return next((kind for kind in (int, float) if kind in leaves and not words), None)


def is_text(annotation: Any) -> bool:
    """Whether a value is free text (or null), so that it needs no reading as YAML."""
    leaves = list(_leaves(annotation))
    return Plan in leaves or {str} <= {*leaves} <= {str, types.NoneType}


def sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence about the first mistake in a document, with the keys of the others."""
    # A default that follows from other keys is no mistake of its own where those are wrong.
    details = [detail for detail in error.errors(include_url=False) if detail["type"] != "default_factory_not_called"]
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    places = [_Place.of(detail["loc"], model) for detail in details]
    of_first_key = [detail for detail, place in zip(details, places, strict=True) if place.key == places[0].key]
    more_keys = sorted({place.key for place in places if place.key} - {places[0].key})
    first = _explain(of_first_key, places[0], model)
    return f"{first} (also wrong: {', '.join(more_keys)})" if more_keys else first


@dataclass(frozen=True)
class _Place:
    """Where pydantic found a mistake, without the tags that it puts in for the kinds of a section or of a value."""

    path: list[str | int]
    section: type[BaseModel]  # that the last key lies in
    kind: str  # of this section, where it has several
    kinds: list[str]  # of the section that lies there, where it has several

    @staticmethod
    def of(loc: Sequence[str | int], model: type[BaseModel]) -> "_Place":
        path: list[str | int] = []
        section, kind, kinds = model, "", [model]
        for part in loc:
            if len(kinds) > 1:
                kind, kinds = str(part), [section for section in kinds if _name(section) == part]
            elif kinds or isinstance(part, int):
                path.append(part)
                section = kinds[0] if kinds else section
                field = section.model_fields.get(str(part))
                kinds = _kinds(field.annotation) if field is not None else []
        return _Place(path, section, kind, list(map(_name, kinds)) if len(kinds) > 1 else [])

    @property
    def key(self) -> str:
        return dotted(self.path)


def _explain(details: Sequence[ErrorDetails], place: _Place, model: type[BaseModel]) -> str:
    """What is wrong with a value; the members of a union have a detail each."""
    key, problem, context, value = place.key, details[0]["type"], details[0].get("ctx", {}), show(details[0]["input"])
    field = place.section.model_fields.get(str(place.path[-1])) if place.path else None
    if value.lower() == "none" and field is not None and types.NoneType in _leaves(field.annotation):
        return f"{key} is {value}: write null"
    if problem == "extra_forbidden":
        return _unknown(place, details[0]["input"], model)
    if problem == "value_error":
        return _in_its_words(str(context["error"]), place)
    if problem == "missing" and key in ("model", "model.name"):
        return "model.name is missing: name a network, e.g. `convoy train resnet18`; `convoy models` lists them"
    if problem == "missing":
        return f"{key} is missing: write it into the recipe or add --set {key}=VALUE"
    if problem == "union_tag_not_found":
        return f"{key}.name is missing: it is one of {', '.join(place.kinds)}"
    if place.kinds and problem != "union_tag_invalid":
        name = next(iter(difflib.get_close_matches(value, place.kinds, 1)), place.kinds[0])
        return f"{key} is {value}, but has keys of its own: write {key}.name={name}"
    if problem == "union_tag_invalid":
        key, value, must = f"{key}.name", show(context["tag"]), f"be {_either(place.kinds)}"
    else:
        must = " or ".join(detail["msg"].partition(" should ")[2] or detail["msg"] for detail in details)
    known = re.findall("'(.*?)'", must) or place.kinds
    close = [word for word in known if value == "".join(part[0] for part in re.findall(r"\w+", word))]
    close = close or difflib.get_close_matches(value, known, 1)
    for words, for_people in _FOR_PEOPLE.items():
        must = must.replace(words, for_people)
    if key == "target" and isinstance(number := details[0]["input"], int | float) and 1 < number <= 100:
        must += f": write {number / 100:g}"
    return f"{key} is {value or 'empty'}, but must {must}{f'; did you mean {close[0]}?' if close else ''}"


def _in_its_words(message: str, place: _Place) -> str:
    """A validator's own sentence, with the whole dotted key in front unless it is there already."""
    key, path = place.key, place.path
    if not path or message.startswith((f"{key}.", f"{key} ", f"{key}=", f"{path[0]}.")):
        return message
    name = str(path[-1])
    return f"{key}{message[len(name) :]}" if message.startswith((f"{name} ", f"{name}=")) else f"{key}: {message}"


def _unknown(place: _Place, value: Any, model: type[BaseModel]) -> str:
    """Names like the whole path that was set are proposed, or else all keys of its level."""
    name, parents, rest = str(place.path[-1]), place.path[:-1], ""
    while isinstance(value, dict) and len(value) == 1:  # `mix: {mixup: 0.2}` is the path mix.mixup
        ((part, value),) = value.items()
        rest += f".{part}"
    key = dotted([*parents, f"{name}{rest}"])
    keys, siblings = list(dict.fromkeys(name for name, _, _ in fields_of(model))), list(place.section.model_fields)
    owner = f"{dotted(parents)} with name {place.kind}" if place.kind else dotted(parents) or "a recipe"
    matches = [dotted([*parents, match]) for match in difflib.get_close_matches(name, siblings, 1, cutoff=0.7)]
    paths = [f"{match}{rest}" for match in matches if f"{match}{rest}" in keys]
    paths = paths or [other for other in keys if f".{other}".endswith(f".{name}{rest}") and other != key][:3]
    if not paths and not matches and key in keys:
        return f"{key} would be ignored: {owner} has only {', '.join(siblings)}"
    if not paths and not parents and (rest or not matches):  # in a section, keys are alike by its name alone
        paths = difflib.get_close_matches(key, keys, 1, cutoff=0.7)
    matches = paths or matches
    return f"{key} is unknown: " + (
        f"did you mean {_either(matches)}?" if matches else f"{owner} has {', '.join(siblings)}"
    )


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types that an annotation allows, without `Annotated` and unions."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _leaves(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _leaves(part)
    else:
        yield annotation


def _kinds(annotation: Any) -> list[type[BaseModel]]:
    """The section classes that an annotation allows: several where a section has kinds."""
    return [leaf for leaf in _leaves(annotation) if isinstance(leaf, type) and issubclass(leaf, BaseModel)]


def _name(section: type[BaseModel]) -> str:
    """The name of one kind of a section."""
    return str(get_args(section.model_fields["name"].annotation)[0])


def _type(leaf: Any) -> str:
    """What it accepts, in words: a type, or the values of a Literal."""
    if get_origin(leaf) is Literal:
        return " | ".join(map(show, get_args(leaf)))
    if get_origin(leaf) in (tuple, list):
        parts = [inner for part in get_args(leaf) if part is not ... for inner in _leaves(part)]
        return f"list of {' | '.join(dict.fromkeys(map(_type, parts)))}"
    kind = get_origin(leaf) or leaf
    words = {types.NoneType: "null", str: "text", Plan: "text", dict: "mapping"}
    return words.get(kind, str(kind.__name__).lower())
