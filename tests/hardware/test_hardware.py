"""Devices and machines by the names that people write, and how long a network takes on them: more takes longer."""

import re
from pathlib import Path

import pytest
from torch import nn

from convoy.errors import ConvoyError
from convoy.hardware.catalog import device_named, devices, link_named, machine, read_devices
from convoy.hardware.data_parallel import Site, fitted, ring, several, site_of
from convoy.hardware.speed import Software, times
from convoy.planner.machines import work_of
from plans.made_graph import graph_of

NET = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 64, 10)
)
P100, V100 = (device_named(name) for name in ("p100-pcie", "v100-sxm2"))
OURS = Software()
WORK = work_of(graph_of(NET, 2, 3, 16, 16))
CARD = "generation: blackwell, processors: 170, fp32: 105, tf32: 105, fp16: 210, memory_gb: 32, gbytes_per_s: 1792"
MISTAKES = {"name: a": "name is no column", "lauch_us: 3": "did you mean launch_us", "host: pcie3-16": "is no link"}
MISTAKES |= {"launch_us: -1": "greater than or equal to 0", "launch_us: .nan": "finite"}


def test_machines_are_devices_on_hosts_with_a_link_and_what_is_none_is_told_what_is() -> None:
    for device in set(devices().values()):
        assert device.fp32 > 0 and device.memory_gb > 0 and device.gbytes_per_s > 0 and device.source
        assert link_named(device.host).rate > 0
    for text, count, hosts in (("4x(8xa100-sxm4)", 32, 4), ("2xtitan-x+1xt4", 3, 1)):
        result = machine(text)
        assert (len(result.devices), result.hosts, bool(result.between)) == (count, hosts, hosts > 1)
    assert (machine("8xv100-sxm2").link, machine("8xv100-sxm2:pcie3").link) == ("nvlink2", "pcie3")
    assert link_named("infiniband-edr-4").rate == pytest.approx(4 * link_named("infiniband-edr").rate)
    for text, words in {"8xv100-smx2": "v100-sxm2", "9999999xt4": "no machine", "2xt4:nvlynk2": "nvlink2"}.items():
        with pytest.raises(ConvoyError, match=re.escape(words)):
            machine(text)


def test_devices_of_a_file_are_named_as_people_do_and_what_is_wrong_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text(f"My_RTX 5090: {{{CARD}}}")
    (newer,), older = machine("my-rtx_5090", added=read_devices(path)).devices, device_named("rtx-4090")
    for precision in ("tf32", "fp16"):
        assert times(WORK, 1e6, newer, precision, OURS).total < times(WORK, 1e6, older, precision, OURS).total
    for columns, words in MISTAKES.items():
        path.write_text(f"mine: {{{CARD}, {columns}}}")
        with pytest.raises(ConvoyError, match=words):
            read_devices(path)


def test_more_devices_and_slower_links_take_longer() -> None:
    def seconds(count: int, link: str = "pcie3") -> float:
        one = times(WORK, 32, P100, "fp32", OURS)
        return several(one, WORK, "fp32", "pytorch", count, Site(4, link, "10gbit")).seconds

    assert seconds(1) < seconds(4) < seconds(4, "pcie3-x1") and seconds(4) < seconds(8)
    inside, between = ring(1e9, 16, Site(8, "pcie3", "10gbit"), lambda name: 1.0)
    assert inside == pytest.approx(2 * 7 / 8 * 1e9 / 5.89e9, rel=0.01)
    assert between == pytest.approx(1e9 / (0.9 * 1.25e9), rel=0.01)
    for count, faster in ((2, True), (4, False)):  # a bridge joins two
        links = [site_of(machine(f"{count}xrtx-2080-ti{link}")) for link in (":nvlink-bridge", "")]
        bridged, usual = (sum(ring(1e9, count, site, fitted)) for site in links)
        assert (bridged < usual) is faster
