"""Devices, links and machines by the names that people write."""

import re
from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.hardware.catalog import device_named, devices, machine, read_devices
from convoy.hardware.links import link_named


def test_every_device_has_its_numbers_and_a_link_that_is_known() -> None:
    for device in set(devices().values()):
        assert device.fp32 > 0 and device.memory_gb > 0 and device.gbytes_per_s > 0 and device.source
        assert link_named(device.host).rate > 0


@pytest.mark.parametrize(
    ("text", "count", "hosts"),
    [("8xv100-sxm2", 8, 1), ("t4", 1, 1), ("4x(8xa100-sxm4)", 32, 4), ("2xtitan-x+1xgtx-1080", 3, 1)],
)
def test_machines(text: str, count: int, hosts: int) -> None:
    found = machine(text)
    assert (len(found.devices), found.hosts) == (count, hosts)
    assert bool(found.between) == (hosts > 1)


def test_a_machine_has_the_slowest_of_its_devices_links_or_the_one_that_is_named() -> None:
    assert machine("8xv100-sxm2").link == "nvlink2"
    assert machine("8xv100-sxm2:pcie3").link == "pcie3"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xv100-smx2", "v100-sxm2"),
        ("4x(8xa100-sxm4", "4x(8xa100-sxm4)"),
        ("0xt4", "cannot be 0"),
        ("2xt4+", "name is lacking"),
        ("9999999xt4", "no machine"),
        ("2xt4:nvlynk2", "nvlink2"),
    ],
)
def test_what_is_no_machine(text: str, words: str) -> None:
    with pytest.raises(ConvoyError, match=words.replace("(", r"\(").replace(")", r"\)")):
        machine(text)


def test_links_by_rate_and_in_numbers() -> None:
    assert link_named("25gbit").rate == pytest.approx(0.9 * 25e9 / 8)
    assert link_named("infiniband-edr-4").rate == pytest.approx(4 * link_named("infiniband-edr").rate)
    with pytest.raises(ConvoyError, match="is no link"):
        link_named("string")


def test_own_devices(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("my-gpu: {generation: ampere, processors: 60, fp32: 20, memory_gb: 16, gbytes_per_s: 500}\n")
    added = read_devices(path)
    assert machine("2xmy-gpu", None, added).devices[0].fp32 == 20
    assert device_named("T4", added).name == "t4"
    path.write_text("my-gpu: {fp32: 20}\n")
    with pytest.raises(ConvoyError, match="my-gpu lacks generation"):
        read_devices(path)
    for wrong, words in (("fp32: 0", "fp32 is 0"), ("fp32: fast", "could not convert"), ("host: string", "is no link")):
        numbers = "generation: ampere, processors: 60, fp32: 20, memory_gb: 16, gbytes_per_s: 500, host: pcie3"
        before = wrong.partition(":")[0]
        path.write_text("my-gpu: {" + re.sub(f"{before}: [a-z0-9]+", wrong, numbers) + "}\n")
        with pytest.raises(ConvoyError, match=f"my-gpu: .*{words}"):
            read_devices(path)
    with pytest.raises(ConvoyError, match="there is no devices file"):
        read_devices(tmp_path / "none.yaml")
