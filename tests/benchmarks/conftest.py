"""The benchmarks are scripts beside the package: let their modules be found."""

import multiprocessing
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["pytest", "numpy", "torch", "torch.distributed", "torch.distributed.nn", "torch.testing", "convoy"]
)
