"""Numbers of bytes in the words people use: `8GB`, `512MiB`."""

import re

from convoy.errors import ConvoyError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(b|kb|mb|gb|tb|kib|mib|gib)?", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(text: str, option: str) -> float:
    """A size such as `8GB` or `512MiB` in bytes; a number alone is bytes.

    Raises:
        ConvoyError: it is none, or nothing.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConvoyError(f"{option} {text} is no size: write e.g. 8GB or 512MiB")
    return float(match[1]) * _UNITS[(match[2] or "b").lower()]
