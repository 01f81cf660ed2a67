"""What all pages share: templates that escape what they are given, and scripts that the page vouches for."""

import base64
import hashlib
import re

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from convoy.experiments import formats
from convoy.printable import printable

_FILTERS = ("count", "decimal", "significant", "percent", "duration", "value", "plural", "shorten")
_OPTION = re.compile(r"(?<![\w-])--[a-z]\w*(?:-\w+)*")


def render(template: str, styles: tuple[str, ...], script: str, **content: object) -> str:
    """A page as HTML.

    Args:
        template: its name under `templates/`.
        styles: names of the style sheets, which are put into the page one after the other.
        script: name of the script.
        content: what the template asks for.
    """
    environment = Environment(
        loader=PackageLoader("convoy.experiments", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    for name in _FILTERS:
        environment.filters[name] = getattr(formats, name)
    environment.filters["running"] = running
    loader = environment.loader
    assert loader is not None
    style = "\n".join(loader.get_source(environment, name)[0] for name in styles)
    code = loader.get_source(environment, script)[0]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return environment.get_template(template).render(
        content, style=Markup(style), script=Markup(code), script_hash=f"sha256-{digest}"
    )


def running(text: str) -> Markup:
    """A sentence whose options, as `--resume`, stay in one line."""
    found, end = Markup(""), 0
    shown = printable(text, keep="\n\t")
    for option in _OPTION.finditer(shown):
        found += shown[end : option.start()] + Markup('<span class="nowrap">{}</span>').format(option[0])
        end = option.end()
    return found + shown[end:]


def _shown(value: object) -> object:
    """Text of others without characters that turn its line around; markup is of our own making."""
    return printable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value
