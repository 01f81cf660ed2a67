"""Photographs a second from files, from packs and from raw packs, beside other loaders.

    python benchmarks/input.py --data PHOTOGRAPHS
    python benchmarks/input.py --data PHOTOGRAPHS --sides convoy pillow --seconds 5
    python benchmarks/input.py --data PHOTOGRAPHS --trainer 0.6
    python benchmarks/input.py --data PHOTOGRAPHS --before OTHER/src
    python benchmarks/input.py --samples 1300000

Every side runs in processes of its own and gives batches of uint8 pictures, 224 pixels wide: a random part, resized,
every second one mirrored. After a first second the pictures are counted, and the time that all cores spent on these
processes. The claim: convoy gives the most pictures for a core's second in each class. `--before` is another version of
Convoy, as from `git worktree add OTHER COMMIT`.
"""

import argparse
import importlib.util
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import harness, machine
from PIL import Image

SIZE, BATCH = 224, 64
QUIET = os.environ | {"GOMP_SPINCOUNT": "10000"}
"""As in `convoy train`: a thread that waits for others soon leaves its core to the workers."""
CLASSES = ("files", "packed", "raw")
"""The photographs as they are; with a short side of 256 pixels, as JPEG of quality 90; the same as pixels."""


def convoy(path: Path, kind: str, workers: int | None, decoder: str | None = "turbo") -> Iterator[Any]:
    from convoy.data import AugmentConfig, DataConfig, Order, open_data, training_batches

    augment = AugmentConfig(crop="random-resized", flip=True)
    options: dict[str, Any] = {"path": str(path), "image_size": SIZE, "workers": workers}
    options |= {"decoder": decoder} if decoder else {}  # the other one is that of earlier versions, too
    config = DataConfig(**options, augment=augment, validation_fraction=0.01)
    data = open_data(config)
    order = Order(len(data.train), BATCH, seed=0)
    return training_batches(data, config, order, first_update=0, num_updates=10**6, seed=0)


def convoy_pillow(path: Path, kind: str, workers: int) -> Iterator[Any]:
    return convoy(path, kind, workers, None)


BEFORE = "convoy before"


def plain_crop(image: Image.Image) -> np.ndarray:
    """What torchvision's RandomResizedCrop and RandomHorizontalFlip do, by Pillow."""
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
    return np.asarray(image).transpose(2, 0, 1)


class Pictures(torch.utils.data.Dataset[Any]):
    """Files, read by Pillow."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> torch.Tensor:
        with Image.open(self.files[number]) as image:
            return torch.from_numpy(np.ascontiguousarray(plain_crop(image.convert("RGB"))))


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".ppm"))


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def torch_pillow(path: Path, kind: str, workers: int) -> Iterator[Any]:
    return endless(_loader(Pictures(files_of(path)), workers, shuffle=True))


def timm(path: Path, kind: str, workers: int) -> Iterator[Any]:
    from timm.data import create_dataset, create_loader

    data = create_dataset("", root=str(path), split="train", is_training=True)
    loader = create_loader(
        data,
        (3, SIZE, SIZE),
        BATCH,
        is_training=True,
        use_prefetcher=True,
        num_workers=workers,
        interpolation="bilinear",
        color_jitter=None,
        device=torch.device("cpu"),
        persistent_workers=True,
        pin_memory=False,
    )
    return (batch[0] for batch in endless(loader.loader))  # before it is normalized


def _from_bytes(sample: Any) -> torch.Tensor:
    image = Image.open(io.BytesIO(sample[0])).convert("RGB")
    return torch.from_numpy(np.ascontiguousarray(plain_crop(image)))


def webdataset(path: Path, kind: str, workers: int) -> Iterator[Any]:
    import webdataset as wds

    tars = [str(file) for file in sorted(path.glob("*.tar"))]
    data = (
        wds.WebDataset(tars, resampled=True, shardshuffle=False, nodesplitter=wds.split_by_node)
        .shuffle(1000)
        .to_tuple("jpg;jpeg;ppm")
        .map(_from_bytes)
        .batched(BATCH, collation_fn=_stacked)
    )
    return endless(wds.WebLoader(data, batch_size=None, num_workers=workers))


def _stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def litdata(path: Path, kind: str, workers: int) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(str(path), shuffle=True, transform=_from_dictionary)
    return endless(StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, drop_last=True))


def _from_dictionary(sample: Any) -> torch.Tensor:
    return _from_bytes([sample["image"]])


def streaming(path: Path, kind: str, workers: int) -> Iterator[Any]:
    from streaming import StreamingDataset

    class Streamed(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, number: int) -> torch.Tensor:
            return _from_bytes([super().__getitem__(number)["image"]])

    data = Streamed(local=str(path), shuffle=True, batch_size=BATCH)
    return endless(_loader(data, workers, shuffle=False))


SIDES: dict[str, tuple[Callable[[Path, str, int], Iterator[Any]], str, dict[str, str]]] = {
    # how batches are made, the module it needs, and the form of the data for each class
    "convoy": (convoy, "convoy", {"files": "files", "packed": "packed", "raw": "raw"}),
    "convoy, pillow": (convoy_pillow, "convoy", {"files": "files", "packed": "packed", "raw": "raw"}),
    BEFORE: (convoy_pillow, "convoy", {"files": "files", "packed": "packed", "raw": "raw"}),
    "torch + Pillow": (torch_pillow, "torch", {"files": "files", "packed": "packed-files", "raw": "raw-files"}),
    "timm": (timm, "timm", {"files": "files", "packed": "packed-files"}),  # it reads no PPM
    "webdataset": (webdataset, "webdataset", {"files": "tars", "packed": "packed", "raw": "raw"}),
    "litdata": (litdata, "litdata", {"files": "litdata", "packed": "packed-litdata", "raw": "raw-litdata"}),
    "streaming": (streaming, "streaming", {"files": "mds", "packed": "packed-mds", "raw": "raw-mds"}),
}


def prepare(photographs: Path, work: Path, sides: list[str]) -> dict[str, Path]:
    """The photographs in every form."""
    forms = {"files": photographs}
    run = [sys.executable, "-m", "convoy", "data"]
    small = ["--short-side", "256"]
    for name, options in (("tars", []), ("packed", small), ("raw", [*small, "--raw"])):
        forms[name] = work / name
        subprocess.run([*run, "pack", str(photographs), str(forms[name]), *options], check=True, capture_output=True)
        forms[f"{name}-files"] = work / f"{name}-files"
        subprocess.run([*run, "unpack", str(forms[name]), str(work / f"{name}-files")], check=True, capture_output=True)
    for prefix in ("", "packed-", "raw-"):
        files = files_of(forms[f"{prefix}files"])
        if "litdata" in sides:
            forms[f"{prefix}litdata"] = work / f"{prefix}litdata"
            _write_litdata(files, forms[f"{prefix}litdata"])
        if "streaming" in sides:
            forms[f"{prefix}mds"] = work / f"{prefix}mds"
            _write_mds(files, forms[f"{prefix}mds"])
    return forms


def _loader(data: Any, workers: int, shuffle: bool) -> Any:
    loader: Any = torch.utils.data.DataLoader(
        data, BATCH, shuffle=shuffle, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    return loader


def _sample(file: str) -> dict[str, Any]:
    return {"image": Path(file).read_bytes()}


def _write_litdata(files: list[Path], folder: Path) -> None:
    from litdata import optimize

    optimize(_sample, [str(file) for file in files], str(folder), chunk_bytes="64MB", num_workers=1, verbose=False)


def _write_mds(files: list[Path], folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"image": "bytes"}) as writer:
        for file in files:
            writer.write({"image": file.read_bytes()})


def cpu_seconds() -> float:
    """Of all processes in this session that run now, and of those that they have waited for."""
    total, own, tick = 0, os.getsid(0), os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == own:
                total += sum(map(int, fields[11:15]))
    return total / tick


def measure(side: str, path: Path, kind: str, workers: int, seconds: float) -> dict[str, float]:
    """Pictures a second, by the clock and by a core's time. Runs in a session of its own."""
    torch.set_num_threads(1)
    batches = SIDES[side][0](path, kind, workers)
    began = time.perf_counter()
    while time.perf_counter() - began < 1 + seconds / 5:
        next(batches)
    began, before, num = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() - began < seconds:
        num += len(next(batches))
    passed = time.perf_counter() - began
    return {"per_s": num / passed, "per_core_s": num / (cpu_seconds() - before)}


def train(side: str, path: Path, kind: str, share: float, seconds: float) -> dict[str, float]:
    """How much of its time a trainer waits for data whose network needs `share` of all cores, and loading the rest.

    Network: a batch of convolutions, repeated until they take that share of the time beside the measured loading.
    """
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    layer = torch.nn.Conv2d(32, 32, 3, padding=1)
    images = torch.randn(4, 32, 56, 56)

    def update(times: int) -> None:
        for _ in range(times):
            layer(images).sum().backward()

    update(20)
    began = time.perf_counter()
    update(200)
    unit = (time.perf_counter() - began) / 200
    batches = SIDES[side][0](path, kind, cores)
    for _ in range(10):
        next(batches)
    began = time.perf_counter()
    for _ in range(50):
        next(batches)
    loading = (time.perf_counter() - began) / 50
    times = max(round(loading * share / (1 - share) / unit), 1)
    batches = convoy_adapting(path) if side == "convoy" else SIDES[side][0](path, kind, cores)
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


def convoy_adapting(path: Path) -> Iterator[Any]:
    """With as many workers as Convoy thinks fit."""
    return convoy(path, "", None)


def in_a_session(*arguments: str) -> dict[str, float] | None:
    """`measure` of a side by a fresh process; None where it fails."""
    command = [sys.executable, __file__, *arguments]
    paths = [os.environ.get("CONVOY_BEFORE", "") if BEFORE in arguments else "", os.environ.get("PYTHONPATH", "")]
    env = QUIET | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, env=env)
    if done.returncode:
        print(f"{arguments}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(
    photographs: Path, sides: list[str], classes: list[str], workers: list[int], seconds: float, rounds: int
) -> None:
    """All sides in turns, and the medians as a table."""
    print(machine.sentence(machine.describe()))
    with tempfile.TemporaryDirectory() as folder:
        forms = prepare(photographs, Path(folder), sides)
        for kind in classes:
            print(
                f"\n| {kind}, photographs a second | of a core's time | "
                + " | ".join(f"{n} workers" for n in workers)
                + " |"
            )
            print("| --- |" + " --- |" * (1 + len(workers)))
            reads = [side for side in sides if kind in SIDES[side][2]]
            found: dict[str, dict[int, list[dict[str, float]]]] = {side: {n: [] for n in workers} for side in reads}
            for _ in range(rounds):
                for side in reads:
                    for n in workers:
                        path = forms[SIDES[side][2][kind]]
                        one = in_a_session("--one", side, str(path), kind, str(n), str(seconds))
                        if one is not None:
                            found[side][n].append(one)
            for side, own in found.items():
                core = [each["per_core_s"] for n in workers for each in own[n]]
                walls = [statistics.median(each["per_s"] for each in own[n]) if own[n] else None for n in workers]
                cells = [statistics.median(core) if core else None, *walls]
                print(
                    f"| {side} | " + " | ".join("failed" if x is None else f"{x:,.0f}" for x in cells) + " |",
                    flush=True,
                )


def waits(photographs: Path, sides: list[str], classes: list[str], share: float, seconds: float, rounds: int) -> None:
    """How long a trainer waits for data, as a table."""
    print(machine.sentence(machine.describe()))
    print(
        f"\n| network {share:.0%} of all cores | waits for data | photographs a second "
        "| a batch's network alone | its loading alone |"
    )
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        forms = prepare(photographs, Path(folder), sides)
        for kind in classes:
            found: dict[str, list[dict[str, float]]] = {side: [] for side in sides if kind in SIDES[side][2]}
            for _ in range(rounds):
                for side in found:
                    path = str(forms[SIDES[side][2][kind]])
                    one = in_a_session("--trainer", str(share), "--one", side, path, kind, "0", str(seconds))
                    found[side] += [one] if one is not None else []
            for side, own in found.items():
                if own:
                    one = {key: statistics.median(each[key] for each in own) for key in own[0]}
                    alone = f"{one['network_s'] * 1e3:.1f} ms | {one['loading_s'] * 1e3:.1f} ms"
                    print(f"| {side}, {kind} | {one['waits']:.1%} | {one['per_s']:,.0f} | {alone} |", flush=True)


def grow(folder: Path, samples: int) -> None:
    """What the index of so many made-up samples takes: on disk, in time and memory to open, and of a worker."""
    from convoy.data.pack import Known, index_arrays, index_file
    from convoy.data.packed import INDEX, PER_SHARD, PackOptions, Statistics, shard_name

    rng = np.random.default_rng(0)
    sizes = rng.integers(10_000, 60_000, samples)
    known = []
    for number, start in enumerate(range(0, samples, PER_SHARD)):
        own = sizes[start : start + PER_SHARD]
        known.append(Known(number, np.cumsum(own + 1536).tolist(), own.tolist(), [0] * len(own), Statistics()))
        with (folder / shard_name("data", number)).open("wb") as file:
            file.truncate(2**28)
    made = Made(samples)
    what = {"version": 1, "name": "made", "format": "folder", "options": vars(PackOptions())}
    what |= {"classes": [f"n{k:08d}" for k in range(1000)], "statistics": {"data": vars(Statistics(samples))}}
    what |= {"shards": {shard_name("data", number): 2**28 for number in range(len(known))}}
    (folder / INDEX).write_bytes(index_file(index_arrays("data", made, known), what))  # type: ignore[arg-type]
    print(f"index of {samples:,} samples: {(folder / INDEX).stat().st_size / 1e6:.0f} MB")


class Made:
    """Samples with names as ImageNet's, and nothing else."""

    def __init__(self, samples: int) -> None:
        self.labels = np.arange(samples) % 1000

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, sample: int) -> str:
        return f"train/n{sample % 1000:08d}/n{sample % 1000:08d}_{sample}.JPEG"


def megabytes(key: str) -> float:
    """Of this process: Rss, or Anonymous, which it shares with nobody"""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1e3


def opened(folder: Path) -> None:
    """Open the pack, and let a worker look at every sample."""
    from convoy.data.packed import Pack
    from convoy.data.processes import forkserver

    before, began = megabytes("Rss"), time.perf_counter()
    source = Pack.open(folder).opened().train
    print(f"opened in {time.perf_counter() - began:.2f} s, {megabytes('Rss') - before:.0f} MB")
    for worker, part in (("with none of them", source.subset(np.arange(10))), ("with all", source)):
        began = time.perf_counter()
        process = forkserver("convoy.data.packed").Process(target=_look, args=(part, worker))
        process.start()
        process.join()


def _look(source: Any, worker: str) -> None:
    before = megabytes("Anonymous")
    for sample in range(len(source)):
        source.name(sample)
    print(f"a worker {worker}: {megabytes('Anonymous'):.0f} MB of its own, {before:.0f} MB to begin with", flush=True)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        required=not {"--one", "--samples"} & set(sys.argv),
        help="a folder of photographs by classes",
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument("--before", type=Path, metavar="SRC", help="another version of Convoy, as a side of its own")
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--trainer", type=float, metavar="SHARE", help="how long one waits whose network needs it")
    parser.add_argument("--samples", type=int, help="what the index of so many made-up ones takes")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        side, path, kind, number, seconds = options.one
        if options.trainer:
            print(json.dumps(train(side, Path(path), kind, options.trainer, float(seconds))))
        else:
            print(json.dumps(measure(side, Path(path), kind, int(number), float(seconds))))
        os._exit(0)  # workers of some sides would be waited for
    if options.samples:
        with tempfile.TemporaryDirectory() as folder:
            grow(Path(folder), options.samples)
            opened(Path(folder))
        return
    sides = options.sides or [name for name, (_, module, _) in SIDES.items() if importlib.util.find_spec(module)]
    if options.before:
        os.environ["CONVOY_BEFORE"] = str(options.before)
    else:
        sides = [side for side in sides if side != BEFORE]
    if options.trainer:
        waits(options.data, sides, options.classes, options.trainer, options.seconds, options.rounds)
    else:
        compare(options.data, sides, options.classes, options.workers, options.seconds, options.rounds)


if __name__ == "__main__":
    main()
