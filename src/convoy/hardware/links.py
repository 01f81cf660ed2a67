"""Links between devices and between hosts, by name or by rate."""

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from convoy.errors import ConvoyError


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
_LATENCY = 2e-5


def link_named(text: str) -> Hop:
    """A link by its name in the catalog, or by its rate in bits (`10gbit`) or bytes (`5GB/s`); else a ConvoyError. `-N`
    after a name stands for N of them side by side, as network cards of a host: `infiniband-hdr-8`."""
    catalog = links()
    name = text.strip().lower()
    if name in catalog:
        return catalog[name]
    base, _, cards = name.rpartition("-")
    if base in catalog and cards.isdecimal() and int(cards):
        return Hop(catalog[base].latency, catalog[base].rate * int(cards), catalog[base].source)
    match = _RATE.fullmatch(name)
    if match is None or float(match[1]) == 0:
        raise ConvoyError(
            f"{text!r} is no link: write a rate such as 10gbit or 5GB/s, or one of {', '.join(sorted(catalog))}"
        )
    number, unit = float(match[1]), match[2]
    if unit in ("mbit", "gbit"):
        return Hop.gbit(number if unit == "gbit" else number / 1e3)
    return Hop(_LATENCY, number * (1e9 if unit == "gb" else 1e6), "as said")
