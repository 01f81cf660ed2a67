"""Networks that fail on one rank, for tests of what the others do."""

import os
import time
from typing import Self

from convoy.errors import ConvoyError
from tiny import TinyNet


class Failing(TinyNet):
    """Raises on rank 1 before its first training pass."""

    error: Exception = KeyError("the odd key")

    def train(self, mode: bool = True) -> Self:
        if os.environ.get("RANK") == "1":
            time.sleep(1)  # the others wait for it by now
            raise self.error
        return super().train(mode)


class Mistaken(Failing):
    """Raises a mistake of the user there."""

    error = ConvoyError("rank 1 finds the data wanting: mend it")
