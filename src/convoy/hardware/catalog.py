"""The devices, links and machines that are known by name: `8xv100-sxm2`, `4x(8xa100-sxm4)`, `2xtitan-x+1xgtx-1080`."""

import csv
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from convoy.documents import parse
from convoy.errors import ConvoyError
from convoy.files import read_text
from convoy.terminal import did_you_mean


@dataclass(frozen=True)
class Hop:
    """One hop between two devices."""

    latency: float  # seconds of a message without content
    rate: float  # bytes a second in one direction
    source: str = ""  # of these numbers

    @staticmethod
    def gbit(gbit_per_s: float, latency: float = 5e-5) -> "Hop":
        """A network of so many Gbit/s, of which nine tenths carry data."""
        return Hop(latency, 0.9 * gbit_per_s * 1e9 / 8, "nine tenths of it carry data")


@cache
def links() -> dict[str, Hop]:
    """The links of the catalog by name."""
    text = resources.files("convoy.hardware").joinpath("links.csv").read_text(encoding="utf-8")
    return {
        row["name"]: Hop(
            float(row["latency_us"]) * 1e-6,
            float(row["gbytes_per_s"]) * 1e9,
            "fitted to published measurements" if row["fitted"] == "yes" else row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    }


_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(mbit|gbit|mb|gb)(?:/s|ps)?")


def link_named(text: str) -> Hop:
    """A link by its name in the catalog, or by its rate in bits (`10gbit`) or bytes (`5GB/s`); else a ConvoyError. `-N`
    after the name of a network stands for N cards of a host side by side: `infiniband-hdr-8`."""
    catalog = links()
    name = text.strip().lower()
    if name in catalog:
        return catalog[name]
    base, _, cards = name.rpartition("-")
    if base.startswith(("infiniband", "ethernet")) and base in catalog and cards.isdecimal() and int(cards):
        return Hop(catalog[base].latency, catalog[base].rate * int(cards), catalog[base].source)
    match = _RATE.fullmatch(name)
    if match is None or float(match[1]) == 0:
        raise ConvoyError(
            f"{text!r} is no link: write a rate such as 10gbit or 5GB/s, or one of {', '.join(sorted(catalog))}"
        )
    giga = float(match[1]) * (1 if match[2].startswith("g") else 1e-3)
    return Hop.gbit(giga) if match[2].endswith("bit") else Hop(2e-5, giga * 1e9, "as said")


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
CUDA = ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell")  # generations by age


@pydantic_dataclass(frozen=True)
class Device:
    """A device, as its data sheet says."""

    name: str
    generation: str  # of the architecture: the part of the peak that layers reach changes with it
    processors: Annotated[int, Field(gt=0)]  # multiprocessors
    fp32: Positive  # peak arithmetic in TFLOP/s; 0 for tf32 and fp16 without faster units for them
    memory_gb: Positive
    gbytes_per_s: Positive
    tf32: NotNegative = 0.0
    fp16: NotNegative = 0.0
    launch_us: NotNegative = 5.0  # to start a kernel
    host: str = "pcie4"  # name of the usual link between such devices in a host
    peer: bool = True  # devices of a host copy to each other without passing through the host's memory
    source: str = ""  # of these numbers

    @property
    def tensor_cores(self) -> bool:
        """Whether half precision is several times as fast as single."""
        return self.fp16 >= 3 * self.fp32 or self.generation in CUDA[CUDA.index("volta") :]


@dataclass(frozen=True)
class Machine:
    """Devices in hosts."""

    text: str  # as it was asked for
    devices: tuple[Device, ...]  # host by host
    per_host: int
    link: str  # between devices of a host, by name
    between: str = ""  # network between hosts, by name or rate; empty for one host

    @property
    def hosts(self) -> int:
        return len(self.devices) // self.per_host

    @property
    def slowest(self) -> str:
        """The link that decides how fast a ring inside a host is: a bridge joins pairs, more devices the usual link."""
        return _usual(self.devices) if self.link == "nvlink-bridge" and self.per_host > 2 else self.link

    @property
    def label(self) -> str:
        return self.text + (f" over {self.between}" if self.between else "")


def _usual(devices: Iterable[Device]) -> str:
    return min((device.host for device in devices), key=lambda name: link_named(name).rate)


def _device(row: Mapping[str, Any]) -> Device:
    """The device of a row; a ValidationError where it is none."""
    return Device(**{field.name: row[field.name] for field in fields(Device) if row.get(field.name) not in ("", None)})


@cache
def devices() -> dict[str, Device]:
    """All devices of the catalog, by name and by their other names."""
    text = resources.files("convoy.hardware").joinpath("devices.csv").read_text(encoding="utf-8")
    by_name: dict[str, Device] = {}
    for row in csv.DictReader(text.splitlines()):
        device = _device(row)
        for name in (row["name"], *filter(None, row["aliases"].split(";"))):
            by_name[name] = device
    return by_name


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def device_named(name: str, added: Mapping[str, Device] | None = None) -> Device:
    """A device of the catalog or of `added`; a ConvoyError names the nearest ones."""
    catalog, key = {**devices(), **(added or {})}, _key(name)
    if key in catalog:
        return catalog[key]
    near = difflib.get_close_matches(key, catalog, 3, 0.4) or sorted(catalog)[:3]
    raise ConvoyError(
        f"{name!r} is no device that is known: the nearest are {', '.join(near)}; --catalog FILE adds others"
    )


def read_devices(path: Path) -> dict[str, Device]:
    """Devices of a YAML file: a mapping of names to the columns of the catalog. Mistakes in it are ConvoyErrors."""
    document = parse(read_text(path, "devices"), str(path))
    if not isinstance(document, dict):
        raise ConvoyError(f"{path}: devices are a mapping of names to numbers, e.g. my-gpu: {{fp32: 12.5, …}}")
    read = {}
    for name, row in document.items():
        try:
            device = _checked(_key(str(name)), row if isinstance(row, dict) else {}, str(path))
        except ConvoyError as error:
            raise ConvoyError(f"{path}: {name}: {error}") from error
        read[device.name] = device
    return read


def _checked(name: str, row: Mapping[str, Any], source: str) -> Device:
    known = [field.name for field in fields(Device)[1:]]
    generations = list(dict.fromkeys(listed.generation for listed in devices().values()))
    for column in (str(column) for column in row if column not in known):
        raise ConvoyError(f"{column} is no column{did_you_mean(column, known, otherwise='take those of the catalog')}")
    try:
        device = _device({"name": name, "source": source, **row})
    except ValidationError as error:
        mistakes = error.errors()
        if lacking := [str(mistake["loc"][0]) for mistake in mistakes if mistake["type"] == "missing"]:
            raise ConvoyError(f"it lacks {', '.join(lacking)}") from error
        wrong = f"{mistakes[0]['loc'][0]} is {mistakes[0]['input']}"
        raise ConvoyError(f"{wrong}, but {mistakes[0]['msg'].replace('Input should', 'has to')}") from error
    link_named(device.host)
    if device.generation not in generations:
        hint = did_you_mean(device.generation, generations, otherwise=f"one of {', '.join(generations)}")
        raise ConvoyError(f"generation is {device.generation}{hint}")
    return device


_PART = re.compile(r"(?:([0-9]+)\s*x\s*)?(.+)")
_HOSTS = re.compile(r"([0-9]+)\s*x\s*\((.+)\)")


def machine(text: str, between: str | None = None, added: Mapping[str, Device] | None = None) -> Machine:
    """A machine from its text. `8xv100-sxm2` is one host; `4x(8xa100-sxm4)` four, linked by `between` (by default 10
    Gbit/s); `2xtitan-x+1xgtx-1080` unequal devices of one host. `:pcie3` at the end names another link than the
    device's usual one."""
    inner, _, link = text.strip().lower().partition(":")
    hosts = 1
    if (several := _HOSTS.fullmatch(inner)) is not None:
        hosts, inner = int(several[1]), several[2]
    if "(" in inner or ")" in inner:
        raise ConvoyError(f"{text!r} is no machine: write e.g. 8xv100-sxm2, 4x(8xa100-sxm4) or 2xtitan-x+1xgtx-1080")
    chosen = tuple(_counted(inner, text, added))
    if hosts < 1 or len(chosen) * hosts > 65536:
        raise ConvoyError(f"{text!r} is no machine: it would have {len(chosen) * hosts} devices")
    if link and link not in links():
        near = difflib.get_close_matches(link, links(), 3, 0.4) or list(links())[:3]
        raise ConvoyError(f"{link!r} is no link that is known: the nearest are {', '.join(near)}")
    link = link or _usual(chosen)
    return Machine(text.strip(), chosen * hosts, len(chosen), link, (between or "10gbit") if hosts > 1 else "")


def _counted(text: str, whole: str, added: Mapping[str, Device] | None) -> Iterable[Device]:
    for part in text.split("+"):
        match = _PART.fullmatch(part.strip())
        if match is None or not match[2].strip():
            raise ConvoyError(f"{whole!r} is no machine: a device's name is lacking")
        count = int(match[1] or 1)
        if not 1 <= count <= 65536:
            raise ConvoyError(f"{whole!r} is no machine: there cannot be {count} devices of a kind")
        yield from (device_named(match[2], added),) * count
