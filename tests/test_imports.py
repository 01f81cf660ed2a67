"""Who imports whom: no circles of modules or rooms; every folder only from those above it in docs/architecture.md."""

import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from folders import PACKAGE, PICTURE, Imports, imports, listed_folders, module_name, picture  # noqa: E402

SOURCE = ROOT / "src"


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of a circle; none where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def rooms(modules: Imports, folder: str) -> dict[str, set[str]]:
    """Which of the folders in a folder import from which others of these."""
    folders = {name.rpartition(".")[0] for name in modules}

    def room(module: str) -> str | None:
        name = module.removeprefix(f"{folder}.").partition(".")[0]
        return name if module.startswith(f"{folder}.") and f"{folder}.{name}" in folders else None

    graph: dict[str, set[str]] = {}
    for name, others in modules.items():
        here = room(name)
        if here is not None:
            graph.setdefault(here, set()).update({room(other) or here for other in others} - {here})
    return graph


def upwards(modules: Imports, order: list[str]) -> list[str]:
    """Imports from a folder that stands below, or from one that does not stand there."""
    wrong = []
    for name, others in modules.items():
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
        assert circle(rooms(all_imports, module_name(folder.relative_to(SOURCE)))) == []
    order = list(listed_folders((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    assert sorted(order) == sorted(path.parent.name for path in (SOURCE / PACKAGE).glob("*/__init__.py"))
    assert upwards(all_imports, order) == []


def test_the_picture_of_the_folders_is_of_now() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "python docs/folders.py draws it anew"


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
