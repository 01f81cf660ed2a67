"""Published tables: rows of `scaling.csv` as devices, machines, software and schemes, and the other files beside it.

What the words of a row mean is in `published_words.yaml`. Only columns that say how something was measured are read.
Some of them hold results too (`2367 ms/batch`, `train=63.89s`, `98.05 h/90 epochs`): these are not read.
"""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from convoy import models
from convoy.hardware.catalog import Device, device_named
from convoy.hardware.data_parallel import Site
from convoy.hardware.speed import Software, Work
from convoy.ops import capture
from convoy.planner.machines import work_of
from measuring.networks import BUILT

KEYS = ("source", "model", "dataset", "gpu", "interconnect", "n_gpus", "batch_per_gpu", "scheme")
COLUMNS = {"source": "source", "data": "dataset", "gpu": "gpu", "link": "interconnect", "scheme": "scheme"}
OURS = Path(__file__).with_name("ours.csv")
"""What this project measured, as `scaling.csv` has it, bf16 and channels_last; the year ends the source's name."""
WORDS = yaml.safe_load(Path(__file__).with_name("published_words.yaml").read_text(encoding="utf-8"))
_TOTAL = re.compile(r"batch-size (\d+) total in command")
"""Where one command, with its images of all devices together, was run on any number of devices."""

Columns = dict[str, str]
Batches = Mapping[tuple[str, str, str], set[float]]
"""Images with which one device was timed, by source, network and device."""


@dataclass(frozen=True)
class Scheme:
    """How gradients are added."""

    # `ring`, `tree`; `replicated` as TensorFlow's towers; `host` in the memory of the host, `host-ring` the same with a
    # ring of the hosts' processors; `server-gpu` on one GPU; `servers` on the hosts, one on each; `servers-gpu` on a
    # GPU of each; `keras` one device after the other; `pipeline` through stages; `one-weird-trick`, `model`, `hybrid`
    # of Krizhevsky and Yadan; `none` not at all
    kind: str = "ring"
    overlap: bool = True  # messages travel beside the backward pass
    # small gradients share a message; with servers, the devices of a host share one copy of what they send
    fused: bool = True
    itemsize: int = 4  # bytes of a number in a message
    cycle: float = 0.0  # seconds between two looks for gradients that all devices have
    # `synthetic` from nowhere, `fake` from the host's memory, `real` decoded by the host, `gpu` by devices
    feed: str = "synthetic"
    parts: int = 1  # microbatches of a pipeline
    relative: bool = False  # the speed-up is over two stages and one microbatch


@dataclass(frozen=True)
class Row:
    """A row, understood."""

    key: tuple[str, ...]  # its columns, as the scorer knows it
    network: str  # its name in `work`
    device: Device
    precision: str
    software: Software
    images: float  # of one device; images of one step
    images_alone: float  # of one device in the row that the speed-up is over
    count: int  # devices
    site: Site  # their host, and what is between hosts
    cores: int  # of a host, to decode pictures
    scheme: Scheme  # how gradients were added
    rate: float | None
    speedup: float | None  # as published; None where the table does not say
    refused: str = ""  # why the row cannot be predicted; empty where it can

    @property
    def source(self) -> str:
        """Who published it."""
        return self.key[0]


@cache
def work(name: str) -> Work:
    """The work of a network of the tables, or of one that Convoy brings along."""
    with torch.device("meta"):
        if name in BUILT:
            network, size = BUILT[name][0](), BUILT[name][1]
        else:
            network, size = models.create(name), (models.describe(name).input_shape or (3, 224, 224))[1]
    return work_of(capture(network, [torch.empty(2, 3, size, size, device="meta")], training=True))


def lines(path: Path) -> Iterator[Columns]:
    """Of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def read(path: Path) -> Iterator[Row]:
    """The rows of a file."""
    rows, timed = list(lines(path)), path.parent / "scaling.csv"
    batches: dict[tuple[str, str, str], set[float]] = defaultdict(set)
    for row in lines(timed) if timed.exists() else rows:
        if row["n_gpus"] == "1" and (images := number(row["batch_per_gpu"])):
            batches[row["source"], row["model"], row["gpu"]].add(images)
    cards: dict[tuple[str, str], int] = {}
    for row in rows:
        machine = row["source"], row["gpu"]
        cards[machine] = max(cards.get(machine, 1), int(float(row["n_gpus"])))
    for row in rows:
        yield _row(row, batches, cards[row["source"], row["gpu"]])


def family(source: str) -> str:
    """Sources that are near-copies of each other have one family."""
    return next((start for start in WORDS["families"] if source.startswith(start)), source)


def _fitting(table: str, text: str) -> Iterator[Any]:
    """What the entries of a table of words say that fit."""
    for patterns, meaning in WORDS[table].items():
        if all(re.search(pattern, text, re.MULTILINE) for pattern in patterns.split(" & ")):
            yield meaning


def _first(table: str, text: str, default: Any) -> Any:
    return next(_fitting(table, text), default)


def _together(table: str, text: str) -> dict[str, Any]:
    return {key: value for meaning in _fitting(table, text) for key, value in meaning.items()}


def _row(row: Columns, batches: Batches, cards: int) -> Row:
    refused, name = "", next((name for words, name in WORDS["devices"].items() if words in row["gpu"]), None)
    if name is None:
        name, refused = "k40", f"the table does not say which device: {row['gpu']}"
    device, count = device_named(name), int(float(row["n_gpus"]))
    facts = ["peer" if device.peer else "alone", device.generation, device.host]
    facts.append("new" if device.generation in ("ampere", "ada", "hopper", "blackwell") else "old")
    text = "\n".join(f"{name}: {row[column]}" for name, column in COLUMNS.items())
    text += f"\ndevice: {' '.join(facts)} {'many' if cards > 4 else 'few'}"
    (*_, precision), framework = _fitting("precision", text), _first("frameworks", text, "other")
    text += f"\nframework: {framework} {precision}"
    *_, cudnn = _fitting("cudnn", text)
    compiled = "XLA" in row["scheme"] + row["source"]
    software = Software(framework, cudnn, compiled, framework.startswith("dali") and precision == "fp16")
    if row["source"].startswith("Convoy"):
        made = {way: way in row["scheme"] for way in ("compiled", "recorded", "kernels")}
        software = Software("pytorch", 9, channels_last=True, generation=row["source"][-4:], **made)
        precision = "fp16"
    network = WORDS["networks"].get(row["model"])
    if network is None:
        network, refused = "alexnet", f"not one network: {row['model']}"
    if network == "alexnet":
        network = {"mxnet": "alexnet-wide", "theano": "alexnet-2012"}.get(framework, network)
    images = number(row["batch_per_gpu"]) or _usual_batch(row, network, device, precision)
    return Row(
        key=tuple(row[key] for key in KEYS),
        network=network,
        device=device,
        precision=precision,
        software=software,
        images=images,
        images_alone=_alone(row, images, count, batches),
        count=count,
        site=_site(text, device, count),
        cores=_first("cores", text, None),
        scheme=_scheme(text, row["scheme"]),
        rate=number(row.get("images_per_s", "")),
        speedup=number(row.get("speedup_vs_1", "")),
        refused=refused,
    )


def number(text: str | None) -> float | None:
    """In a cell; None where there is none."""
    try:
        return float(text or "")
    except ValueError:
        return None


def _alone(row: Columns, images: float, count: int, batches: Batches) -> float:
    """The images of one device in the row that the speed-up is over: as many, where there is such a row."""
    if row["source"].startswith("Yadan") or _TOTAL.search(row["scheme"]):
        return images * count
    if row["source"].startswith("FireCaffe"):
        return 32.0
    known = batches.get((row["source"], row["model"], row["gpu"]), set())
    return images if images in known or not known else min(known, key=lambda one: abs(math.log(one / images)))


def _usual_batch(row: Columns, network: str, device: Device, precision: str) -> float:
    """Where the table does not say: the largest power of two, up to 512, that fits into the memory."""
    if "rossumai" in row["source"] or "tensorpack" in row["source"]:
        return 512.0 if network == "alexnet" else 32.0
    if (total := _TOTAL.search(row["scheme"])) is not None:
        return float(total[1]) / int(row["n_gpus"])
    if row["source"].startswith(("Yadan", "FireCaffe")):  # 256 images, 1,024 images of all devices together
        return (256.0 if "Yadan" in row["source"] else 1024.0) / int(row["n_gpus"])
    if "FlexFlow" in row["source"] or "gluon" in row["scheme"]:
        return 64.0
    images = 512.0 if network.startswith("alexnet") else 256.0
    if "deeplearning-benchmark" in row["source"]:  # as large as fits, in the rows that say
        images = 2048.0
    # weights, gradients, momentum, and what the backward pass wants of the activations
    asked, itemsize = work(network), 2 if precision == "fp16" else 4
    kept = 0.75 * float((asked.rows.count * asked.rows.written).sum()) * itemsize
    while images > 8 and 12 * asked.parameters + kept * images > 0.8 * device.memory_gb * 1e9:
        images /= 2
    return images


def _site(text: str, device: Device, count: int) -> Site:
    """The host, which has as many cards as its source used at most, and the network of a row."""
    found: dict[str, Any] = {"per_host": 8, "network": "infiniband-edr"}
    found |= _first("links", text, {"link": device.host} if device.peer else {"link": "pcie3", "way": "host"})
    found |= _together("hosts", f"{text}\nway: {found['link']}")
    return Site(**found | {"per_host": min(found["per_host"], count), "memory": _first("memory", text, None)})


def _scheme(text: str, words: str) -> Scheme:
    """How gradients were added, and what else bound the rate."""
    found: dict[str, Any] = {"kind": "ring", "overlap": True, "fused": True, "itemsize": 4}
    found |= _first("schemes", text, {})
    found |= _together("exchanges", f"{text}\nkind: {found['kind']}")
    stages = re.search(r"PP n=(\d+) partitions, m=(\d+)", words)
    parts = int(stages[2]) if stages else 32 if found["kind"] == "pipeline" else 1
    cycle = 5e-3 if "horovod" in words.lower() else 0.0  # its default until 2020, HOROVOD_CYCLE_TIME
    given = (found["kind"], found["overlap"], found["fused"], found["itemsize"])
    return Scheme(*given, cycle, _first("feeds", text, None), parts, relative=stages is not None)
