"""Late imports: torch takes seconds, for which no `--help` and no misspelt option is to wait."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package, which imports its public names when they are first used.

    `names` are by module below the package, with spaces between them. No module may have the name itself: once it is
    imported it would stand there.
    """
    modules = {name: module for module, line in names.items() for name in line.split()}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
