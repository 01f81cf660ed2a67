"""Says in one sentence what is wrong with a recipe: the dotted key, the problem, and what is accepted."""

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from convoy.documents import dotted, show

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
    """A key for people."""

    key: str  # dotted, with the kind of its section where that has several
    type: str  # of its values, or these themselves where there are few
    default: str  # as YAML writes it; empty where a value is needed
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
        classes = section_classes(model.model_fields[str(key)].annotation)
        name = dig(document, [*path[:depth], "name"])
        named = (kind for kind in classes if len(classes) > 1 and name in choices(kind.model_fields["name"].annotation))
        model = next(named, classes[0])
    return model


def dig(document: Any, path: Path) -> Any:
    """The value at `path`, or None."""
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text; put it in quotes if it looks like a number",
    "tuple_type": "a list in square brackets",
    "list_type": "a list in square brackets",
    "dict_type": "a section with keys of its own",
    "model_type": "a section with keys of its own",
    "model_attributes_type": "a section with keys of its own",
    "finite_number": "a finite number",
}
_COMPARISONS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def sentence(error: ValidationError, model: type[BaseModel], document: dict[str, Any]) -> str:
    """One sentence about the first mistake in a document, with the keys of the others."""
    # A default that follows from other keys is no mistake of its own where those are wrong.
    found = [detail for detail in error.errors(include_url=False) if detail["type"] != "default_factory_not_called"]
    details = sorted(found, key=lambda detail: detail["type"] != "extra_forbidden")
    paths = [_path(detail["loc"], model, document) for detail in details]
    first = _explain(details[0], paths[0], model, document)
    more_keys = sorted({dotted(path) for path in paths if path} - {dotted(paths[0])})
    return f"{first} (also wrong: {', '.join(more_keys)})" if more_keys else first


def _explain(detail: ErrorDetails, path: Sequence[str | int], model: type[BaseModel], document: dict[str, Any]) -> str:
    key, value, context = dotted(path), detail["input"], detail.get("ctx", {})
    kind = detail["type"]

    def accepted() -> list[Any]:
        return choices(section_at(model, path[:-1], document).model_fields[str(path[-1])].annotation)

    if kind == "extra_forbidden":
        return _unknown_key(path, model, document)
    if kind == "missing" and isinstance(path[-1], int):
        return f"{dotted(path[:-1])} is {show(dig(document, path[:-1]))}, but must be a longer list"
    if kind == "missing":
        if key in ("model", "model.name"):
            return "model.name is missing: name a network, e.g. `convoy train resnet18`; `convoy models` lists them"
        return f"{key} is missing: write it into the recipe or add --set {key}=VALUE"
    if kind == "value_error":
        return _own_words(str(context["error"]), path)
    if kind == "union_tag_not_found":
        return f"{key}.name is missing: it is one of {', '.join(kinds(model, str(path[0])))}"
    if kind == "union_tag_invalid":
        return _not_one_of(f"{key}.name", context["tag"], kinds(model, str(path[0])))
    if kind in ("literal_error", "enum"):
        return _not_one_of(key, value, accepted())
    if kind in _KINDS:
        also = accepted() if isinstance(path[-1], str) else []
        return f"{key} is {show(value)}, but must be {_either([_KINDS[kind], *also])}"
    if kind in _COMPARISONS:
        bound, words = _COMPARISONS[kind]
        return f"{key} is {show(value)}, but must be {words} {context[bound]:g}"
    if kind == "too_long":
        return f"{key} is {show(value)}, but must be a list of {context['max_length']}"
    if kind == "string_too_short":
        return f"{key} is empty: write a value or leave it out"
    message = detail["msg"]
    return f"{key} is {show(value)}, which is refused: {message[:1].lower()}{message[1:]}"


def _own_words(message: str, path: Sequence[str | int]) -> str:
    """A validator's own sentence, with the whole dotted key in front unless it is there already."""
    key = dotted(path)
    if not path or message.startswith((f"{key}.", f"{key} ", f"{key}=", f"{path[0]}.")):
        return message
    name = str(path[-1])
    if message.startswith((f"{name} ", f"{name}=")):
        return f"{key}{message[len(name) :]}"
    return f"{key}: {message}"


def _not_one_of(key: str, value: Any, choices: Sequence[Any]) -> str:
    words = [show(choice) for choice in choices]
    close = difflib.get_close_matches(show(value), words, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{key} is {show(value)}, but must be {_either(words)}{hint}"


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)


def _unknown_key(path: Sequence[str | int], model: type[BaseModel], document: dict[str, Any]) -> str:
    key, name = dotted(path), str(path[-1])
    section = section_at(model, path[:-1], document)
    siblings = list(section.model_fields)
    where = dotted(path[:-1])
    variant = dig(document, [*path[:-1], "name"]) if where in ("optimizer", "schedule") else None
    owner = f"{where} with name {show(variant)}" if variant else where or "a recipe"
    close = difflib.get_close_matches(name, siblings, 1, cutoff=0.7)
    if close:
        return f"{key} is unknown: did you mean {dotted([*path[:-1], close[0]])}?"
    elsewhere = [
        candidate for candidate in all_keys(model) if candidate.rpartition(".")[2] == name and candidate != key
    ]
    if elsewhere:
        return f"{key} is unknown: did you mean {_either(elsewhere[:3])}?"
    if variant is not None and key in all_keys(model):
        return f"{key} would be ignored: {owner} has only {', '.join(siblings)}"
    close = difflib.get_close_matches(key, list(all_keys(model)), 1, cutoff=0.75)
    hint = f"did you mean {close[0]}?" if close else f"{owner} has {', '.join(siblings)}"
    return f"{key} is unknown: {hint}"


def _path(loc: Sequence[str | int], model: type[BaseModel], document: dict[str, Any]) -> list[str | int]:
    """Pydantic's location without the tags that it puts in for the kinds of a section or of a value."""
    path: list[str | int] = []
    leaves = all_keys(model)
    for index, part in enumerate(loc):
        if dotted(path) in leaves:
            path += [part] if isinstance(part, int) else []
        elif index != 1 or len(section_classes(model.model_fields[str(loc[0])].annotation)) < 2:
            path.append(part)
    return path
