"""What is installed: the versions that are pinned are those that the package asks for."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"


def pinned(path: Path) -> dict[str, str]:
    pins = re.findall(r"^([\w.-]+)==([^\s\\]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in pins}


@pytest.mark.parametrize("extra", ["", "demo"])
def test_the_container_gets_what_the_tests_ran_with(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    constraints, lock = pinned(ROOT / "constraints.txt"), pinned(LOCK)
    for requirement in map(Requirement, wanted):
        name = requirement.name.lower().replace("_", "-")
        assert lock[name] == constraints[name]
        assert requirement.specifier.contains(lock[name])


def test_every_package_of_the_container_has_a_checksum() -> None:
    blocks = re.split(r"^(?=[\w.-]+==)", LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(blocks) > 40
    assert all("--hash=sha256:" in block for block in blocks)
