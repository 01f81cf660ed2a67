"""Clusters as YAML: a mapping with `devices` and `links`.

    devices: {count: 4, speed: 0.5}         # each in a host of its own; with `hosts: 2`, two in each
    links: {rate: 3gbit}

or, where they are unequal,

    devices:
      - {speed: 0.5, host: a}
      - {speed: 0.25, host: b, count: 2}
    links: {rate: 3gbit, hosts: {b: 1gbit}}
"""

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from convoy.errors import ConvoyError
from convoy.launch.emulated.device import Device, alike, check_rate, check_speed
from convoy.yaml_file import read_text

_FORM = "write e.g. `devices: {count: 4, speed: 0.5}` and below it `links: {rate: 3gbit}`"


def read_yaml(path: Path) -> Any:
    """What a YAML file says.

    Raises:
        ConvoyError: it cannot be read or is no YAML; the sentence has the file.
    """
    text = read_text(path, "cluster")
    try:
        _check_twice(yaml.compose(text, yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConvoyError(f"{path}{line}: this is no YAML ({error.problem}): {_FORM}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConvoyError(f"{path}: this is no YAML ({str(error).partition(chr(10))[0]}): {_FORM}") from error


def parse(document: Any) -> tuple[tuple[Device, ...], str, dict[str, str]]:
    """What a mapping says of a cluster: its devices, the rate of all links, and those of the hosts that have another.

    Raises:
        ConvoyError: it describes none.
    """
    if not isinstance(document, Mapping):
        raise ConvoyError(f"a cluster has the keys devices and links: {_FORM}")
    _check_keys(document, ("devices", "links"), "a cluster")
    if document.get("devices") is None:
        raise ConvoyError(f"devices is missing: {_FORM}")
    rate, rates = _links(document.get("links"))
    devices = document["devices"]
    if isinstance(devices, Mapping):
        _check_keys(devices, ("count", "speed", "hosts"), "devices")
        if "count" not in devices:
            raise ConvoyError("devices has no count: write e.g. `devices: {count: 4, speed: 0.5}`")
        count = _whole(devices["count"], "count of devices")
        hosts = _whole(devices["hosts"], "number of hosts") if "hosts" in devices else None
        speed = check_speed(devices.get("speed", 1.0), "the devices")
        return alike(count, speed, hosts), rate, rates
    if isinstance(devices, list):
        return tuple(_listed(devices)), rate, rates
    raise ConvoyError(f"devices is {devices!r}: write e.g. `devices: {{count: 4, speed: 0.5}}`, or a list of devices")


def _listed(entries: list[Any]) -> list[Device]:
    """Devices one by one; those that name no host are in one of their own."""
    found: list[Device] = []
    for number, entry in enumerate(entries):
        what = f"entry {number + 1} of devices"
        if not isinstance(entry, Mapping):
            raise ConvoyError(f"{what} is {entry!r}: write e.g. `- {{speed: 0.5, host: a}}`")
        _check_keys(entry, ("speed", "host", "count"), what)
        speed = check_speed(entry.get("speed", 1.0), what)
        for _ in range(_whole(entry.get("count", 1), f"count in {what}")):
            host = entry.get("host")
            found.append(Device(speed, f"host{len(found)}" if host is None else str(host)))
    return found


def _links(links: Any) -> tuple[str, dict[str, str]]:
    if links is None:
        return "", {}
    if not isinstance(links, Mapping):
        raise ConvoyError(f"links is {links!r}: write e.g. `links: {{rate: 3gbit}}`")
    if "latency" in links:
        raise ConvoyError(
            "links has a latency, which is not emulated (links have what the machine's own network stack takes): "
            "leave latency out"
        )
    _check_keys(links, ("rate", "hosts"), "links")
    hosts = links.get("hosts") or {}
    if not isinstance(hosts, Mapping):
        raise ConvoyError(f"hosts of links is {hosts!r}: write a rate for each host, e.g. `hosts: {{b: 1gbit}}`")
    rate = links.get("rate")
    for given in (*([] if rate is None else [rate]), *hosts.values()):
        check_rate(given)
    return rate or "", {str(host): given for host, given in hosts.items()}


def _check_twice(node: yaml.Node | None) -> None:
    """Refuse a key that is there twice, of which YAML would silently take the last."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} is there twice")
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):
            _check_twice(part)


def _check_keys(given: Mapping[Any, Any], known: Collection[str], what: str) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConvoyError(f"{what} has no key {key!r}: {hint}")


def _whole(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConvoyError(f"the {what} is {value!r}: write a whole number from 1")
    return value
