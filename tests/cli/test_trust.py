"""A run directory of somebody else's is data: what it names runs only where the user says so."""

import sys
from pathlib import Path

import pytest

from convoy import load_run
from convoy.cli import main
from convoy.errors import ConvoyError
from tiny import train_on_pictures, write_pictures

STRANGE = """
from pathlib import Path
from tiny import TinyNet
Path(__file__).with_name("ran").touch()
Net = TinyNet
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("trust")
    return train_on_pictures(write_pictures(tmp / "data"), tmp / "run", "--set", "checkpoint.every=2ba")


VERBS = {
    "predict": "predict RUN PICTURE",
    "eval": "eval RUN",
    "eval of a checkpoint": "eval RUN --checkpoint last",
    "export": "export RUN --torch-export",
    "resume": "train RUN --resume --epochs 2ep",
    "resume by out": "train --resume --out RUN",
    "extend": "train RUN --extend 1ep --out RUN-longer",
    "recipe": "train --recipe RUN/config.yaml --out RUN-again",
    "a key beside the name": "train --recipe RUN/config.yaml --set model.options={} --out RUN-again",
    "doctor": "doctor --no-trials --seconds 1 RUN",
    "plan": "plan --recipe RUN/config.yaml --score sample=2",
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_network_of_elsewhere_needs_a_word(
    trained: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "convoy_strange.py").write_text(STRANGE)
    config, ran = trained / "config.yaml", tmp_path / "ran"
    before = config.read_text()
    config.write_text(before.replace("tiny:TinyNet", "convoy_strange:Net"))
    monkeypatch.syspath_prepend(str(tmp_path))
    picture = str(trained.parent / "data" / "val" / "a" / "0.png")
    words = VERBS[verb].replace("RUN-", f"{tmp_path}/").replace("RUN", str(trained)).replace("PICTURE", picture).split()
    files = sorted(trained.rglob("*"))
    try:
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"convoy: {config} names convoy_strange:Net as its network" in said.splitlines()[-1]
        assert "give --trust-code" in said
        assert not ran.exists() and sorted(trained.rglob("*")) == files
        if verb in ("predict", "recipe"):  # the negative control
            main([*words, "--trust-code"])
            assert ran.exists()
        if verb == "predict":
            with pytest.raises(ConvoyError, match="trust_code=True"):
                load_run(trained)
            assert load_run(trained, trust_code=True).classes == ["a", "b", "c"]
            sys.modules.pop("convoy_strange")
            ran.unlink()
            assert main(["report", str(trained)]) == 0
            assert not ran.exists(), "a report runs nothing"
    finally:
        config.write_text(before)
        sys.modules.pop("convoy_strange", None)
