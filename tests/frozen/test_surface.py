"""What users see: the help of every verb, the names and signatures of the interface, and what is refused."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import convoy
from convoy.cli import main
from frozen.golden import FOLDER, RENEWING
from frozen.runs import write_data
from frozen.test_stored_run import AT_THE_END, extract, remove

REFUSED = [line for line in (FOLDER / "refused.txt").read_text("utf-8").splitlines() if line and line[0] != "#"]


def same_text(file: str, now: str) -> None:
    if RENEWING:
        (FOLDER / file).write_text(now, encoding="utf-8")
    assert now == (FOLDER / file).read_text(encoding="utf-8"), f"tests/frozen/README.md says when to renew {file}"


def pages(capsys: pytest.CaptureFixture[str], *verb: str) -> Iterator[str]:
    """The help of a verb, and of those below it."""
    assert main([*verb, "--help"]) == 0
    page = capsys.readouterr().out
    yield f"$ convoy {' '.join([*verb, '--help'])}\n{page}"
    for name in re.findall(r"^  (\S+)", page.partition("\nVerbs:\n")[2].partition("\n\n")[0], re.MULTILINE):
        yield from pages(capsys, *verb, name)


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    same_text("help.txt", "\n".join(pages(capsys)))


def signatures(name: str, value: object) -> Iterator[str]:
    """Of a function, or of a class and all that it shows: names, kinds and defaults of the parameters."""
    shown: object = ""
    if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception)):
        whole = inspect.signature(value)
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in whole.parameters.values()]
        shown = whole.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    yield re.sub(r"<(?:function|class) '?([\w.]+)[^>]*>", r"\1", f"{name}{shown}")
    for key in sorted(vars(value)) if inspect.isclass(value) else ():
        member = inspect.getattr_static(value, key)
        if not key.startswith("_"):
            member = getattr(value, key) if isinstance(member, staticmethod | classmethod) else member
            yield from signatures(f"{name}.{key}", member)


def test_interface() -> None:
    names = [*convoy.__all__, "print"]
    lines = [line for name in names for line in signatures(name, getattr(convoy, name))]
    same_text("interface.txt", "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    data = write_data(folder / "data") / "28"
    run, killed = extract(folder / "whole"), extract(folder / "killed")
    remove(killed, *AT_THE_END)
    (folder / "tmp").mkdir()
    (folder / "tmp.yaml").write_text("mesh: {a: 2}\nlayers: {feature.*: {a: filter}}\n")
    return {"tmp": folder / "tmp", "data": data, "run": run, "killed": killed}


@pytest.mark.parametrize("line", REFUSED)
def test_refused(line: str, places: dict[str, Path], tmp_path, monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    status, name, command = line.split(maxsplit=2)
    monkeypatch.chdir(tmp_path)
    assert main(command.format(**places).split()) == int(status)
    sentence = capfd.readouterr().err
    assert sentence.startswith("convoy: ") and sentence.count("\n") == 1 and name in sentence
    assert not list(tmp_path.iterdir()), "something was left behind"
