"""Reads a YAML file that a person names: a plan, a recipe, a cluster. What is in it is for those who know."""

from pathlib import Path

from convoy.errors import ConvoyError


def read_text(path: Path, what: str, otherwise: str = "") -> str:
    """The text of a YAML file that a person names.

    Args:
        path: the file.
        what: what it should be, for the sentences ("plan").
        otherwise: what may be done where there is none, beside checking the path: ", or ...".

    Raises:
        ConvoyError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConvoyError(f"there is no {what} file {path}: check the path{otherwise}") from error
    except UnicodeDecodeError as error:
        raise ConvoyError(f"{path} is not a text file in UTF-8: a {what} is a YAML file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConvoyError(f"cannot read the {what} file {path} ({reason}): check the path") from error
