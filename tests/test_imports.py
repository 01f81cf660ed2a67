"""Who imports whom: no circles of modules or rooms; every folder only from those above it in docs/architecture.md."""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = "convoy"

Imports = dict[str, set[str]]
"""The modules that each module imports, those within functions too."""


def imports(source: Path) -> Imports:
    paths = {_name(path.relative_to(source)): path for path in source.rglob("*.py")}
    return {name: set(_imported(name, path, paths)) - {name} for name, path in paths.items()}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} imports by a relative name"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if module in known or node.module in known:
                    yield module if module in known else node.module


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of a circle; none where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def rooms(found: Imports, folder: str) -> dict[str, set[str]]:
    """Which of the folders in a folder import from which others of these."""
    folders = {name.rpartition(".")[0] for name in found}

    def room(module: str) -> str | None:
        name = module.removeprefix(f"{folder}.").partition(".")[0]
        return name if module.startswith(f"{folder}.") and f"{folder}.{name}" in folders else None

    graph: dict[str, set[str]] = {}
    for name, others in found.items():
        here = room(name)
        if here is not None:
            graph.setdefault(here, set()).update({room(other) or here for other in others} - {here})
    return graph


def house(page: str) -> list[str]:
    """The folders, from top to bottom, of the list in docs/architecture.md."""
    listed = page.partition("src/convoy/\n")[2].partition("\nbenchmarks/")[0]
    return re.findall(r"^  (\w+)/", listed, re.MULTILINE)


def upwards(found: Imports, order: list[str]) -> list[str]:
    """Imports from a folder that stands below, or from one that does not stand there."""
    wrong = []
    for name, others in found.items():
        for other in others:
            here, there = ((*module.split("."), "")[1] for module in (name, other))
            if here in order and there in order and order.index(there) > order.index(here):
                wrong.append(f"{name} imports {other}")
    return wrong


def test_nothing_imports_in_a_circle_and_folders_only_from_those_above_them() -> None:
    all_imports = imports(SOURCE)
    assert len(all_imports) > 200
    assert circle(all_imports) == []
    folders = [path for path in SOURCE.rglob("*") if (path / "__init__.py").exists() and path.name != PACKAGE]
    for folder in folders:
        assert circle(rooms(all_imports, _name(folder.relative_to(SOURCE)))) == []
    order = house((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert sorted(order) == sorted(path.parent.name for path in (SOURCE / PACKAGE).glob("*/__init__.py"))
    assert upwards(all_imports, order) == []


def write(source: Path, **modules: str) -> Path:
    for name, text in modules.items():
        path = source / PACKAGE / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source


def test_circles_and_imports_from_below_are_found(tmp_path: Path) -> None:
    later = "def read():\n    from convoy.one import document\n"
    graph = imports(write(tmp_path / "a", one__cluster=later, one__document="from convoy.one.cluster import Cluster\n"))
    assert set(circle(graph)) == {"convoy.one.cluster", "convoy.one.document"}
    first = {"one__a__x": "import convoy.one.b.y\n", "one__a__z": ""}
    graph = imports(write(tmp_path / "b", **first, one__b__y="", one__b__w="from convoy.one.a import z\n"))
    assert circle(graph) == [] and set(circle(rooms(graph, "convoy.one"))) == {"a", "b"}
    graph = imports(write(tmp_path / "c", one__x="def go():\n    from convoy.two.y import z\n", two__y="z = 1\n"))
    assert upwards(graph, ["one", "two"]) == ["convoy.one.x imports convoy.two.y"]
    assert upwards(graph, ["two", "one"]) == []
