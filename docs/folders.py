"""Draws who imports whom, for docs/architecture.md:  python docs/folders.py

The folders stand in the page's order. An arc leads up from a folder to one that it imports: dark, or faint where what
is imported is reached through another folder as well.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
PICTURE = DOCS / "pictures" / "folders.svg"
PACKAGE = "convoy"

Imports = dict[str, set[str]]
"""The modules that each module imports, those within functions too."""

ROW, ARCS, WIDTH = 28, 180, 820
STYLE = """
  text { fill: #1c2733; font: 14px system-ui, sans-serif; }
  .folder { font-weight: 600; }
  path { fill: none; stroke: #3f6f9f; stroke-width: 1.6; }
  .reached { stroke: #b9c8d6; stroke-width: 1; }
  circle { fill: #3f6f9f; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4ebf2; }
    path { stroke: #8fbbe4; }
    .reached { stroke: #43525f; }
    circle { fill: #8fbbe4; }
  }"""


def imports(source: Path) -> Imports:
    """Of every module below a folder."""
    paths = {module_name(path.relative_to(source)): path for path in source.rglob("*.py")}
    return {name: set(_imported(name, path, paths)) - {name} for name, path in paths.items()}


def module_name(path: Path) -> str:
    """The dotted name of a file."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} imports by a relative name"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if module in modules or node.module in modules:
                    yield module if module in modules else node.module


def listed_folders(page: str) -> dict[str, str]:
    """The folders, from top to bottom, of the list in docs/architecture.md, each with what is in it."""
    lines = page.partition("src/convoy/\n")[2].partition("\nbenchmarks/")[0]
    return dict(re.findall(r"^  (\w+)/ +(.*)$", lines, re.MULTILINE))


def folder_imports(modules: Imports, folders: Iterable[str]) -> dict[str, set[str]]:
    """The others of these folders that each of them imports."""
    imported: dict[str, set[str]] = {folder: set() for folder in folders}
    for module, targets in modules.items():
        importer, *names = ((*name.split("."), "")[1] for name in (module, *targets))
        if importer in imported:
            imported[importer] |= (imported.keys() & names) - {importer}
    return imported


def svg(folders: Mapping[str, str], imported: Mapping[str, set[str]]) -> str:
    """The picture."""
    y = {folder: ROW // 2 + row * ROW for row, folder in enumerate(folders)}
    arcs = []
    for folder, targets in imported.items():
        for target in targets:
            reach = 16 + (ARCS - 24) * (y[folder] - y[target]) / (ROW * (len(y) - 1))
            bend = f"C{ARCS - reach * 4 / 3:.0f} {y[folder]} {ARCS - reach * 4 / 3:.0f} {y[target]} {ARCS} {y[target]}"
            name = "reached" if any(target in imported[other] for other in targets) else "direct"
            arcs.append((name == "direct", f'<path class="{name}" d="M{ARCS} {y[folder]} {bend}"/>'))
    drawing = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW * len(y)}" width="{WIDTH}">']
    drawing += ["<title>Which folder imports which</title>", f"<style>{STYLE}\n</style>"]
    drawing += [arc for _, arc in sorted(arcs)]  # the faint ones below
    for folder, content in folders.items():
        drawing.append(f'<circle cx="{ARCS}" cy="{y[folder]}" r="3.5"/>')
        drawing.append(f'<text class="folder" x="{ARCS + 14}" y="{y[folder] + 5}">{folder}</text>')
        drawing.append(f'<text x="{ARCS + 108}" y="{y[folder] + 5}">{escape(re.split("[:;]", content)[0])}</text>')
    return "\n".join((*drawing, "</svg>", ""))


def picture() -> str:
    """The picture of src/convoy as it is now."""
    folders = listed_folders((DOCS / "architecture.md").read_text(encoding="utf-8"))
    return svg(folders, folder_imports(imports(DOCS.parent / "src"), folders))


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
