"""Code of the user's by its name: `mine.py:focal`, what a file defines, or `package.module:focal`, of the current
folder or an installed package.
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from convoy.errors import ConvoyError, reason
from convoy.failure import INSTALLED
from convoy.files import expanded
from convoy.terminal import brief, did_you_mean

RUN = "config.yaml"  # makes a folder a run directory


def check_name(name: str, what: str) -> None:
    """Refuse a name that names nothing, as far as that is seen without running the code; `what` it is to be."""
    origin, colon, member = name.partition(":")
    words = f"{what} {brief(name)!r}"
    if not colon or not all(part.isidentifier() for part in member.split(".")):
        raise ConvoyError(f"{words} names no function: write mine.py:{what}, or package.module:{what}")
    if origin.endswith(".py"):
        if not expanded(origin).is_file():
            raise ConvoyError(f"{words}: there is no file {brief(origin)}: check the path")
    elif not all(part.isidentifier() for part in origin.split(".")):
        raise ConvoyError(f"{words} names no module: write mine.py:{what}, or package.module:{what}")
    elif not is_installed(top := origin.partition(".")[0]):
        raise ConvoyError(
            f"{brief(name)}: there is no module {brief(top)!r} in {Path.cwd()} or among the installed packages"
        )


def is_installed(module: str) -> bool:
    """Whether a package or module can be imported from here."""
    if module in sys.modules or importlib.util.find_spec(module) is not None:
        return True
    return importlib.machinery.PathFinder.find_spec(module, [str(Path.cwd())]) is not None


def absolute(name: str) -> str:
    """The same name, wherever a process is."""
    origin, _, member = name.partition(":")
    return f"{expanded(origin).resolve()}:{member}" if origin.endswith(".py") else name


def function_of(name: str, what: str = "a function") -> Callable[..., Any]:
    """The function or class of that name; a ConvoyError where there is none, or its file cannot be run."""
    module, _, path = name.partition(":")
    member: Any = _imported(name, module)
    for part in path.split("."):
        if not hasattr(member, part):
            near = did_you_mean(part, [name for name in dir(member) if not name.startswith("_")])
            raise ConvoyError(f"{name}: {module} has no {part!r}{near}")
        member = getattr(member, part)
    if not callable(member):
        raise ConvoyError(f"{name} is of type {type(member).__name__}: name {what}")
    function: Callable[..., Any] = member
    return function


def checksum(name: str) -> str:
    """Of the file that a function comes from; empty where that is not known."""
    with suppress(OSError, AttributeError, TypeError):
        file = inspect.getsourcefile(inspect.unwrap(function_of(name)))
        return hashlib.sha256(Path(file or "").read_bytes()).hexdigest()
    return ""


def check_own(name: str, file: Path, what: str = "function") -> None:
    """Refuse code that the file of a run or recipe names, as its `what`, where running it would run what is not the
    user's own: below the current folder, but in no installed package, as some have functions that run what they are
    given. A network may also be one of Convoy's, timm's or torchvision's."""
    _add_current_folder()
    origin, colon, _ = name.partition(":")
    if what == "network" and (not colon or origin in ("timm", "torchvision")):
        return
    is_file = origin.endswith(".py")
    for module in [origin] if is_file else accumulate(origin.split("."), "{}.{}".format):  # importing runs these
        spec = None
        if is_file:
            path = expanded(origin)
            spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
        else:
            with suppress(ModuleNotFoundError, ValueError):
                spec = importlib.util.find_spec(module)
        runs_nothing = spec is None or (spec.origin is None and spec.submodule_search_locations is not None)
        if spec is not None and not runs_nothing and not (spec.has_location and _is_own(spec.origin, file)):
            break
        _imported(name, module)
    else:
        member = function_of(name)
        while isinstance(member, partial):
            member = member.func
        maker = member if inspect.isroutine(member) or inspect.isclass(member) else type(member)
        if _is_own(getattr(sys.modules.get(maker.__module__), "__file__", None), file):
            return
    raise ConvoyError(
        f"{file} names {name} as its {what}, which is code from outside of the current folder: see what that does "
        "with the options there, then give --trust-code (in Python trust_code=True)"
    )


def _is_own(code: str | None, file: Path) -> bool:
    """Whether a module's file lies below the current folder, neither installed nor brought by the run or recipe, as is
    what lies in the same folder below the current one."""
    if code is None:
        return False
    cwd, path, folder = (location.resolve() for location in (Path.cwd(), Path(code), file.parent))
    installed = str(path).startswith(INSTALLED) or code.startswith(INSTALLED)
    if installed or not path.is_relative_to(cwd) or (file.name == RUN and cwd.is_relative_to(folder)):
        return False
    for parent in path.parents[: len(path.parts) - len(cwd.parts)]:
        if parent.name in ("site-packages", "dist-packages") or any(parent.glob("*.dist-info")):
            return False
    top = folder.relative_to(cwd).parts[:1] if folder.is_relative_to(cwd) else ()
    return not top or not path.is_relative_to(cwd / top[0])


def _add_current_folder() -> None:
    cwd = str(Path.cwd())
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    importlib.invalidate_caches()


def _imported(name: str, module: str) -> ModuleType:
    _add_current_folder()
    try:
        return _of_file(expanded(module).resolve()) if module.endswith(".py") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise ConvoyError(
                f"{name}: there is no module {error.name!r} in {Path.cwd()} or among the installed packages"
            ) from error
        raise ConvoyError(f"{name}: {module} needs the module {error.name!r}, which is not installed") from error
    except FileNotFoundError as error:
        raise ConvoyError(f"{name}: there is no file {module}: check the path") from error
    except Exception as error:
        raise ConvoyError(f"{name}: importing {module} failed with {reason(error)}") from error


def _of_file(path: Path) -> ModuleType:
    """The module of a file, under the name that `import` gives it where no other has that; beside its neighbors."""
    known = sys.modules.get(path.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path:
        return known
    name = path.stem if known is None else f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
