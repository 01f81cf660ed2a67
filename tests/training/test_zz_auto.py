import sys
sys.path.insert(0, "/work/deferred/tests")
from pathlib import Path
import pytest
from ranks import run_ranks
from tiny import write_mnist
from training.test_deferred import trained
@pytest.mark.parametrize("plan", ["auto", "stage=2", "stage=2,sample=2"])
def test_auto(tmp_path, plan):
    data = write_mnist(tmp_path/"data")
    n = 4 if "," in plan else 2
    for (lean, d) in run_ranks(trained, n, data, tmp_path / "lean", {"parallel.plan": plan}, 0)[:1]:
        print(d, lean.digest, lean.said[:6])
    ((serial,_),) = run_ranks(trained, 1, data, tmp_path / "serial", {}, 2**30)
    assert d == [True]
    assert serial.curve == lean.curve if plan != "auto" else True
