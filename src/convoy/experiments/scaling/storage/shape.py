"""What a report needs of the document of a study, which may have been written by others, or by hand."""

from collections.abc import Mapping
from typing import Any

_RECIPE = dict.fromkeys(("batch", "microbatch", "microbatches", "reproducible"))
_STUDY = dict.fromkeys(
    ("model", "images", "weak", "batch", "device_type", "cores_per_device", "cluster", "updates", "warm_up")
)
_RANK = dict.fromkeys(("seconds", "communication", "input", "optimizer", "memory", "overhead"))
_ROW = dict.fromkeys(("key", "label", "kind", "devices", "plan", "series", "failed"))
_DOCUMENT: dict[str, Any] = {
    "study": {**_STUDY, "recipe": {**_RECIPE, "data": {}, "parallel": {}}},
    "machine": dict.fromkeys(("machine", "cores", "torch")),
    "table": dict.fromkeys(("epochs", "dataset_size")),
    "sessions": [dict.fromkeys(("command", "started", "wall_s", "planning_s"))],
    "forecasts": {},
    "configurations": [{**_ROW, "visits": [{"round": None, "loss": None, "ranks": [_RANK]}]}],
}
"""Keys of mappings, parts of lists; None where anything may be."""
_NOTHING = object()


def lacking_in(document: Mapping[str, Any]) -> str | None:
    """The first thing that a document does not have, as in `sessions[0].wall_s`; None where it has all."""
    return _lacking(document, _DOCUMENT, "")


def _lacking(found: Any, shape: Any, name: str) -> str | None:
    if shape is None:
        return None
    if not isinstance(found, type(shape)):
        return name
    if isinstance(shape, list):
        parts = [(one, shape[0], f"{name}[{place}]") for place, one in enumerate(found)]
    else:
        parts = [(found.get(key, _NOTHING), part, f"{name}.{key}".lstrip(".")) for key, part in shape.items()]
    for one, part, where in parts:
        lacking = where if one is _NOTHING else _lacking(one, part, where)
        if lacking is not None:
            return lacking
    return None
