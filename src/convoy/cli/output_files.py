"""Files that an option names: refused early where they could not be written, and written as a whole."""

from pathlib import Path

from convoy.errors import ConvoyError
from convoy.files import unwritable, write_text


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that could not be written, before the work for it is done.

    Raises:
        ConvoyError: it is a folder, or its folder is missing or closed.
    """
    folder = path.parent
    if path.is_dir():
        raise ConvoyError(f"{option} {path} is a folder: name a file in it")
    if not folder.is_dir():
        raise ConvoyError(f"{option} {path} cannot be written: there is no folder {folder}")
    reason = unwritable(folder)
    if reason is not None:
        raise ConvoyError(f"{option} {path} cannot be written ({reason}): choose a folder that is yours to write in")


def written(option: str, path: Path, text: str) -> None:
    """Write a file as a whole or not at all.

    Raises:
        ConvoyError: it cannot be written.
    """
    try:
        write_text(path, text)
    except OSError as error:
        raise ConvoyError(f"{option} {path} cannot be written ({error.strerror}): choose another place") from error
