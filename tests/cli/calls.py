"""Lines of the command line in this process: what each says, and which are not refused as they should be."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UPDATES = "60ba"
"""How long the run `serial` is, so that ranks of the same run can be killed on the way."""
PROGRESS = ("profiling", "measuring", "searching", "3 devices share", "64 devices share")


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


def faults(call: Call, table: Mapping[str, str], **places: object) -> list[str]:
    """What is wrong with the refusal of each line: status 2, one sentence with these words, and nothing left behind in
    this folder."""
    problems = []
    for line, words in table.items():
        before = sorted(Path.cwd().rglob("*"))
        output = call([word.format(**places) for word in shlex.split(line)], status=None)
        sentence = [each for each in output.err.splitlines() if not each.startswith(PROGRESS)]
        is_one = output.status == 2 and len(sentence) == 1 and sentence[0].startswith("convoy: ")
        if not is_one or words.format(**places) not in sentence[0]:
            problems.append(f"{line}: {words!r} is not what {output} says")
        problems += [f"{line} leaves {path}" for path in sorted(Path.cwd().rglob("*")) if path not in before]
    return problems
