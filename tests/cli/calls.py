"""Lines of the command line in this process, and what each says."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UPDATES = "60ba"
"""How long the run `serial` is, so that ranks of the same run can be killed on the way."""


@dataclass(frozen=True)
class Output:
    """The exit status of a line, and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output, read as JSON."""
        return json.loads(self.out)


Call = Callable[..., Output]
"""Runs `convoy LINE`, a text or its words, and checks its status: 0, or `status=`; None for any."""
