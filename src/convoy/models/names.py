"""Help with mistyped names."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str], *, otherwise: str = "check its spelling") -> str:
    """The end of a sentence about an unknown `name`: ": did you mean a, b or c?", or `otherwise` if none is close."""
    by_lower = {known.lower(): known for known in names}
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3)]
    if not close:
        return f": {otherwise}"
    return f": did you mean {' or '.join(filter(None, [', '.join(close[:-1]), close[-1]]))}?"
