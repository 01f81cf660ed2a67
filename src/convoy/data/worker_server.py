"""Imported by the process that worker processes are forked from, and by nothing else.

It leaves the terminal's process group, so that Ctrl-C, or a scheduler's signal to the whole group, reaches only the
training process, which finishes its step with the batches that the workers still deliver. It ends with that process
even where workers are stopped, which end with it: they would keep standard output open for whoever reads that.
"""

import os
from contextlib import suppress

from convoy.launch.rank import end_with_parent

end_with_parent()
with suppress(OSError):
    os.setpgid(0, 0)
