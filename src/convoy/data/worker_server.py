"""Imported by the process that worker processes are forked from, and by nothing else.

It leaves the terminal's process group, so that Ctrl-C, or a scheduler's signal to the whole group, reaches only the
training process, which finishes its step with the batches that the workers still deliver.
"""

import os
from contextlib import suppress

with suppress(OSError):
    os.setpgid(0, 0)
