"""Networks of the user's own, `package.module:factory`."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.errors import ConvoyError
from convoy.models import accepts, create
from convoy.own import check_own

SOURCE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes=10, in_channels=3, width=4):
        stem, head = nn.Conv2d(in_channels, width, 3), nn.Linear(width, num_classes)
        super().__init__(stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

def fixed():
    return Net(num_classes=5, in_channels=3)

def forwards(num_classes=10, **kwargs):
    return only_classes(num_classes=num_classes, **kwargs)

def passes_on(**kwargs):
    return Net(**kwargs)

def needs_both(num_classes, in_channels, image_size):
    return Net(num_classes, in_channels)

def only_classes(num_classes):
    return Net(num_classes)

class Namespace:
    inner = Net
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module above, importable only because it lies in the current directory."""
    (tmp_path / "convoy_own_nets.py").write_text(SOURCE)
    package = tmp_path / "convoy_own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "small.py").write_text("from convoy_own_nets import Net\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield "convoy_own_nets"
    for name in [name for name in sys.modules if name.startswith("convoy_own_")]:
        del sys.modules[name]


def test_classes_channels_and_options_reach_the_factory_or_must_already_be_so(module: str) -> None:
    net = create(f"{module}:Net", num_classes=7, in_channels=1, width=6)
    assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 7) and net[0].out_channels == 6
    assert create(f"{module}:Net")[3].out_features == 10, "None leaves the factory its own defaults"
    assert create(f"{module}:needs_both")[3].out_features == 1000, "no data say how many: as many as ImageNet has"
    for name in ("convoy_own_package.small:Net", f"{module}:Namespace.inner"):
        assert isinstance(create(name), nn.Module)
    assert create(f"{module}:fixed", num_classes=5, in_channels=3)[3].out_features == 5
    for name in ("forwards", "passes_on"):
        assert create(f"{module}:{name}", num_classes=6, in_channels=3)[3].out_features == 6
    assert accepts(f"{module}:Net", "width") and not accepts(f"{module}:Net", "zero_init_residual")


NETS = "convoy_own_nets"


OWN = """
import functools, os, torch
from torch.hub import load
def net(num_classes): return torch.nn.Linear(1, num_classes)
part = functools.partial(net, 3)
stranger = functools.partial(load, "x")
@functools.cache
def cached(): return net(3)
class Net(torch.nn.Linear): pass
"""


TRUSTED = [
    "lenet",
    *(f"{NETS}:{name}" for name in ("net", "part", "cached", "Net")),
    "convoy_own_package.deep.nets:net",
]
STRANGERS = [
    *(f"{NETS}:{name}" for name in ("load", "stranger", "torch.hub.load", "os.system", "Net.load_state_dict")),
    *("os:system", "builtins:eval", "sympy:sympify", "numpy.f2py.crackfortran:myeval", "convoy.models.lenet:LeNet"),
    *(f"convoy_own_{name}:net" for name in ("linked", "venv", "vendor", "outside")),
    *("archive.nets:net", "archive.run.nets:net"),  # beside the run, in the folder that was unpacked
]


def test_of_names_in_a_runs_file_only_the_users_own_are_trusted(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused leaves no mark, but for the user's own modules, which are imported to see what they name."""
    home, run = tmp_path / "here", tmp_path / "here" / "archive" / "run"
    installed, vendor = home / ".venv" / "lib" / "site-packages", home / "vendor"
    for folder in (home / "convoy_own_package" / "deep", run, installed, vendor / "x.dist-info", tmp_path / "outside"):
        folder.mkdir(parents=True)
    for place in (home / "convoy_own_nets.py", home / "convoy_own_package" / "deep" / "nets.py"):
        place.write_text(OWN)
    outside, packages = tmp_path / "outside" / "convoy_own_outside.py", (installed / "convoy_own_venv.py",)
    for place in (run / "nets.py", run.parent / "nets.py", *packages, vendor / "convoy_own_vendor.py", outside):
        place.write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n{OWN}")
    (home / "convoy_own_linked.py").symlink_to(outside)
    monkeypatch.setattr(sys, "path", [str(installed), str(vendor), str(outside.parent), *sys.path])
    for name in (*TRUSTED, *STRANGERS):
        monkeypatch.chdir(home)
        for entry in [entry for entry in sys.modules if entry.startswith("convoy_own_")]:
            del sys.modules[entry]
        if name in TRUSTED:
            check_own(name, run / "config.yaml", "network")
        else:
            with pytest.raises(ConvoyError, match=f"config.yaml names {name} as its network, .* give --trust-code"):
                check_own(name, run / "config.yaml", "network")
        assert not (tmp_path / "mark").exists(), name
    monkeypatch.chdir(run)  # what lies in the run is not the user's own there, either
    with pytest.raises(ConvoyError, match="--trust-code"):
        check_own("nets:net", Path("config.yaml"), "network")
    assert not (tmp_path / "mark").exists()
