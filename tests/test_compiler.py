"""Compiled code comes from a folder that nobody else can have filled."""

import tempfile
from pathlib import Path

import pytest
import torch

from convoy.compiler import compile_function
from convoy.errors import ConvoyError


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_nobody_elses_folder_is_compiled_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(default_cache_dir())
    assert folder.parent == tmp_path
    compile_function(torch.neg)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    compile_function(torch.neg)
    assert folder.stat().st_mode & 0o777 == 0o755
    folder.rename(tmp_path / "of somebody else")
    folder.symlink_to(tmp_path / "of somebody else")
    with pytest.raises(ConvoyError, match="with code for torch's compiler, is somebody else's: set TMPDIR"):
        compile_function(torch.neg)
