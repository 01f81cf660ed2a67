"""Links between devices and between hosts, by name or by rate."""

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from convoy.errors import ConvoyError


@dataclass(frozen=True)
class Link:
    """Seconds of a message without content, and bytes a second in one direction."""

    latency: float
    rate: float


@cache
def _links() -> dict[str, Link]:
    text = resources.files("convoy.hardware").joinpath("links.csv").read_text(encoding="utf-8")
    return {
        row["name"]: Link(float(row["latency_us"]) * 1e-6, float(row["gbytes_per_s"]) * 1e9)
        for row in csv.DictReader(text.splitlines())
    }


_RATE = re.compile(r"(?:ethernet-|tcp-)?([0-9]+(?:\.[0-9]+)?)g(?:bit)?(?:/s)?")


def link_named(name: str) -> Link:
    """A link of the catalogue, or by its rate, as `25gbit`; `-N` at the end stands for N of them in each host.

    Raises:
        ConvoyError: nobody knows it.
    """
    known = _links()
    wanted = re.sub("-(host|shared|bridge)$", "", name.strip().lower())
    for one in (name.strip().lower(), wanted):
        if one in known:
            return known[one]
    base, _, cards = wanted.rpartition("-")
    if base in known and cards.isdigit():
        return Link(known[base].latency, known[base].rate * max(1, int(cards)))
    found = _RATE.fullmatch(wanted)
    if found is None or float(found[1]) == 0:
        raise ConvoyError(f"{name!r} is no link: write a rate such as 25gbit, or one of {', '.join(sorted(known))}")
    tcp = wanted.startswith("tcp")
    return Link(5e-5, float(found[1]) * 1e9 / 8 * (0.45 if tcp else 0.8))
