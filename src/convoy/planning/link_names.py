"""Links that a person names: `pcie4`, `ethernet-10g`, `10gbit`, `5GB/s`."""

import re

from convoy.cost.assumed import Assumed, Rate, catalogue
from convoy.cost.link import Links
from convoy.errors import ConvoyError

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(mbit|gbit|mb|gb)(?:/s|ps)?")
_LATENCY = 2e-5


def rate_of(text: str) -> tuple[Rate, str]:
    """A link by its name in the catalogue, or by its rate in bits (`10gbit`) or bytes (`5GB/s`), and where from.

    Raises:
        ConvoyError: it is neither.
    """
    known = catalogue()
    name = text.strip().lower()
    if name in known:
        entry = known[name]
        return entry.rate, "fitted to published measurements" if entry.fitted else entry.source
    match = _RATE.fullmatch(name)
    if match is None or float(match[1]) == 0:
        raise ConvoyError(
            f"{text!r} is no link: write a rate such as 10gbit or 5GB/s, or one of {', '.join(sorted(known))}"
        )
    number, unit = float(match[1]), match[2]
    if unit in ("mbit", "gbit"):
        return Rate.gbit(number if unit == "gbit" else number / 1e3), "nine tenths of it carry data"
    return Rate(_LATENCY, number * (1e9 if unit == "gb" else 1e6)), "as said"


def links_named(text: str, on_cpu: bool) -> tuple[Links, str]:
    """Links between devices that are not at hand, and a note on them: `10gbit`, or `10gbit,8xnvlink4` for hosts of 8
    devices that nvlink4 joins, and 10 Gbit/s each other's.

    On CPUs moving messages takes cycles from what computes: as much as between two processes of one host at the rate
    at which gloo fills a core (`loopback` in the catalogue), less in proportion.

    Raises:
        ConvoyError: nobody knows such a link.
    """
    across, comma, within = text.partition(",")
    rate, source = rate_of(across)
    share = min(1.0, rate.bytes_per_s / catalogue()["loopback"].rate.bytes_per_s) if on_cpu else 0.0
    note = (
        f"the links are assumed: {text}, {rate.bytes_per_s / 1e9:.3g} GB/s after {rate.latency * 1e6:.3g} µs ({source})"
    )
    if not comma:
        return Assumed(rate, overlap=True, cpu_share=share).links(), note
    match = re.fullmatch(r"\s*([1-9][0-9]*)\s*x\s*(.+)", within)
    if match is None:
        raise ConvoyError(
            f"{text!r} is no link: write e.g. 10gbit,8xnvlink4 for hosts of 8 devices with nvlink4 inside"
        )
    inside, where = rate_of(match[2])
    note += f"; inside hosts of {match[1]} devices {inside.bytes_per_s / 1e9:.3g} GB/s ({where})"
    return Assumed(rate, inside, int(match[1]), overlap=True, cpu_share=share).links(), note
