"""Fits the coefficients of `convoy.hardware` to published tables: least squares of logarithms, each held near 0.

A coefficient is the logarithm of a factor on what the model counts; its prior says how far from 1 that factor may
be without evidence. Rows that are near-copies (one network, device, precision and family of sources) share one vote.
Leaving a source out goes from the fit to all: steps of Gauss and Newton with the same derivatives, without its rows.
"""

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convoy.hardware.catalog import Device, device_named
from convoy.hardware.data_parallel import Site, ring
from convoy.hardware.speed import Array, Item, Software, Times, Work, arithmetic, times, units_of
from measuring.published_rows import Row, family, lines, number, work
from measuring.published_schemes import factors, several

PRIORS_ONE = {"device ": 0.12, "framework ": 0.35, "bandwidth ": 0.3, "peak ": 0.5, "cudnn": 0.2}
PRIORS_SEVERAL = {"link ": 0.3, "slower ": 0.4, "feed by": 0.8, "host memory": 0.1, "feed ": 0.3}
_NOISE = 0.12
_OF_YEAR = ("launch", "host eager", "host compiled", "compiled", "kernels")
"""What is fitted for a generation of software by itself."""


@dataclass(frozen=True)
class Layers:
    """Single layers that somebody timed on a device: their work, and seconds of each way; NaN where not measured."""

    device: Device
    precision: str
    software: Software
    work: Work
    forward: Array
    backward: Array

    @property
    def votes(self) -> float:
        """Weight of each: all of a table count as some tens of networks."""
        return math.sqrt(30.0 / len(self.forward))


def read_layers(folder: Path) -> list[Layers]:
    """`conv_layer_times.csv` and `layer_profiles.csv`."""
    found: dict[tuple[str, str], list[tuple[Item, float, float]]] = {}
    names = {"GTX Titan X (Maxwell)": "titan-x", "Tesla M40": "m40", "Tesla P100-PCIe": "p100-pcie"}
    names |= {"Tesla V100 (DGX-1)": "v100-sxm2", "Titan X (Pascal)": "titan-x-pascal"}
    for row in lines(folder / "conv_layer_times.csv"):
        precision = "fp16" if "FP16 ip" in row["precision"] else row["precision"]
        if precision not in ("fp32", "fp16"):
            continue
        w, h, c, n, k = (int(row[name]) for name in "WHCNK")
        fw, fh, pw, ph, sw, sh = (int(row[f"{name}_{side}"]) for name in ("filter", "pad", "stride") for side in "wh")
        out = n * ((w + 2 * pw - fw) // sw + 1) * ((h + 2 * ph - fh) // sh + 1)
        item = Item("conv", out * k * c * fw * fh, n * c * w * h, out * k, k * c * fw * fh, fw * fh, c, k, 1)
        ways = [number(row[name]) for name in ("fwd_ms", "bwd_input_ms", "bwd_weight_ms")]
        seconds = [math.nan if way is None else way / 1e3 for way in ways]
        found.setdefault((names[row["gpu"]], precision), []).append((item, seconds[0], seconds[1] + seconds[2]))
    deep_bench = Software("deepbench", 7, False, True)
    layers = [_layers(name, precision, deep_bench, rows) for (name, precision), rows in found.items()]
    return [*layers, _profile(folder / "layer_profiles.csv")]


def _layers(name: str, precision: str, software: Software, rows: Sequence[tuple[Item, float, float]]) -> Layers:
    merged: dict[Item, tuple[Item, float, float]] = {row[0]: row for row in rows}
    forward, backward = (np.array([row[way] for row in merged.values()], dtype=np.float64) for way in (1, 2))
    return Layers(device_named(name), precision, software, Work.of(list(merged), 0, 0, 1), forward, backward)


def _profile(path: Path) -> Layers:
    """PipeDream's profiles: PyTorch on a V100; shapes follow from the bytes of activations."""
    rows = []
    for row in lines(path):
        forward, backward = float(row["fwd_ms"]) / 1e3, float(row["bwd_ms"]) / 1e3
        if forward < 5e-5 or backward < 5e-5:
            continue
        written, weights = float(row["activation_bytes"]) / 4, float(row["parameter_bytes"]) / 4
        found = re.match(r"Conv2d\((\d+), (\d+), kernel_size=\((\d+), (\d+)\), stride=\((\d+), \d+\)", row["op"])
        groups = re.search(r"groups=(\d+)", row["op"])
        if found:
            cin, cout, kh, kw, stride = map(int, found.groups())
            g = int(groups[1]) if groups else 1
            macs, read = written * cin / g * kh * kw, written * cin / cout * stride**2
            item = Item("conv", macs, read, written, weights, kh * kw, cin // g, cout // g, g, stride > 1)
        elif row["op"].startswith("BatchNorm"):
            item = Item("norm", 0, written, written, weights)
        elif row["op"].startswith(("ReLU", "Add")):
            item = Item("pointwise", 0, written * (2 if row["op"].startswith("Add") else 1), written, 0)
        else:
            continue
        rows.append((item, forward, backward))
    return _layers("v100-pcie", "fp32", Software("pipedream", 7), rows)


@dataclass
class Problem:
    """Least squares over named coefficients."""

    names: list[str]  # of the coefficients
    priors: Array  # how far each may be from 0
    # of all rows, from the coefficients: logarithms of predicted over measured, weighted
    residuals: Callable[[Array], Array]
    groups: np.ndarray  # for each residual the number of its source

    def jacobian(self, at: Array) -> tuple[Array, Array]:
        """Residuals and their derivatives."""
        here = self.residuals(at)
        columns = []
        for place in range(len(at)):
            there = at.copy()
            there[place] += 0.02
            columns.append((self.residuals(there) - here) / 0.02)
        return here, np.stack(columns, 1)

    def solve(self, steps: int = 8) -> tuple[Array, Array]:
        """The best coefficients for all rows, and the derivatives there."""
        at, slopes, longest = np.zeros(len(self.names)), np.zeros((0, 0)), math.inf
        while steps and longest >= 0.01:
            here, slopes = self.jacobian(at)
            at, longest = self._moved(at, here, slopes)
            steps -= 1
        return at, slopes

    def without(self, group: int, start: Array, slopes: Array, steps: int = 3) -> Array:
        """The best coefficients without the rows of a source."""
        keep, at, longest = self.groups != group, start, math.inf
        while steps and longest >= 0.005 and not keep.all():
            at, longest = self._moved(at, self.residuals(at)[keep], slopes[keep])
            steps -= 1
        return at

    def _moved(self, at: Array, here: Array, slopes: Array) -> tuple[Array, float]:
        """One step further, and how far the coefficient that changes most would go."""
        # an error of several times the usual one is somebody's mistake: it votes less (Huber, 1964)
        robust = np.minimum(1.0, 2.5 / np.maximum(np.abs(here), 1e-9)) ** 0.5
        a, b = slopes * robust[:, None], here * robust
        ridge = np.asarray(1 / self.priors**2, dtype=np.float64)
        move = np.asarray(np.linalg.solve(a.T @ a + np.diag(ridge), -(a.T @ b + ridge * at)), dtype=np.float64)
        longest = float(np.abs(move).max())
        return at + move * min(1.0, 1.0 / max(1e-9, longest)), longest


def _prior(name: str, table: dict[str, float]) -> float:
    return next((value for start, value in table.items() if name.startswith(start)), 0.7)


def as_dict(names: Sequence[str], at: Array) -> dict[str, float]:
    """Coefficients by name, those that change nothing left out."""
    return {name: round(float(value), 3) for name, value in zip(names, at, strict=True) if abs(value) > 5e-4}


Name = Callable[[Row], str]


def one_device(rows: Sequence[Row], layers: Sequence[Layers], sources: Sequence[str], name: Name) -> Problem:
    """The problem of one device: single layers, and networks."""
    used = [row for row in rows if row.count == 1 and row.rate and not row.refused and row.scheme.kind != "pipeline"]
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in used:
        alike.setdefault((row.network, row.images, row.device, row.precision, row.software), []).append(row)
    copies = Counter(map(_alike, used))
    names = [
        f"{what} {kind}"
        for what in ("sums", "width", "tiles", "3x3", "large", "1x7", "groups", "linear", "backward")
        for kind in ("plain", "wide")
    ]
    names += ["launch", "fixed", "compiled", "turning", "turning 8", "halves", "norm", "cudnn"]
    years = sorted({row.software.generation for row in used} - {""})
    names += [f"{what} {year}" for year in years for what in _OF_YEAR]
    everywhere: list[Row | Layers] = [*used, *layers]
    names += sorted({f"peak {units_of(one.device, one.precision)}" for one in everywhere})
    names += sorted({f"bandwidth {one.device.generation}" for one in everywhere})
    names += sorted({f"device {one.device.name}" for one in everywhere})
    names += sorted({f"framework {one.software.framework}" for one in everywhere})
    votes = np.array([copies[_alike(row)] ** -0.5 for row in used])

    def residuals(at: Array) -> Array:
        c = dict(zip(names, at, strict=True))
        of_row = {}
        for members in alike.values():
            row = members[0]
            seconds = times(work(row.network), row.images, row.device, row.precision, row.software, c).total
            for member in members:
                of_row[id(member)] = math.log(seconds / member.images * (member.rate or 1))
        found = [np.array([of_row[id(row)] for row in used]) * votes / _NOISE]
        for one in layers:
            got = times(one.work, 1.0, one.device, one.precision, one.software, c)
            for predicted, true in ((got.forward, one.forward), (got.backward, one.backward)):
                known = ~np.isnan(true)
                found.append(np.where(known, np.log(predicted / np.where(known, true, 1)), 0) * one.votes / 0.3)
        return np.concatenate(found)

    groups = np.array([sources.index(name(row)) for row in used] + [-1] * sum(2 * len(one.forward) for one in layers))
    return Problem(names, np.array([_prior(name, PRIORS_ONE) for name in names]), residuals, groups)


def _alike(row: Row) -> tuple[object, ...]:
    """What near-copies of a row have in common; with another batch the host shows, where it issues ahead."""
    here = row.network, row.device.name, row.precision, family(row.source)
    return (*here, row.software, row.images) if row.software.generation else here


@dataclass(frozen=True)
class Collective:
    """An all-reduce that somebody timed."""

    site: Site
    count: int
    size: float
    seconds: float


def read_collectives(folder: Path) -> list[Collective]:
    """NCCL's of `allreduce.csv`: of the others, sums pass through the hosts' memory."""
    found = []
    for row in lines(folder / "allreduce.csv"):
        if "NCCL" in row["algorithm"]:
            link = "pcie3-switch" if "single-root" in row["topology"] else "pcie3"
            count, hosts = int(row["n_gpus"]), int(row["n_nodes"])
            site = Site(count // hosts, link, "infiniband-fdr")
            found.append(Collective(site, count, float(row["bytes"]), float(row["time_ms"]) / 1e3))
    return found


def several_devices(
    collectives: Sequence[Collective],
    rows: Sequence[Row],
    singles: Sequence[Times],
    sources: Sequence[str],
    one_given: dict[str, float],
    name: Name,
) -> Problem:
    """The problem of several devices, where the times of one are known: their speed-ups."""
    used = [
        (row, one) for row, one in zip(rows, singles, strict=True) if row.count > 1 and row.speedup and not row.refused
    ]
    copies = Counter(_copy(row) for row, _ in used)
    names = ["beside", "message", "sync", "norms", "network", "adding", "to host", "to gpu", "replicated", "servers"]
    names += ["keras", "again", "uneven", "slower", "slower halves", "hosts", "host memory", "tree"]
    names += ["feed by cpu", "feed by gpu"]
    sites = {*(row.site for row, _ in used), *(c.site for c in collectives)}
    names += sorted({"link host" if site.way else f"link {site.link}" for site in sites})  # one for all ways of a host
    names += sorted({f"slower {row.software.framework}" for row, _ in used})
    names += sorted({f"feed {row.software.framework}" for row, _ in used if row.scheme.feed != "synthetic"})
    votes = np.array([copies[_copy(row)] ** -0.5 for row, _ in used])

    def residuals(at: Array) -> Array:
        given = {"one device": one_given, "several devices": dict(zip(names, at, strict=True))}
        found = []
        for row, one in used:
            found.append(math.log(speedup(row, one, given) / (row.speedup or 1)))
        factor = factors(given)
        sent = [math.log(sum(ring(one.size, one.count, one.site, factor)) / one.seconds) for one in collectives]
        return np.concatenate([np.array(found) * votes / 0.08, np.array(sent) * (30 / len(sent)) ** 0.5 / 0.08])

    groups = np.array([sources.index(name(row)) for row, _ in used] + [-1] * len(collectives))
    return Problem(names, np.array([_prior(name, PRIORS_SEVERAL) for name in names]), residuals, groups)


def _copy(row: Row) -> tuple[object, ...]:
    return (row.network, row.device.name, row.precision, family(row.source), row.count, row.software.compiled)


def speedup(row: Row, one: Times, given: dict[str, dict[str, float]]) -> float:
    """Predicted: over one device with the same input and the same images."""
    many = several(one, row, given)
    if row.scheme.relative or row.scheme.kind == "pipeline":
        return many.alone / many.seconds
    if row.images_alone != row.images:
        row_alone = replace(row, images=row.images_alone)
        alone = several(single(row_alone, given["one device"]), row_alone, given, 1)
    else:
        alone = several(one, row, given, 1)
    return row.count * row.images / many.seconds * alone.seconds / row.images_alone


def single(row: Row, given: dict[str, float]) -> Times:
    """The times of one device of a row."""
    return times(work(row.network), row.images, row.device, row.precision, row.software, given)


def constant(rows: Sequence[Row], without: str) -> float:
    """The part of the peak that a network reaches in the mean of other sources, as if it were one number."""
    parts = defaultdict(list)
    for row in rows:
        if row.count == 1 and row.rate and not row.refused and row.source != without:
            parts[row.source].append(math.log(row.rate / peak_rate(row)))
    return math.exp(statistics.fmean(statistics.fmean(part) for part in parts.values()))


def peak_rate(row: Row) -> float:
    """Images a second of one device if it did nothing but multiply at its peak."""
    flops = 6 * float((work(row.network).rows.macs * work(row.network).rows.count).sum())
    return arithmetic(row.device, row.precision).peak / flops
