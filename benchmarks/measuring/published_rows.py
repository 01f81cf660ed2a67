"""What the words of published tables mean: from a row of `scaling.csv` to a device, a machine, software and a scheme.

Only the columns that say how something was measured are read. Some of them hold results too (`2367 ms/batch`,
`train=63.89s`, `98.05 h/90 epochs`): these are not read.
"""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from convoy.hardware.catalog import Device, device_named
from convoy.hardware.exchange import Scheme, Site
from convoy.hardware.speed import Software, memory_of
from measuring.published_networks import work

KEYS = ("source", "model", "dataset", "gpu", "interconnect", "n_gpus", "batch_per_gpu", "scheme")

_NETWORKS = {
    "ResNet-50": "resnet50",
    "ResNet-50 v1.5": "resnet50",
    "ResNet-101": "resnet101",
    "ResNet-152": "resnet152",
    "InceptionV3": "inception-v3",
    "Inception-v3": "inception-v3",
    "InceptionV4": "inception-v4",
    "Inception-BN": "inception-bn",
    "Inception-BN-28-small (CIFAR)": "inception-small",
    "GoogLeNet": "googlenet",
    "VGG16": "vgg16",
    "VGG": "vgg16",
    "VGGNet": "vgg16",
    "AlexNet": "alexnet",
    "AlexNet-like": "alexnet-2012",
    "AlexNet (group=1)": "alexnet-wide",
    "AlexNet (no grouped conv)": "alexnet-wide",
    "AlexNet (row commented out in the README source)": "alexnet-wide",
    "AlexNet one-tower (OWT)": "alexnet",
    "AlexNet-OWT one-tower (layers-imagenet-1gpu.cfg)": "alexnet",
    "SSD300-ResNet50 (COCO)": "ssd300",
    "ResNeXt101-32x4d": "resnext101",
    "SE-ResNeXt101-32x4d": "se-resnext101",
    "EfficientNet-B0": "efficientnet-b0",
    "EfficientNet-B4": "efficientnet-b4",
    "EfficientNet-WideSE-B0": "efficientnet-wide-b0",
    "EfficientNet-WideSE-B4": "efficientnet-wide-b4",
    "U-Net (5,64)": "unet",
    "AmoebaNet-D (18,256)": "unet",  # only how it cuts into even stages matters
    "Network-in-Network": "nin",
}

_DEVICES = [
    ("2080 Ti", "rtx-2080-ti"),
    ("2080 Super with Max-Q", "rtx-2080-super-max-q"),
    ("2080 with Max-Q", "rtx-2080-max-q"),
    ("2070 with Max-Q", "rtx-2070-max-q"),
    ("RTX 8000", "quadro-rtx-8000"),
    ("Quadro RTX 6000", "quadro-rtx-6000"),
    ("RTX 6000 Ada", "rtx-6000-ada"),
    ("K80", "k80"),
    ("K520", "k520"),
    ("K20X", "k20x"),
    ("K20", "k20"),
    ("K40", "k40"),
    ("M60", "m60"),
    ("M40", "m40"),
    ("P40", "p40"),
    ("P100-SXM2", "p100-sxm2"),
    ("P100 (DGX-1)", "p100-sxm2"),
    ("P100-PCIe", "p100-pcie"),
    ("P100", "p100-sxm2"),
    ("Pascal GPU", "p100-pcie"),
    ("V100-SXM3", "v100-sxm3"),
    ("V100-SXM2-32GB", "v100-sxm2-32gb"),
    ("V100-PCIe", "v100-pcie"),
    ("V100", "v100-sxm2"),
    ("A100-PCIE-40GB", "a100-pcie-40gb"),
    ("A100 40GB PCIe", "a100-pcie-40gb"),
    ("A100 80GB PCIe", "a100-pcie-80gb"),
    ("A100 80GB SXM4", "a100-sxm4-80gb"),
    ("A100-SXM4-80GB", "a100-sxm4-80gb"),
    ("A100-SXM4-40GB", "a100-sxm4"),
    ("GH200", "gh200"),
    ("H200", "h200-sxm"),
    ("B200", "b200"),
    ("H100 80GB PCIe", "h100-pcie"),
    ("H100", "h100-sxm5"),
    ("A6000", "rtx-a6000"),
    ("A10", "a10"),
    ("RTX 4090", "rtx-4090"),
    ("3090", "rtx-3090"),
    ("3080", "rtx-3080"),
    ("3070", "rtx-3070"),
    ("1080 Ti", "gtx-1080-ti"),
    ("GTX 1070", "gtx-1070"),
    ("GTX 980", "gtx-980"),
    ("Titan X", "titan-x"),
    ("GTX Titan", "gtx-titan"),
    ("Radeon", "radeon-vii"),
]


@dataclass(frozen=True)
class Row:
    """A row, understood."""

    key: tuple[str, ...]  # its columns, as the scorer knows it
    network: str  # its name in `published_networks.work`
    device: Device
    precision: str
    software: Software
    images: float  # of one device; images of one step
    images_alone: float  # of one device in the row that the speed-up is over
    count: int  # devices
    site: Site  # their host, and what is between hosts
    scheme: Scheme  # how gradients were added
    rate: float | None
    speedup: float | None  # as published; None where the table does not say
    refused: str = ""  # why the row cannot be predicted; empty where it can

    @property
    def source(self) -> str:
        """Who published it."""
        return self.key[0]


def read(path: Path) -> Iterator[Row]:
    """The rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    timed = path.parent / "scaling.csv"
    with (timed if timed.exists() else path).open(newline="", encoding="utf-8") as file:
        batches: Batches = {}
        for row in csv.DictReader(file):
            if row["n_gpus"] == "1" and (images := _number(row["batch_per_gpu"])):
                batches.setdefault((row["source"], row["model"], row["gpu"]), set()).add(images)
    cards: dict[tuple[str, str], int] = {}
    for row in rows:
        machine = row["source"], row["gpu"]
        cards[machine] = max(cards.get(machine, 1), int(float(row["n_gpus"])))
    for row in rows:
        yield _row(row, batches, cards[row["source"], row["gpu"]])


OURS = Path(__file__).with_name("ours.csv")
"""What this project measured, as `scaling.csv` has it, bf16 and channels_last; the year ends the source's name."""


Batches = dict[tuple[str, str, str], set[float]]
"""Images with which one device was timed, by source, network and device."""


def _alone(row: dict[str, str], images: float, count: int, batches: Batches) -> float:
    """The images of one device in the row that the speed-up is over: as many, where there is such a row."""
    if row["source"].startswith("Yadan") or _TOTAL.search(row["scheme"]):
        return images * count
    if row["source"].startswith("FireCaffe"):
        return 32.0
    known = batches.get((row["source"], row["model"], row["gpu"]), set())
    return images if images in known or not known else min(known, key=lambda one: abs(math.log(one / images)))


def family(source: str) -> str:
    """Sources that are near-copies of each other have one family."""
    for start in ("Lambda lambda-tensorflow", "Lambda deeplearning", "rossumai", "tensorpack", "MXNet", "PaddlePaddle"):
        if source.startswith(start):
            return start
    for start in ("Horovod", "NVIDIA DLE", "Dell", "FlexFlow", "Goyal"):
        if source.startswith(start):
            return start
    return source


def _row(row: dict[str, str], batches: Batches, cards: int) -> Row:
    refused = ""
    device = next((name for words, name in _DEVICES if words in row["gpu"]), None)
    if device is None:
        device, refused = "k40", f"the table does not say which device: {row['gpu']}"
    count = int(float(row["n_gpus"]))
    software, precision = _software(row, device_named(device))
    network = _NETWORKS.get(row["model"])
    if network is None:
        network, refused = "alexnet", f"not one network: {row['model']}"
    if network == "alexnet" and software.framework in ("mxnet", "theano"):
        network = "alexnet-wide" if software.framework == "mxnet" else "alexnet-2012"
    site, scheme = _site(row, device_named(device), count, cards), _scheme(row, software, precision)
    images = _number(row["batch_per_gpu"]) or _usual_batch(row, network, device_named(device), precision)
    return Row(
        key=tuple(row[key] for key in KEYS),
        network=network,
        device=device_named(device),
        precision=precision,
        software=software,
        images=images,
        images_alone=_alone(row, images, count, batches),
        count=count,
        site=site,
        scheme=scheme,
        rate=_number(row.get("images_per_s", "")),
        speedup=_number(row.get("speedup_vs_1", "")),
        refused=refused,
    )


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _usual_batch(row: dict[str, str], network: str, device: Device, precision: str) -> float:
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
    while images > 8 and memory_of(work(network), images, precision) > 0.8 * device.memory_gb * 1e9:
        images /= 2
    return images


_TOTAL = re.compile(r"batch-size (\d+) total in command")
"""Where one command, with its images of all devices together, was run on any number of devices."""

_FRAMEWORKS = [
    ("lambda-tensorflow", "tensorflow"),
    ("Lambda deeplearning", "pytorch"),
    ("TensorFlow official", "tensorflow"),
    ("MXNet RN50", "dali-mxnet"),
    ("DLE PyTorch", "dali-pytorch"),
    ("DLE TensorFlow", "dali-tensorflow"),
    ("DLE Paddle", "dali-paddle"),
    ("MXNet", "mxnet"),
    ("mxnet", "mxnet"),
    ("framework=PaddlePaddle", "paddle"),
    ("framework=TensorFlow", "tensorflow-0"),
    ("Caffe", "caffe"),
    ("tf_cnn_benchmarks", "tensorflow"),
    ("Keras", "keras"),
    ("tensorpack", "tensorflow"),
    ("tensorflow/benchmarks", "tensorflow"),
    ("Horovod", "tensorflow"),
    ("horovod", "tensorflow"),
    ("aws-samples", "tensorflow"),
    ("FlexFlow issue", "flexflow"),
    ("torchgpipe", "pytorch"),
    ("Theano", "theano"),
    ("Minerva", "minerva"),
    ("Krizhevsky", "cuda-convnet"),
    ("cuda-convnet", "cuda-convnet"),
    ("Yadan", "cuda-convnet"),
    ("Goyal", "caffe2"),
    ("Akiba", "chainer"),
]


def _software(row: dict[str, str], device: Device) -> tuple[Software, str]:
    source, scheme = row["source"], row["scheme"]
    if source.startswith("Convoy"):
        ways = {way: way in scheme for way in ("compiled", "recorded", "kernels")}
        return Software("pytorch", 9, channels_last=True, generation=source[-4:], **ways), "fp16"
    framework = next((name for words, name in _FRAMEWORKS if words in source), "other")
    if "DP (TensorFlow)" in scheme:
        framework = "tensorflow"
    new = device.generation in ("ampere", "ada", "hopper", "blackwell")
    cudnn = 8 if new or "DLE" in source or "deeplearning-benchmark" in source else 7
    if re.search(r"cuDNN ?5|2017|Horovod README", source):
        cudnn = 5
    if "cuDNN7" in source or "TF2_3" in source:
        cudnn = 7
    if re.search(r"cuDNN v2|2015|FireCaffe", source):
        cudnn = 3
    if framework == "cuda-convnet":
        cudnn = 2
    if "_v2" in source:
        cudnn = 9
    text = f"{scheme} {source}"
    half = re.search(r"fp16|mixed|\bAMP\b", scheme, re.I) and "fp16 exchange" not in scheme
    precision = "fp16" if half or "fp16" in source else "fp32"
    if precision == "fp32" and new and "TF2_3" not in text:
        precision = "tf32"
    last = framework.startswith("dali") and precision == "fp16"
    return Software(framework, cudnn, "XLA" in text, last), precision


def _site(row: dict[str, str], device: Device, count: int, cards: int) -> Site:
    """The host, which has as many cards as its source used at most, and the network of a row."""
    text, gpu = row["interconnect"], row["gpu"]
    per_host, network, sockets = 8, "infiniband-edr", 2
    link = device.host if device.peer else "pcie3-host"
    if "x1 risers" in text or "7gforce" in gpu:
        link, per_host, sockets = "pcie3-x1", 6, 1
    elif "x8-class" in text:
        link, per_host = "pcie3-x8", 4
    elif "PCIe 2.0" in text:
        link = "pcie2"
    elif "g2.8xlarge" in text:
        link, per_host, network = "pcie3-host", 4, "10gbit"
    elif "Gold_6230" in row["source"]:  # Lambda's two machines with Xeon Gold 6230
        link = "pcie3-host" if not device.peer else "pcie3"
        if "trt2" in row["source"]:
            link = (
                "pcie3-bridge"
                if "NVLink" in row["source"] and not device.peer
                else f"{link.removesuffix('-host')}-shared"
            )
            link = "pcie3" if device.peer else link
    elif "NVSwitch" in text and device.generation in ("volta",) and "SXM3" not in gpu:
        link = "nvlink2"
    elif "PCIe" in text and "nv" in device.host:
        link = "pcie3"
    elif text.startswith(("PCIe", "GPU pair")) and not device.peer:
        # eight cards and what else a host has ask for more lanes than its sockets give: pairs share theirs
        link = "pcie3-shared" if cards > 4 else "pcie3-host"
    if link == "nvlink1" and "2017" in row["source"]:
        link = "nvlink1-ring"  # TensorFlow carried NCCL 1 until 2018
    if "K80" in gpu:
        link, network = "pcie3", "10gbit"
        per_host = 16 if "16xlarge" in text else 8
        network = "20gbit" if "20GbE" in text else network
    if "4 servers x4" in text or "x4, 25Gb" in text:
        per_host, network = 4, "25gbit"
    if "40GbE" in text:
        per_host, network = 4, "40gbit"
    if "50GbE" in text or "Goyal" in row["source"]:
        network = "50gbit"
    if "25GbE" in text:
        network = "25gbit"
    if "horovod" in row["scheme"].lower():
        if "TCP" in row["scheme"] or "GbE" in text:
            network = "12gbit"  # a ring has one stream of TCP between two hosts, and one core copies it
        elif network == "25gbit":
            network = "2.8GB/s"  # as much, but the card copies: a message takes less
    if "4 GPUs/node" in text:
        per_host = 4
    if "Cray" in text:
        per_host, network = 1, "infiniband-fdr"
    if "DGX-2" in gpu:
        per_host = 16
    if "A100" in gpu and "IB" in text:
        network = "infiniband-hdr-8"
    elif "IB" in text:
        network = "infiniband-edr-4"
    if "Akiba" in row["source"]:
        network = "infiniband-fdr-2"
    memory = next((rate for words, rate in _MEMORY if re.search(words, row["source"])), 140.0)
    cores = next((number for words, number in _CORES if re.search(words, f"{row['source']} {gpu} {text}")), 32)
    return Site(min(per_host, count), link, network, sockets, memory, cores)


_MEMORY = [("3960X|3970X", 102.0), ("Gold_6230|Platinum", 280.0), ("raw log 7[57]", 205.0), ("raw log i7", 45.0)]
"""GB/s of the memory of hosts by their processors, where the source names them: channels of DDR4."""


_CORES = [("E5-1650", 6), ("g2.8xlarge|p2.8xlarge|p3.8xlarge|n1-standard-32|E5-2630v3", 16), ("DGX|NVSwitch", 40)]
"""Cores of hosts that the tables name, by the vendors' lists; two threads of a cloud are one."""


def _scheme(row: dict[str, str], software: Software, precision: str) -> Scheme:
    """How gradients were added, and what else bound the rate."""
    text, source, data = row["scheme"], row["source"], row["dataset"]
    framework = software.framework
    itemsize = 2 if "fp16 exchange" in text else 4
    feed = "real" if data in ("ImageNet-real", "ImageNet", "COCO") else "fake" if "fake" in data else "synthetic"
    if framework.startswith("dali") and feed == "real":
        feed = "gpu"
    if source.startswith(("Krizhevsky", "cuda-convnet", "Yadan", "FireCaffe", "Minerva", "Theano", "Lambda deep")):
        feed = "synthetic"
    kind, overlap, fused = "ring", True, True
    low = text.lower()
    if framework == "keras":
        kind, overlap = "keras", False
    elif "distributed tensorflow ps" in low or "distributed_replicated" in low:
        kind = "servers-gpu" if "on cpu" not in low and "horovod" in source.lower() else "servers"
    elif "parameter_server(gpu)" in low or "ps gpu" in low:
        kind = "server-gpu"
    elif "parameter_server" in low or "ps cpu" in low:
        kind = "host"
    elif "replicated no nccl" in low or "without nccl" in low or "kvstore=local_allreduce_device" in low:
        kind = "server-gpu"
    elif "kvstore=local" in low:
        kind = "host"
    elif "dist_device_sync" in low or "dist_sync" in low:
        kind = "servers"
    elif "independent" in low:
        kind = "none"
    elif "allreduce on cpu" in low or "on cpu" in low:
        kind = "host-ring"
    elif "conv dp + fc mp" in low:
        kind, overlap = "one-weird-trick", True
    elif text.startswith("PP ") or "pipeline" in low:
        kind = "pipeline" if "baseline" not in low else "none"
    elif text.startswith("MP;"):
        kind, overlap = "model", False
    elif text.startswith("hybrid"):
        kind, overlap = "hybrid", False
    elif "reduction tree" in low or "tree reduction" in low:
        kind, overlap = "tree", False
    elif ("replicated" in low and "lambda-tensorflow" in source) or "issue #283" in source:
        kind = "replicated"
    elif source.startswith("Yadan"):
        kind, overlap = "host", False
    elif source.startswith("PaddlePaddle") or "Minerva" in source:
        kind = "host"
    elif "BVLC" in source:
        kind, overlap = "tree", False
    if "not overlapped" in low or framework in ("caffe", "theano", "flexflow"):
        overlap = False
    if "Aug-2017" in source or "distributed tensorflow ps" in low:
        fused = False
    if framework == "tensorflow" and kind in ("ring", "replicated", "host", "server-gpu") and "horovod" not in low:
        fused = False  # tf_cnn_benchmarks packs gradients only where it is told to, and sends them as they are computed
        itemsize = 2 if precision == "fp16" else 4
    stages = re.search(r"PP n=(\d+) partitions, m=(\d+)", text)
    parts = int(stages[2]) if stages else 32 if kind == "pipeline" else 1
    cycle = 5e-3 if "horovod" in low else 0.0  # its default until 2020, HOROVOD_CYCLE_TIME
    return Scheme(kind, overlap, fused, itemsize, cycle, feed, parts, relative=stages is not None)
