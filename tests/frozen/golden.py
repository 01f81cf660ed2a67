"""Golden values: what was so when somebody looked at it last, for tests to put beside what is so now. See README.md."""

import json
import math
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RENEWING = os.environ.get("CONVOY_RENEW") == "1"


def golden(file: str, key: str, now: Any) -> Any:
    """The value under a key of a file; with CONVOY_RENEW=1 the file takes over the value of now."""
    path = FOLDER / file
    if RENEWING:
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        text = json.dumps({**stored, key: now}, indent=1, ensure_ascii=False, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))[key]


def unlike(now: Any, stored: Any, tolerance: float = 1e-9, where: str = "") -> list[str]:
    """The places at which two documents differ, numbers by more than the tolerance times their size."""
    if isinstance(now, dict) and isinstance(stored, dict) and now.keys() == stored.keys():
        return [line for key in now for line in unlike(now[key], stored[key], tolerance, f"{where}.{key}")]
    if isinstance(now, list) and isinstance(stored, list) and len(now) == len(stored):
        return [line for at in range(len(now)) for line in unlike(now[at], stored[at], tolerance, f"{where}[{at}]")]
    if isinstance(now, float | int) and isinstance(stored, float | int):
        same = math.isclose(now, stored, rel_tol=tolerance)
    else:
        same = now == stored
    return [] if same else [f"{where}: was {stored!r}, is {now!r}"]
