"""Puts what a run has trained to use: says what is on pictures, batches of files in turns on one rank or several; and
exports it for other programs, as ONNX or as a program of torch.export.
"""

import contextlib
import copy
import io
import itertools
import json
import logging
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from convoy.comm.ranks import Ranks
from convoy.data.decode import BadImage
from convoy.data.transforms import Normalize
from convoy.errors import ConvoyError, reason
from convoy.files import write_atomically
from convoy.resources import own_cores
from convoy.terminal import pip_install
from convoy.training.evaluation import mean_over_views
from convoy.training.precision import autocast_of, set_numerics
from convoy.training.restore import TrainedRun

_MAX_THREADS = 16
_SOON_S = 0.05  # names that come within this time are read ahead; before a longer wait, the answers so far are given
ExportFormat = Literal["onnx", "torch-export"]
Notes = dict[str, list[str] | list[float]]
SUFFIXES: dict[str, ExportFormat] = {".onnx": "onnx", ".pt2": "torch-export"}
TOLERANCE = 1e-3
NOTES = "convoy.json"  # the file within a `.pt2` that has classes, mean and standard deviation
Exported = tuple[bytes, Callable[[Tensor], Tensor]]  # the file's content, and what it computes when it is read back


@dataclass(frozen=True)
class FileClasses:
    """What is on a picture file."""

    name: str
    best: tuple[tuple[int, float], ...] = ()  # classes, by number, with probabilities, the likeliest first
    bad: str | None = None  # why the picture cannot be used; `best` is then empty


class Classifier:
    """A trained network that says which classes pictures are of: the `top` likeliest ones, or all where there are
    fewer.

    A batch is computed by one thread, and several batches at a time: by several threads a batch had other sums,
    probabilities differed in the sixth digit, and on two busy cores ResNet-18 took twice as long.
    """

    def __init__(self, run: TrainedRun, device: torch.device, top: int = 5) -> None:
        set_numerics(run.recipe)
        torch.set_num_threads(1)
        run.to(device)
        self._run = run
        self._device = device
        self._top = min(top, len(run.classes))
        self._normalize = Normalize(run.network_input.mean, run.network_input.std, device, run.memory_format)
        # One for each thread, with the same weights: a network may keep things in itself while it computes.
        self._networks: queue.SimpleQueue[nn.Module] = queue.SimpleQueue()
        self.num_threads = min(len(own_cores()), _MAX_THREADS)
        for network in _copies(run.network, self.num_threads):
            self._networks.put(network)

    def __call__(self, names: list[str]) -> list[FileClasses]:
        """What is on the pictures of a batch of files. Several threads may call it."""
        pictures = [self._read(name) for name in names]
        readable = [picture for picture in pictures if not isinstance(picture, BadImage)]
        best = iter(self._best(torch.from_numpy(np.stack(readable)))) if readable else iter(())
        return [
            FileClasses(name, bad=picture.reason) if isinstance(picture, BadImage) else FileClasses(name, next(best))
            for name, picture in zip(names, pictures, strict=True)
        ]

    def _read(self, name: str) -> np.ndarray | BadImage:
        try:
            return self._run.transform.pixels(name)
        except BadImage as bad:
            return bad

    def _best(self, images: Tensor) -> list[tuple[tuple[int, float], ...]]:
        network = self._networks.get()
        try:
            with torch.inference_mode(), autocast_of(self._run.recipe, self._device):
                pictures = self._normalize(images.to(self._device))
                views = self._run.recipe.evaluation_views
                outputs = mean_over_views(self._run.task, network, pictures, views).float().cpu()
        finally:
            self._networks.put(network)
        answers = self._run.task.answers(outputs)
        if self._run.task.name == "regression":
            return [tuple(enumerate(row)) for row in answers.tolist()]
        # As in an evaluation: of equally likely classes the first one.
        ranked = answers.sort(dim=1, descending=True, stable=True)
        classes, probabilities = (part[:, : self._top].tolist() for part in (ranked.indices, ranked.values))
        return [tuple(zip(*row, strict=True)) for row in zip(classes, probabilities, strict=True)]


def _copies(network: nn.Module, number: int) -> Iterator[nn.Module]:
    """A network and copies of it that share its weights; it alone where it cannot be copied."""
    yield network
    shared = {id(tensor): tensor for tensor in itertools.chain(network.parameters(), network.buffers())}
    for _ in range(number - 1):
        try:
            yield copy.deepcopy(network, dict(shared))
        except Exception:  # whatever somebody's module says to being copied
            return


def classify(
    classifier: Classifier,
    names: Iterable[str] | None,
    batch: int,
    ranks: Ranks | None = None,
    is_to_end: Callable[[], bool] = lambda: False,
) -> Iterator[list[FileClasses]]:
    """Classify picture files, `batch` at a time, while the names of the next ones are read: by rank 0, the other ranks
    have None. Yields the answers of the next batches, in the order of the names, the same on all ranks.

    Ranks and their threads take turns at the batches, each with the whole network: the batches, and so the answers, are
    the same on any number of them. `is_to_end` is asked on rank 0 before each turn, for whoever wants no more answers.
    """
    ranks = ranks or Ranks()
    num_threads = ranks.broadcast(classifier.num_threads)
    reader = _Reader(names, batch, ranks.num * num_threads) if names is not None else None
    waiting: list[Future[list[FileClasses]]] | None = None

    def turn_of_all() -> list[list[str]] | None:
        return None if reader is None or is_to_end() else reader.next(None if waiting is None else _SOON_S)

    # The threads switch warnings off and on while they read pictures, each for all.
    with ThreadPoolExecutor(num_threads, "convoy-predict") as pool, warnings.catch_warnings():
        while True:
            turn = ranks.first(turn_of_all)
            batches_here = turn[ranks.rank :: ranks.num] if turn else None
            begun = None if batches_here is None else [pool.submit(classifier, batch) for batch in batches_here]
            if waiting is not None:
                parts = ranks.gather([future.result() for future in waiting])
                in_order = itertools.chain.from_iterable(itertools.zip_longest(*parts, fillvalue=[]))
                yield list(itertools.chain.from_iterable(in_order))
            if turn is None:
                return
            waiting = begun


class _Reader:
    """Reads names ahead in a thread, up to `most` batches: nobody waits for the next ones who need not. The thread ends
    with the process, also while it waits for a name that nobody types."""

    def __init__(self, names: Iterable[str], batch: int, most: int) -> None:
        self._most, self._batches = most, queue.Queue[list[str] | BaseException](most)
        self._end: list[str] | BaseException | None = None  # an empty batch, or what went wrong
        threading.Thread(target=self._read, args=(iter(names), batch), daemon=True, name="convoy-names").start()

    def _read(self, names: Iterator[str], size: int) -> None:
        try:
            while batch := list(itertools.islice(names, size)):
                self._batches.put(batch)
            self._batches.put([])
        except BaseException as error:
            self._batches.put(error)

    def next(self, patience: float | None) -> list[list[str]] | None:
        """The batches that are there; none where the next does not come within so many seconds, None at the end."""
        turn: list[list[str]] = []
        with contextlib.suppress(queue.Empty):
            while self._end is None and len(turn) < self._most:
                batch = self._batches.get(timeout=_SOON_S if turn else patience)
                if isinstance(batch, BaseException) or not batch:
                    self._end = batch
                else:
                    turn.append(batch)
        if isinstance(self._end, BaseException) and not turn:
            raise self._end
        return None if self._end is not None and not turn else turn


def export(run: TrainedRun, form: ExportFormat, path: Path) -> float:
    """Write a trained network (on the CPU) as one file with a free batch size, whole or not at all; run it, and give
    the largest difference between its and the network's outputs on random images, as a part of the largest output.

    Its input is normalized pictures [batch, channels, height, width], its output logits [batch, classes]. Classes, mean
    and standard deviation are in the metadata of an ONNX model, and in `convoy.json` within a `.pt2` file
    (`extra_files` of `torch.export.load`). A ConvoyError says that the extra `onnx` is not installed, or that the
    network cannot be exported.
    """
    if not path.parent.is_dir():
        raise ConvoyError(f"the folder {path.parent} does not exist: make it, or choose another --to")
    if path.is_dir():
        suffix = next(suffix for suffix, suffix_form in SUFFIXES.items() if suffix_form == form)
        raise ConvoyError(f"{path} is a folder: name a file, e.g. --to {path / f'model{suffix}'}")
    if not os.access(path.parent, os.W_OK):
        raise ConvoyError(f"the folder {path.parent} cannot be written to: choose another --to")
    network_input = run.network_input
    shape = (2, network_input.channels, run.transform.image_size, run.transform.image_size)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    notes: Notes = {"classes": network_input.classes, "mean": list(network_input.mean), "std": list(network_input.std)}
    with torch.no_grad():
        outputs = run.network(images)
    wanted = run.task.heads(outputs)[0]
    network = run.network if isinstance(outputs, Tensor) else _MainHead(run).eval()
    content, outputs_of = (_onnx if form == "onnx" else _torch_export)(network, images, notes)
    difference = float((outputs_of(images) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
    if not difference <= TOLERANCE:
        raise ConvoyError(f"the exported network's outputs are off by {difference:.1e}: nothing was written")
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return difference


class _MainHead(nn.Module):
    """A network that gives several outputs, with the one that counts."""

    def __init__(self, run: TrainedRun) -> None:
        super().__init__()
        self.network, self._heads = run.network, run.task.heads

    def forward(self, images: Tensor) -> Tensor:
        return self._heads(self.network(images))[0]


def _onnx(network: nn.Module, images: Tensor, notes: Notes) -> Exported:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConvoyError(
            f"ONNX export needs {error.name or 'onnx'}: {pip_install('onnx')}, or write a program of torch.export by "
            "--torch-export"
        ) from error
    try:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision's operators are absent
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                network,
                (images,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ConvoyError(f"the network cannot be exported to ONNX: {str(error).partition(chr(10))[0]}") from error
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in notes.items()})
    content = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _torch_export(network: nn.Module, images: Tensor, notes: Notes) -> Exported:
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dims = ({0: torch.export.Dim("batch")},)
            program = torch.export.export(network, (images,), dynamic_shapes=dims, strict=False)
            torch.export.save(program, file, extra_files={NOTES: json.dumps(notes)})
    except Exception as error:  # torch.export has no class for what it cannot export
        raise ConvoyError(f"the network cannot be exported by torch.export: {reason(error)}") from error
    content = file.getvalue()

    def outputs_of(images: Tensor) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = torch.export.load(io.BytesIO(content)).module()(images)
        return outputs

    return content, outputs_of
