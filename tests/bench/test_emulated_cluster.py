"""What an emulated cluster may be, and every mistake in saying so."""

from pathlib import Path

import pytest

from convoy.bench.emulated import Cluster, ClusterDevice
from convoy.bench.emulated.emulation import cores_for
from convoy.errors import ConvoyError


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_devices_that_are_alike(tmp_path: Path) -> None:
    cluster = Cluster.read(written(tmp_path, "devices: {count: 4, speed: 0.5}\nlinks: {rate: 3gbit}\n"))
    assert cluster == Cluster.alike(4, 0.5, "3gbit")
    assert cluster.hosts == ("host0", "host1", "host2", "host3")
    assert str(cluster) == "4 devices with 0.5 of a core each in 4 hosts, links of 3gbit"


def test_two_devices_in_each_of_two_hosts(tmp_path: Path) -> None:
    cluster = Cluster.read(written(tmp_path, "devices: {count: 4, hosts: 2}\nlinks: {rate: 1gbit}\n"))
    assert [device.host for device in cluster.devices] == ["host0", "host0", "host1", "host1"]
    assert {device.speed for device in cluster.devices} == {1.0}


def test_unequal_devices_and_links(tmp_path: Path) -> None:
    text = """
devices:
  - {speed: 0.5, host: a}
  - {speed: 0.25, host: b, count: 2}
  - {speed: 0.4}
links: {rate: 3gbit, hosts: {b: 300mbit}}
"""
    cluster = Cluster.read(written(tmp_path, text))
    assert cluster.devices == (
        ClusterDevice(0.5, "a"),
        ClusterDevice(0.25, "b"),
        ClusterDevice(0.25, "b"),
        ClusterDevice(0.4, "host3"),
    )
    assert [cluster.rate_of(host) for host in cluster.hosts] == ["3gbit", "300mbit", "3gbit"]
    assert str(cluster) == "4 devices with 0.5, 0.25, 0.25, 0.4 of a core in 3 hosts, links of 3gbit, 300mbit, 3gbit"


def test_one_host_needs_no_link(tmp_path: Path) -> None:
    assert str(Cluster.read(written(tmp_path, "devices: {count: 2, hosts: 1}"))).endswith("each in one host")
    assert str(Cluster.alike(1)) == "1 device with 1 of a core in one host"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has the keys devices and links"),
        ("- 1", "has the keys devices and links"),
        ("devices: [", "expected the node content"),
        ("devices: {count: 2}\ndevices: {count: 4}", "line 2: the key devices is twice here"),
        ("links: {rate: 1gbit}", "devices is missing"),
        ("device: {count: 2}", "no key 'device': did you mean devices"),
        ("devices: 4", "devices is 4: write"),
        ("devices: []", "at least one device"),
        ("devices: {speed: 0.5}", "no count"),
        ("devices: {count: 0}", "count of devices is 0"),
        ("devices: {count: two}", "count of devices is 'two'"),
        ("devices: {count: true}", "count of devices is True"),
        ("devices: {count: 251}", "from 1 to 250"),
        ("devices: {count: 2, hosts: 3}", "2 devices cannot be in 3 hosts"),
        ("devices: {count: 2, speed: 0}", "speed of the devices is 0"),
        ("devices: {count: 2, speed: 1.5}", "the share of a core that it has"),
        ("devices: {count: 2, speed: .nan}", "the share of a core that it has"),
        ("devices: {count: 2, speed: 50%}", "the share of a core that it has"),
        ("devices: {count: 2, sped: 1}", "no key 'sped': did you mean speed"),
        ("devices: [{speed: 0.5}, 3]", "entry 2 of devices is 3"),
        ("devices: [{speed: 2}]", "speed of entry 1 of devices is 2"),
        ("devices: [{count: -1}]", "count in entry 1 of devices is -1"),
        ("devices: [{host: 'a b'}]", "host 'a b': use letters"),
        ("devices: {count: 2}", "link of host host0 has no rate"),
        ("devices: {count: 2}\nlinks: 1gbit", "links is '1gbit': write"),
        ("devices: {count: 2}\nlinks: {rate: 1}", "rate of a link is 1: write e.g. 1gbit"),
        ("devices: {count: 2}\nlinks: {rate: 1gb}", "rate of a link is '1gb'"),
        ("devices: {count: 2}\nlinks: {rate: 0gbit}", "rate of a link is '0gbit'"),
        ("devices: {count: 2}\nlinks: {rate: -1gbit}", "rate of a link is '-1gbit'"),
        ("devices: {count: 2}\nlinks: {rate: [1gbit]}", "rate of a link is"),
        ("devices: {count: 2}\nlinks: {rate: 1gbit, latency: 0.1ms}", "latency, which is not emulated"),
        ("devices: {count: 2}\nlinks: {rate: 1gbit, hosts: 1gbit}", "a rate for each host"),
        ("devices: {count: 2}\nlinks: {rate: 1gbit, hosts: {c: 1gbit}}", "given for 'c', but the hosts are host0"),
        ("devices: {count: 2}\nlinks: {hosts: {host1: fast}}", "rate of a link is 'fast'"),
    ],
)
def test_a_mistake_is_one_sentence_that_has_the_file(text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConvoyError) as caught:
        Cluster.read(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConvoyError, match="no cluster file"):
        Cluster.read(tmp_path / "none.yaml")
    with pytest.raises(ConvoyError, match="cannot read the cluster file"):
        Cluster.read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConvoyError, match="UTF-8"):
        Cluster.read(tmp_path / "binary")


@pytest.mark.parametrize(
    ("speeds", "cores", "want"),
    [
        ([0.5] * 4, [0, 1], [0, 1, 0, 1]),
        ([0.25] * 4, [4, 7], [4, 7, 4, 7]),
        ([1.0, 0.5, 0.5], [0, 1], [0, 1, 1]),
        ([0.2, 0.8, 0.3], [0, 1], [1, 0, 1]),
        ([0.1] * 10, [3], [3] * 10),
    ],
)
def test_cores_are_shared_evenly(speeds: list[float], cores: list[int], want: list[int]) -> None:
    assert cores_for(speeds, cores) == want


@pytest.mark.parametrize(
    ("speeds", "said"),
    [([1.0, 1.0, 1.0], "add up to 3 cores, but here are 2 cores: multiply all speeds by 0.66"), ([0.6] * 3, "lower")],
)
def test_too_much_for_the_cores_is_refused(speeds: list[float], said: str) -> None:
    with pytest.raises(ConvoyError, match=said):
        cores_for(speeds, [0, 1])
