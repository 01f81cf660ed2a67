"""What making a picture ready for a batch costs: waiting for its bytes, decoding it, and the same from a pack of it."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convoy.data.batch import BatchMaker
from convoy.data.config import DataConfig
from convoy.data.dataset import DataSet
from convoy.data.decode import BadImage, turbo_lacks
from convoy.data.loader import batch_maker
from convoy.data.pack import packed_picture
from convoy.data.packed import PackOptions
from convoy.data.parquet import MemorySource
from convoy.data.sources import EncodedSource
from convoy.doctor.facts import Pictures
from convoy.errors import ConvoyError

_KINDS = 8  # measurements of pictures, at most, each of which gets as much of the time
_READERS = 8
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def _idle_s() -> float:
    """A clock that goes on while this thread waits for something else than a core, and stands still otherwise."""
    try:
        preempted = int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        preempted = 0.0
    return time.perf_counter() - time.thread_time() - preempted


def measure_pictures(
    data: DataSet, config: DataConfig, samples: NDArray[np.int64], seed: int, most_s: float = 32.0
) -> Pictures | None:
    """Make some pictures ready in this process, as a worker would; None where that cannot be measured.

    The training `samples` are ones that nobody has read yet, so that they come from where they are stored. All of it
    takes about `most_s` seconds, but each kind looks at one picture at least.
    """
    each_s, source = most_s / _KINDS, data.train
    try:
        maker = batch_maker(data, config, source, seed)
        side = max(data.resize, data.image_size)
        if not isinstance(source, EncodedSource):
            return Pictures(cpu_s=_cpu(maker, samples, each_s), in_memory=maker.vectorised, short_side=side)
        half = max(1, len(samples) // 2)
        read_s, read = _reading(source, samples[:half], each_s)
        if maker.skip_bad:
            read = np.array([sample for sample in read.tolist() if _is_good(source, sample)], np.int64)
            if not len(read):
                return None
        turbo_s = None
        if maker.decoder != "turbo" and not turbo_lacks():
            turbo = batch_maker(data, config.model_copy(update={"decoder": "turbo"}), source, seed)
            turbo_s = _cpu(turbo, read, each_s)
        packed_s, raw_s = (_packed(maker, source, read, PackOptions(side, raw), each_s) for raw in (False, True))
        at_once_s, cpu_s = _at_once(source, samples[half:], each_s), _cpu(maker, read, each_s)
        return Pictures(read_s, at_once_s, cpu_s, packed_s, raw_s, turbo_s, short_side=side)
    except (BadImage, ConvoyError):
        return None


def _reading(source: EncodedSource, samples: NDArray[np.int64], most_s: float) -> tuple[float, NDArray[np.int64]]:
    """Seconds that a picture's bytes are waited for, and the samples that were read."""
    began, idle_s, read = time.perf_counter(), _idle_s(), 0
    while read < len(samples) and (not read or time.perf_counter() - began < most_s):
        source.read(int(samples[read]))
        read += 1
    return max(0.0, _idle_s() - idle_s) / max(1, read), samples[:read]


def _is_good(source: EncodedSource, sample: int) -> bool:
    try:
        source.load(sample)
    except BadImage:
        return False
    return True


def _at_once(source: EncodedSource, samples: NDArray[np.int64], most_s: float) -> float:
    """Seconds for each of several pictures that are read at once; none is begun after the time is over."""
    began = time.perf_counter()

    def read(sample: int) -> tuple[bool, float]:
        start_s = time.thread_time()
        if in_time := time.perf_counter() < began + most_s:
            source.read(sample)
        return in_time, time.thread_time() - start_s

    with ThreadPoolExecutor(_READERS) as readers:
        of_samples = list(readers.map(read, samples.tolist()))
    wall_s = time.perf_counter() - began
    return max(0.0, wall_s - sum(cpu_s for _, cpu_s in of_samples)) / max(1, sum(done for done, _ in of_samples))


def _cpu(maker: BatchMaker, samples: NDArray[np.int64], most_s: float) -> float:
    """Seconds of the processor that a picture takes, but for the first ones, for which all that is needed is loaded."""
    if maker.vectorised:
        maker.make(samples, 0)
        start_s = time.thread_time()
        maker.make(samples, 0)
        return (time.thread_time() - start_s) / len(samples)
    times = list[float]()
    images = np.empty((1, *maker.shape), np.uint8)
    began = time.perf_counter()
    for place in range(len(samples)):
        start_s = time.thread_time()
        maker.fill(images, samples[place : place + 1], 0)
        times.append(time.thread_time() - start_s)
        if time.perf_counter() - began > most_s:
            break
    return float(np.mean(times[1:] or times))


def _packed(
    maker: BatchMaker, source: EncodedSource, samples: NDArray[np.int64], options: PackOptions, most_s: float
) -> float | None:
    """Seconds of the processor for a picture from a pack; None where packing changes nothing."""
    began, files = time.perf_counter(), []
    for sample in samples.tolist():
        files.append(packed_picture(source, sample, options)[0])
        if time.perf_counter() - began > most_s:
            break
    if all(source.read(sample) == file for sample, file in zip(samples.tolist(), files, strict=False)):
        return None
    settings: dict[str, Any] = {"seed": maker.seed, "skip_bad": False, "decoder": maker.decoder}
    of_pack = BatchMaker(MemorySource(source, files), maker.geometry, maker.channels, **settings)
    return _cpu(of_pack, np.arange(len(files)), most_s)
