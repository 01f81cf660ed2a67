"""torch.compile, whose compiled code nobody else can have put there."""

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convoy.errors import ConvoyError


def compile_function(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """What `torch.compile` makes of a function; a ConvoyError where somebody else has made the folder of its code."""
    import torch
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch runs what it finds there, and takes the folder as it is, whoever made it first: its name, torchinductor_USER
    # in the temporary directory, can be foretold. TORCHINDUCTOR_CACHE_DIR moves all but the headers (torch 2.13).
    folder = Path(default_cache_dir())
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConvoyError(f"{folder}, with code for torch's compiler, is somebody else's: set TMPDIR to one of yours")
    folder.chmod(status.st_mode & 0o755)
    return torch.compile(function, **options)
