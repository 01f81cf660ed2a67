"""Walks over the classes of a document's sections: which keys there are, and what each accepts."""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from convoy.training.config.overrides import show

Path = Sequence[str | int]


def all_keys(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every dotted key that a document can have, in order, with its annotation."""
    keys: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kinds = section_classes(field.annotation)
        for kind in kinds:
            keys |= all_keys(kind, f"{prefix}{name}.")
        if not kinds:
            keys[f"{prefix}{name}"] = field.annotation
    return keys


@dataclass(frozen=True)
class Key:
    """A key for people.

    Attributes:
        key: dotted, with the kind of its section where that has several.
        type: of the values that it accepts, or these themselves where there are few.
        default: as YAML writes it; empty where a value is needed.
    """

    key: str
    type: str
    default: str
    description: str


def describe_keys(model: type[BaseModel], prefix: str = "", kind: str = "") -> list[Key]:
    """Every key of a document in order, those of each kind of a section after one another."""
    keys: list[Key] = []
    for name, field in model.model_fields.items():
        kinds = section_classes(field.annotation)
        for section in kinds:
            variant = choices(section.model_fields["name"].annotation) if len(kinds) > 1 else []
            keys += describe_keys(section, f"{prefix}{name}.", f" ({variant[0]})" if variant else kind)
        if not kinds:
            default = (
                "" if field.is_required() else show(field.get_default(call_default_factory=True, validated_data={}))
            )
            accepts = " | ".join(dict.fromkeys(_types(field.annotation)))
            keys.append(Key(f"{prefix}{name}{kind}", accepts, default, field.description or ""))
    return keys


def _types(annotation: Any) -> Iterator[str]:
    """What an annotation accepts, in words: types, and the values of Literals."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from map(show, parts)
    elif origin is Annotated:
        yield from _types(parts[0])
    elif _is_union(annotation):
        for part in parts:
            yield from _types(part)
    elif origin in (tuple, list):
        inner = " | ".join(dict.fromkeys(word for part in parts if part is not ... for word in _types(part)))
        yield f"list of {inner}"
    else:
        plain = {types.NoneType: "null", str: "text", dict: "mapping"}
        kind = origin or annotation
        yield plain.get(kind, kind.__name__.lower())


def is_text(annotation: Any) -> bool:
    """Whether a value is free text (or null), so that it needs no reading as YAML."""
    return annotation is str or (_is_union(annotation) and set(get_args(annotation)) == {str, types.NoneType})


def section_classes(annotation: Any) -> list[type[BaseModel]]:
    """The section classes that an annotation allows: several where a section has kinds."""
    if get_origin(annotation) is Annotated:
        return section_classes(get_args(annotation)[0])
    if _is_union(annotation):
        return [model for part in get_args(annotation) for model in section_classes(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def choices(annotation: Any) -> list[Any]:
    """The values of the Literals in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) is Annotated or _is_union(annotation):
        return [value for part in get_args(annotation) for value in choices(part)]
    return []


def kinds(model: type[BaseModel], key: str) -> list[str]:
    """The names of the kinds that the section `key` can have."""
    return [
        choices(kind.model_fields["name"].annotation)[0] for kind in section_classes(model.model_fields[key].annotation)
    ]


def section_at(model: type[BaseModel], path: Path, document: Any) -> type[BaseModel]:
    """The class of the section at `path`: of several kinds the one whose name the document gives."""
    for depth, key in enumerate(path, 1):
        found = section_classes(model.model_fields[str(key)].annotation)
        name = dig(document, [*path[:depth], "name"])
        named = (kind for kind in found if len(found) > 1 and name in choices(kind.model_fields["name"].annotation))
        model = next(named, found[0])
    return model


def annotation_at(model: type[BaseModel], path: Path, document: Any) -> Any:
    """What the key at `path` accepts."""
    return section_at(model, path[:-1], document).model_fields[str(path[-1])].annotation


def dig(document: Any, path: Path) -> Any:
    """The value at `path`, or None."""
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)
