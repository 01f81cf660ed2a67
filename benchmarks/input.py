"""Photographs a second from files, from packs and from raw packs, beside other loaders.

    python benchmarks/input.py --data PHOTOGRAPHS
    python benchmarks/input.py --data PHOTOGRAPHS --sides convoy pillow --seconds 5
    python benchmarks/input.py --data PHOTOGRAPHS --trainer 0.6
    python benchmarks/input.py --data PHOTOGRAPHS --before OTHER/src

Every side runs in processes of its own and gives batches of uint8 pictures, 224 pixels wide: a random part, resized,
every second one mirrored. After a first second the pictures are counted, and the time that all cores spent on these
processes. The claim: convoy gives the most pictures for a core's second in each class. `--before` is another version of
Convoy, as from `git worktree add OTHER COMMIT`. With `--trainer` a network needs that share of all cores, and loading
the rest: how long does it wait for data?
"""

import argparse
import importlib.util
import io
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import harness
from PIL import Image

SIZE, BATCH = 224, 64
CLASSES = ("files", "packed", "raw")
"""The photographs as they are; with a short side of 256 pixels, as JPEG of quality 90; the same as pixels."""
BEFORE = "convoy before"
Made = Iterator[Any]
"""Batches without end."""


def convoy(path: Path, workers: int | None, decoder: str | None = "turbo") -> Made:
    """Workers: None for as many as Convoy thinks fit."""
    from convoy.data.config import AugmentConfig, DataConfig
    from convoy.data.dataset import open_data
    from convoy.data.loader import training_batches
    from convoy.data.order import Order

    augment = AugmentConfig(crop="random-resized", flip=True)
    options: dict[str, Any] = {"path": str(path), "image_size": SIZE, "workers": workers}
    options |= {"decoder": decoder} if decoder else {}  # the other one is that of earlier versions, too
    config = DataConfig(**options, augment=augment, validation_fraction=0.01)
    data = open_data(config)
    order = Order(len(data.train), BATCH, seed=0)
    return training_batches(data, config, order, first_update=0, num_updates=10**6, seed=0)


def plain_crop(image: Image.Image) -> torch.Tensor:
    """What torchvision's RandomResizedCrop and RandomHorizontalFlip do, by Pillow."""
    image = image.convert("RGB")
    width, height = image.size
    for _ in range(10):
        area, shape = width * height * random.uniform(0.08, 1), np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * shape) ** 0.5), round((area / shape) ** 0.5)
        if w <= width and h <= height:
            break
    else:
        w = h = min(width, height)
    left, top = random.randint(0, width - w), random.randint(0, height - h)
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))


def _from_bytes(sample: Any) -> torch.Tensor:
    """Of a tuple or a dictionary."""
    content = sample["image"] if isinstance(sample, dict) else sample[0]
    return plain_crop(Image.open(io.BytesIO(content)))


class Pictures(torch.utils.data.Dataset[Any]):
    """Files, read by Pillow."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> torch.Tensor:
        with Image.open(self.files[number]) as image:
            return plain_crop(image)


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".ppm"))


def endless(loader: Any) -> Made:
    while True:
        yield from loader


def _loader(data: Any, workers: int, shuffle: bool) -> Made:
    options: dict[str, Any] = {"num_workers": workers, "drop_last": True, "persistent_workers": workers > 0}
    return endless(torch.utils.data.DataLoader(data, BATCH, shuffle=shuffle, **options))


def torch_pillow(path: Path, workers: int) -> Made:
    return _loader(Pictures(files_of(path)), workers, shuffle=True)


def timm(path: Path, workers: int) -> Made:
    from timm.data import create_dataset, create_loader

    data = create_dataset("", root=str(path), split="train", is_training=True)
    options: dict[str, Any] = {"is_training": True, "use_prefetcher": True, "interpolation": "bilinear"}
    options |= {"color_jitter": None, "persistent_workers": True, "pin_memory": False, "num_workers": workers}
    loader = create_loader(data, (3, SIZE, SIZE), BATCH, device=torch.device("cpu"), **options)
    return (batch[0] for batch in endless(loader.loader))  # before it is normalized


def webdataset(path: Path, workers: int) -> Made:
    import webdataset as wds

    tars = [str(file) for file in sorted(path.glob("*.tar"))]
    data = wds.WebDataset(tars, resampled=True, shardshuffle=False, nodesplitter=wds.split_by_node)
    data = data.shuffle(1000).to_tuple("jpg;jpeg;ppm").map(_from_bytes).batched(BATCH, collation_fn=torch.stack)
    return endless(wds.WebLoader(data, batch_size=None, num_workers=workers))


def litdata(path: Path, workers: int) -> Made:
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(str(path), shuffle=True, transform=_from_bytes)
    return endless(StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, drop_last=True))


def streaming(path: Path, workers: int) -> Made:
    from streaming import StreamingDataset

    class Streamed(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, number: int) -> torch.Tensor:
            return _from_bytes(super().__getitem__(number))

    return _loader(Streamed(local=str(path), shuffle=True, batch_size=BATCH), workers, shuffle=False)


OWN = {"files": "files", "packed": "packed", "raw": "raw"}
SIDES: dict[str, tuple[Callable[[Path, int], Made], str, dict[str, str]]] = {
    # how batches are made, the module it needs, and the form of the data for each class
    "convoy": (convoy, "convoy", OWN),
    "convoy, pillow": (partial(convoy, decoder=None), "convoy", OWN),
    BEFORE: (partial(convoy, decoder=None), "convoy", OWN),
    "torch + Pillow": (torch_pillow, "torch", {"files": "files", "packed": "packed-files", "raw": "raw-files"}),
    "timm": (timm, "timm", {"files": "files", "packed": "packed-files"}),  # it reads no PPM
    "webdataset": (webdataset, "webdataset", {"files": "tars", "packed": "packed", "raw": "raw"}),
    "litdata": (litdata, "litdata", {"files": "litdata", "packed": "packed-litdata", "raw": "raw-litdata"}),
    "streaming": (streaming, "streaming", {"files": "mds", "packed": "packed-mds", "raw": "raw-mds"}),
}


def prepare(photographs: Path, work: Path, sides: list[str]) -> dict[str, Path]:
    """The photographs in every form."""
    forms = {"files": photographs}
    small = ["--short-side", "256"]
    for name, options in (("tars", []), ("packed", small), ("raw", [*small, "--raw"])):
        forms[name], forms[f"{name}-files"] = work / name, work / f"{name}-files"
        harness.run_convoy("data", "pack", str(photographs), str(forms[name]), *options)
        harness.run_convoy("data", "unpack", str(forms[name]), str(forms[f"{name}-files"]))
    for prefix in ("", "packed-", "raw-"):
        files = files_of(forms[f"{prefix}files"])
        for side, kind, write in (("litdata", "litdata", _write_litdata), ("streaming", "mds", _write_mds)):
            if side in sides:
                forms[f"{prefix}{kind}"] = work / f"{prefix}{kind}"
                write(files, forms[f"{prefix}{kind}"])
    return forms


def _sample(file: str) -> dict[str, Any]:
    return {"image": Path(file).read_bytes()}


def _write_litdata(files: list[Path], folder: Path) -> None:
    from litdata import optimize

    optimize(_sample, [str(file) for file in files], str(folder), chunk_bytes="64MB", num_workers=1, verbose=False)


def _write_mds(files: list[Path], folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"image": "bytes"}) as writer:
        for file in files:
            writer.write(_sample(str(file)))


def cpu_seconds() -> float:
    """Of all processes in this session that run now, and of those that they have waited for."""
    total, own, tick = 0, os.getsid(0), os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == own:
                total += sum(map(int, fields[11:15]))
    return total / tick


def measure(side: str, path: Path, workers: int, seconds: float) -> dict[str, float]:
    """Pictures a second, by the clock and by a core's time. Runs in a session of its own."""
    torch.set_num_threads(1)
    batches = SIDES[side][0](path, workers)
    began = time.perf_counter()
    while time.perf_counter() - began < 1 + seconds / 5:
        next(batches)
    began, before, num = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() - began < seconds:
        num += len(next(batches))
    passed = time.perf_counter() - began
    return {"per_s": num / passed, "per_core_s": num / (cpu_seconds() - before)}


def train(side: str, path: Path, share: float, seconds: float) -> dict[str, float]:
    """How much of its time a trainer waits for data whose network needs `share` of all cores, and loading the rest.

    Network: a batch of convolutions, repeated until they take that share of the time beside the measured loading.
    """
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    layer, images = torch.nn.Conv2d(32, 32, 3, padding=1), torch.randn(4, 32, 56, 56)

    def update(times: int) -> None:
        for _ in range(times):
            layer(images).sum().backward()

    def load(times: int) -> None:
        for _ in range(times):
            next(batches)

    update(20)
    unit = harness.seconds_of(lambda: update(200)) / 200
    batches = SIDES[side][0](path, cores)
    load(10)
    loading = harness.seconds_of(lambda: load(50)) / 50
    times = max(round(loading * share / (1 - share) / unit), 1)
    batches = convoy(path, None) if side == "convoy" else SIDES[side][0](path, cores)
    for _ in range(10):
        next(batches)
        update(times)
    waited, num, began = 0.0, 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        asked = time.perf_counter()
        num += len(next(batches))
        waited += time.perf_counter() - asked
        update(times)
    passed = time.perf_counter() - began
    return {"waits": waited / passed, "per_s": num / passed, "network_s": times * unit, "loading_s": loading}


def one(options: argparse.Namespace, side: str, path: Path, workers: int) -> list[dict[str, float]]:
    """What a fresh process in a session of its own measures of a side; nothing where it fails."""
    asked = json.dumps([side, str(path), options.trainer or workers, options.seconds])
    command = [sys.executable, __file__, *(["--trainer", "1"] if options.trainer else []), "--one", asked]
    paths = [str(options.before or "") if side == BEFORE else "", os.environ.get("PYTHONPATH", "")]
    # as in `convoy train`: a thread that waits for others soon leaves its core to the workers
    env = os.environ | {"GOMP_SPINCOUNT": "10000", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, env=env, check=False)
    if done.returncode:
        harness.say(f"{side}, {path.name}: {done.stderr.strip().splitlines()[-1:]}")
        return []
    return [json.loads(done.stdout.splitlines()[-1])]


def compare(report: harness.Report, options: argparse.Namespace, sides: list[str]) -> None:
    """All sides in turns, and the medians as tables."""
    workers = [0] if options.trainer else options.workers
    if options.trainer:
        columns = ("waits for data", "photographs a second", "a batch's network alone", "its loading alone")
        report.header(f"network {options.trainer:.0%} of all cores", *columns)
    with tempfile.TemporaryDirectory() as folder:
        forms = prepare(options.data, Path(folder), sides)
        for kind in options.classes:
            able = [side for side in sides if kind in SIDES[side][2]]
            found = {(side, n): list[dict[str, float]]() for side in able for n in workers}
            for _ in range(options.rounds):
                for side, n in found:
                    found[side, n] += one(options, side, forms[SIDES[side][2][kind]], n)
            if not options.trainer:
                report.print("")
                report.header(f"{kind}, photographs a second", "of a core's time", *(f"{n} workers" for n in workers))
            for side in able:
                each = [found[side, n] for n in workers]
                if options.trainer:
                    alone = (f"{_median(each[0], key) * 1e3:.1f} ms" for key in ("network_s", "loading_s"))
                    waits, rate = (_median(each[0], key) for key in ("waits", "per_s"))
                    report.row(f"{side}, {kind}", f"{waits:.1%}", f"{rate:,.0f}", *alone)
                else:
                    whole = list(itertools.chain(*each))
                    rates = [_median(whole, "per_core_s"), *(_median(rounds, "per_s") for rounds in each)]
                    report.row(side, *("failed" if math.isnan(rate) else f"{rate:,.0f}" for rate in rates))


def _median(rounds: list[dict[str, float]], key: str) -> float:
    """Not a number where all failed."""
    return statistics.median(values[key] for values in rounds) if rounds else math.nan


def main() -> None:
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--data", type=Path, required="--one" not in sys.argv, help="photographs by classes")
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument("--before", type=Path, metavar="SRC", help="another version of Convoy, as a side of its own")
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--trainer", type=float, metavar="SHARE", help="how long one waits whose network needs it")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        side, path, number, seconds = options.one
        print(json.dumps((train if options.trainer else measure)(side, Path(path), number, seconds)), flush=True)
        os._exit(0)  # workers of some sides would be waited for
    sides = options.sides or [name for name, (_, module, _) in SIDES.items() if importlib.util.find_spec(module)]
    with harness.report(options.out) as report:
        compare(report, options, [side for side in sides if side != BEFORE or options.before])


if __name__ == "__main__":
    main()
