"""The terminal, to which text of others is written so that it cannot steer it."""

from typing import Any

import rich.console
from rich.text import Text

from convoy.printable import printable


class Console(rich.console.Console):
    """rich's console, which lets through no control characters but its own."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """See base class."""
        return super().render_str(printable(text, keep="\n\t"), **settings)
