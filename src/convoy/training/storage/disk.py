"""What is wrong with a disk, in one sentence."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convoy.errors import ConvoyError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def disk_explained(folder: Path) -> Iterator[None]:
    """Say in one sentence what is wrong with the disk that `folder` is on.

    Raises:
        ConvoyError: a file in it could not be written, or some disk is full.
    """
    try:
        yield
    except OSError as error:
        name = Path(str(error.filename)) if error.filename is not None else None
        if error.errno not in _FULL and (name is None or not name.is_relative_to(folder)):
            raise
        raise ConvoyError(
            f"cannot write to {name.parent if name else folder} ({error.strerror}): free what is in its way, "
            "then go on with --resume"
        ) from error
