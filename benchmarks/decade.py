"""The study docs/studies/a-decade-of-tables: predictions beside published figures, by source, in a table and a picture.

    python benchmarks/decade.py --published ../shared/published

Reads docs/benchmarks/published/predictions.csv, which `published.py` wrote, and prints the tables of the page: errors
of speed-ups by source beside those of "n devices are n times as fast", the rows that are farthest off, and figures of
the history of the field.
"""

import argparse
import csv
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring.published_networks import work

from convoy import models
from convoy.hardware.catalog import device_named, machine
from convoy.hardware.exchange import Scheme, Site, step
from convoy.hardware.speed import Software
from convoy.planner.machines import PRECISIONS, predict
from convoy.planner.workload import workload_of
from convoy.report import axes as ax

ROOT = Path(__file__).parents[1]
PREDICTIONS = ROOT / "docs" / "benchmarks" / "published" / "predictions.csv"
STUDY = ROOT / "docs" / "studies" / "a-decade-of-tables"
KEYS = ("source", "model", "dataset", "gpu", "interconnect", "n_gpus", "batch_per_gpu", "scheme")
IMAGENET = 1_281_167


@dataclass(frozen=True)
class Pair:
    """A speed-up, published and predicted."""

    row: dict[str, str]
    count: int
    true: float
    predicted: float

    @property
    def error(self) -> float:
        """The logarithm of predicted over published."""
        return math.log(self.predicted / self.true)


def read(published: Path) -> list[Pair]:
    with PREDICTIONS.open(newline="", encoding="utf-8") as file:
        predicted = {tuple(row[key] for key in KEYS): row["speedup_vs_1"] for row in csv.DictReader(file)}
    found = []
    with (published / "scaling.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            count, guess = int(float(row["n_gpus"])), predicted.get(tuple(row[key] for key in KEYS), "")
            if count > 1 and row["speedup_vs_1"] and guess:
                found.append(Pair(row, count, float(row["speedup_vs_1"]), float(guess)))
    return found


def mean(errors: list[float]) -> float:
    return math.expm1(statistics.fmean(map(abs, errors)))


def short(source: str) -> str:
    return source.replace("Lambda lambda-tensorflow-benchmark raw log ", "Lambda TF, ").split(" (tf_cnn")[0][:72]


def by_source(pairs: list[Pair]) -> None:
    sources: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        sources[pair.row["source"]].append(pair)
    STUDY.mkdir(parents=True, exist_ok=True)
    with (STUDY / "by-source.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["source", "rows", "error", "error of linear"])
        print("| source | rows | error | of linear |\n| --- | --- | --- | --- |")
        for source, own in sorted(sources.items(), key=lambda item: -len(item[1])):
            errors = mean([pair.error for pair in own]), mean([math.log(pair.count / pair.true) for pair in own])
            writer.writerow([source, len(own), *(f"{error:.3f}" for error in errors)])
            print(f"| {short(source)} | {len(own)} | {errors[0]:.1%} | {errors[1]:.1%} |")
    print("\n| the farthest off | devices | published | predicted |\n| --- | --- | --- | --- |")
    seen: set[tuple[str, str]] = set()
    for pair in sorted(pairs, key=lambda pair: -abs(pair.error)):
        key = pair.row["source"], pair.row["scheme"]
        if key not in seen and len(seen) < 12:
            seen.add(key)
            what = (
                f"{pair.row['model']}, {pair.row['gpu']}, {pair.row['scheme'][:40]} ({short(pair.row['source'])[:40]})"
            )
            print(f"| {what} | {pair.count} | {pair.true:.2f} | {pair.predicted:.2f} |")


def picture(pairs: list[Pair]) -> None:
    groups = [
        ("TensorFlow, 2017", "TensorFlow official", ax.TRAIN),
        ("Lambda, TensorFlow", "Lambda lambda-tensorflow", ax.TEST),
        ("Lambda, PyTorch", "Lambda deeplearning", ax.GREEN),
        ("NVIDIA", "NVIDIA", ax.PURPLE),
        ("all others", "", ax.OCHRE),
    ]
    with ax.house_style():
        figure = ax.new_figure(360)
        axes = ax.add_axes(figure, "Part of linear: predicted over published", "published speed-up / devices", above=88)
        left = list(pairs)
        for label, start, color in groups:
            own = [pair for pair in left if pair.row["source"].startswith(start)]
            left = [pair for pair in left if pair not in own]
            x, y = [pair.true / pair.count for pair in own], [pair.predicted / pair.count for pair in own]
            axes.plot(x, y, ".", color=color, label=label, markersize=3, alpha=0.6)
        axes.plot([0.05, 1.2], [0.05, 1.2], color=ax.MUTED, linewidth=0.8)
        axes.set_xlim(0.05, 1.2)
        axes.set_ylim(0.05, 1.2)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, markerscale=3, **ax.LEGEND)
        figure.savefig(STUDY / "predicted.svg", format="svg", metadata={"Date": None})


def history() -> None:
    """Figures that are in no table, or of which the table has only a part."""

    def rate(
        network: str, device: str, count: int, images: float, site: Site, software: Software, precision: str
    ) -> float:
        done = step(
            work(network), images, device_named(device), precision, software, count, site, Scheme(feed="synthetic")
        )
        return count * images / done.seconds

    print("\n| figure | published | predicted |\n| --- | --- | --- |")
    caffe2, p100 = Software("caffe2", 6), Site(8, "nvlink1", "50gbit")
    few, many = (rate("resnet50", "p100-sxm2", count, 32, p100, caffe2, "fp32") for count in (8, 256))
    hours = [90 * IMAGENET / one / 3600 for one in (few, many)]
    print(
        f"| Goyal et al., 2017: ResNet-50, 90 epochs, 8 and 256 P100 | 29 h, 1 h | {hours[0]:.1f} h, {hours[1]:.2f} h |"
    )
    abci = Site(4, "nvlink2", "infiniband-edr-2")
    fast = rate("resnet50", "v100-sxm2", 2048, 40, abci, Software("dali-mxnet", 8, False, True), "fp16")
    print(f"| Yamazaki et al., 2019: ResNet-50, 90 epochs, 2,048 V100 | 74.7 s | {90 * IMAGENET / fast:.0f} s |")
    pod, tpu = Site(4, "ici3", "ici3"), Software("dali-tensorflow", 8, True, True)
    some, all_of = (rate("resnet50", "tpu-v3", count, 32, pod, tpu, "fp16") for count in (1, 1024))
    print(f"| Ying et al., 2018: ResNet-50, efficiency on 1,024 TPU v3 | near linear | {all_of / some / 1024:.0%} |")
    k80, torch7 = Site(8, "pcie3"), Software("pytorch", 5)
    some, all_of = (rate("cifar", "k80", count, 256, k80, torch7, "fp32") for count in (1, 8))
    print(f"| ResNet-50 on CIFAR-10, 256 images on each of 8 K80 dies | 90 % | {all_of / some / 8:.0%} |")
    k40, caffe = Site(8, "pcie3"), Software("caffe", 5)
    some, *more = (rate("alexnet-2012", "k40", count, 128, k40, caffe, "fp32") for count in (1, 2, 4, 8))
    faster = ", ".join(f"{one / some:.1f}" for one in more)
    print(f"| 2, 4, 8 GPUs, network and GPU not said; predicted: AlexNet on K40 | 1.7, 3.5, 6.2 | {faster} |")
    images = torch.empty(1, 3, 224, 224)
    with torch.device("meta"):
        network = models.create("googlenet")
    workload = workload_of(network, images, 128, name="googlenet", precision=PRECISIONS["fp32"])
    old = Software("mxnet", 5)
    seconds = [
        50_000 / predict(workload, machine(one), "fp32", software=old, searching=False).images_per_s
        for one in ("1xtitan-x", "2xtitan-x+1xgtx-1080")
    ]
    print(
        "| GoogLeNet, 50,000 images, batch 128, one Titan X; with another and a GTX 1080 "
        f"| 325 s, 143 s (2.27 ×) | {seconds[0]:.0f} s, {seconds[1]:.0f} s ({seconds[0] / seconds[1]:.2f} ×) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, required=True, help="the folder with scaling.csv")
    pairs = read(parser.parse_args().published)
    by_source(pairs)
    picture(pairs)
    history()


if __name__ == "__main__":
    main()
