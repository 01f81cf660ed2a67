"""Emulated hosts: the rate of their links, and that nothing is left of them."""

import os
import shutil
from pathlib import Path

import pytest
from measuring.hosts import check_rate, emulated_hosts, sweep
from measuring.link import bits_per_second
from measuring.ranks import Limits, run_ranks

from convoy.errors import ConvoyError


def namespaces() -> list[Path]:
    return list(Path("/run/netns").glob(f"convoy-{os.getpid()}-*"))


def needs_hosts() -> None:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs root, ip and tc")
    try:
        with emulated_hosts(1, "1gbit"):
            pass
    except ConvoyError as error:
        pytest.skip(str(error))


def test_an_all_reduce_moves_what_the_link_lets_through() -> None:
    needs_hosts()
    with emulated_hosts(2, "200mbit") as hosts:
        rates = run_ranks(bits_per_second, 2, 2**22, hosts=hosts, limits=Limits(60))
        assert len(namespaces()) == 3
    assert namespaces() == []
    assert all(0.3 * 200e6 < rate < 1.1 * 200e6 for rate in rates), rates


def test_nothing_is_left_after_an_error() -> None:
    needs_hosts()
    with pytest.raises(ZeroDivisionError), emulated_hosts(2, "1gbit"):
        _ = 1 / 0
    assert namespaces() == []


def test_what_a_killed_process_left_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    removed: list[str] = []
    dead = 2**22 + 1  # above the largest number of a process
    for name in (f"convoy-{dead}-host0", f"convoy-{os.getpid()}-switch", "convoy-other"):
        (tmp_path / name).touch()
    monkeypatch.setattr("measuring.hosts._FOLDER", tmp_path)
    monkeypatch.setattr("measuring.hosts._delete", removed.append)
    sweep()
    assert removed == [f"convoy-{dead}-host0"]


@pytest.mark.parametrize("rate", ["1", "1gb", "fast", "-1gbit", "1 gbit"])
def test_a_wrong_rate_is_refused(rate: str) -> None:
    with pytest.raises(ConvoyError, match="1gbit"):
        check_rate(rate)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    with pytest.raises(ConvoyError, match="root"), emulated_hosts(2, "1gbit"):
        pass
