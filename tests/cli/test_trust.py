"""A run directory of somebody else's is data: what it names runs only where the user says so."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.calls import Call
from convoy import load_run
from convoy.cli import main
from convoy.errors import ConvoyError

STRANGE = """
from pathlib import Path
from tiny import TinyNet
Path(__file__).with_name("ran").touch()
Net = TinyNet
"""
VERBS = {
    "predict": "predict RUN PICTURE",
    "eval": "eval RUN",
    "export": "export RUN --torch-export",
    "resume": "train RUN --resume --epochs 2ep",
    "extend": "train RUN --extend 1ep --out NEW",
    "recipe": "train --recipe RUN/config.yaml --out NEW",
    "doctor": "doctor --no-trials --seconds 1 RUN",
    "plan": "plan --recipe RUN/config.yaml --score sample=2",
}


@pytest.fixture
def stranger(pictures_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose network lies in a module of elsewhere, which notes that it ran."""
    run = shutil.copytree(pictures_run, tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("tiny:TinyNet", "convoy_strange:Net"))
    (tmp_path / "convoy_strange.py").write_text(STRANGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield run
    sys.modules.pop("convoy_strange", None)


def words(line: str, run: Path, picture: Path) -> list[str]:
    line = line.replace("RUN", str(run)).replace("NEW", str(run.parent / "new"))
    return line.replace("PICTURE", str(picture)).split()


def test_a_network_of_elsewhere_needs_a_word(stranger: Path, pictures_run: Path, call: Call) -> None:
    ran, files = stranger.parent / "ran", sorted(stranger.rglob("*"))
    picture = pictures_run.parent / "data" / "val" / "a" / "0.png"
    for line in VERBS.values():
        sentence = call(words(line, stranger, picture), status=2).err.splitlines()[-1]
        assert f"convoy: {stranger / 'config.yaml'} names convoy_strange:Net as its network" in sentence, line
        assert "give --trust-code" in sentence, line
        assert not ran.exists() and sorted(stranger.rglob("*")) == files, line
    with pytest.raises(ConvoyError, match="trust_code=True"):
        load_run(stranger)
    call(["report", str(stranger)])
    assert not ran.exists(), "a report runs nothing"


@pytest.mark.parametrize("verb", ["predict", "recipe"])
def test_with_the_word_it_runs(verb: str, stranger: Path, pictures_run: Path) -> None:
    picture = pictures_run.parent / "data" / "val" / "a" / "0.png"
    main([*words(VERBS[verb], stranger, picture), "--trust-code"])
    assert (stranger.parent / "ran").exists()
    if verb == "predict":
        assert load_run(stranger, trust_code=True).classes == ["a", "b", "c"]
