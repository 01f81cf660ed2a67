"""Texts that launchers fill in: a job's script, a manifest."""

from collections.abc import Callable
from typing import Any


def rendered(file: str, quoted: Callable[[Any], str], /, **values: Any) -> str:
    """A template of this folder with these values, which pass through its filter `quoted` where they are a user's."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # not where a rank finds its place

    templates = Environment(
        loader=PackageLoader(__name__, ""), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    templates.filters["quoted"] = quoted
    return templates.get_template(file).render(values)
