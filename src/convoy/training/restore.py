"""Brings back what a run delivered: its recipe, its trained network, and how pictures are prepared for it."""

import html
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from convoy import own
from convoy.checkpoint.files import DamagedCheckpointError, checked_record, values_explained
from convoy.checkpoint.store import CheckpointStore, read_checkpoint
from convoy.comm.ranks import Ranks
from convoy.data.batch import evaluation_pixels
from convoy.data.config import DataConfig
from convoy.data.dataset import DataSet, open_data
from convoy.data.decode import BadImage, Turbo, finish_picture, in_channels, open_picture, suffixes, turbo_lacks
from convoy.data.folder import picture_bytes
from convoy.data.sources import relabel
from convoy.data.transforms import Geometry, Normalize
from convoy.engine.coupling import graph_of
from convoy.errors import ConvoyError
from convoy.recipe.recipe import Recipe, load_recipe
from convoy.run.directory import RunDirectory
from convoy.tasks.own import add_own_metrics
from convoy.tasks.registry import create_task
from convoy.tasks.task import Evaluation, Task
from convoy.terminal import listed, printable
from convoy.training.build import NetworkInput, build_model
from convoy.training.evaluation import InputPipeline, evaluate
from convoy.training.precision import set_numerics, settle
from convoy.training.resume import code_difference, code_of
from convoy.training.state import delivered_weights

EVALUATION_BATCH = 256

Picture = Image.Image | str | os.PathLike[str] | NDArray[np.uint8]


class Transform:
    """Prepares a picture for a trained network as the evaluation of its run did.

    The picture is turned upright, its short side resized, its center cut out, its colors brought to the network's
    channels, and every channel normalized. Pillow takes the place of a decoder of the recipe's that is not installed.
    """

    def __init__(self, network_input: NetworkInput, config: DataConfig) -> None:
        augment = config.augment
        self._channels, self._in_memory = network_input.channels, network_input.in_memory
        self.image_size = config.evaluation_size or network_input.image_size
        self._geometry = Geometry(self.image_size, network_input.resize, augment)
        self._normalize = Normalize(network_input.mean, network_input.std)
        method = augment.interpolation or "bilinear"
        has_turbo = config.decoder == "turbo" and not turbo_lacks()
        self._turbo = Turbo(self.image_size, network_input.channels, method) if has_turbo else None

    def __call__(self, picture: Picture) -> Tensor:
        """Float32 [channels, image_size, image_size], on the CPU, of a PIL image, the path of a file, or a uint8 array
        [height, width] or [height, width, 1 or 3]; a ConvoyError where the picture is none of these, or cannot be read.
        """
        try:
            pixels = self.pixels(picture)
        except BadImage as bad:
            raise ConvoyError(f"{bad}: mend the picture, or leave it out") from None
        normalized: Tensor = self._normalize(torch.from_numpy(pixels.copy())[None])[0]
        return normalized

    def pixels(self, picture: Picture) -> NDArray[np.uint8]:
        """The same before it is normalized: uint8 [channels, image_size, image_size]. Raises BadImage."""
        size, turbo, name = self.image_size, self._turbo, "the picture"
        planes = np.empty((self._channels, size, size), np.uint8)
        if isinstance(picture, str | os.PathLike):
            name = os.fspath(picture)
            data = picture_bytes(name, name)
            if turbo is not None and not self._in_memory:
                turbo.write(data, name, self._geometry.center_box, False, planes)
                return planes
            image = open_picture(data, name)
        else:
            image = picture if isinstance(picture, Image.Image) else _image_of(picture)
        if turbo is None and not self._in_memory:
            return evaluation_pixels(image, name, self._geometry, self._channels)
        pixels = np.asarray(in_channels(finish_picture(image, name), self._channels))
        if turbo is None:
            return evaluation_pixels(Image.fromarray(pixels), name, self._geometry, self._channels)
        turbo.write_part(pixels, self._geometry.center_box(pixels.shape[1], pixels.shape[0]), False, planes)
        return planes


def _image_of(array: object) -> Image.Image:
    if not isinstance(array, np.ndarray):
        raise ConvoyError(
            f"a {type(array).__name__} is no picture: give a PIL image, the path of a file, or a uint8 array "
            "[height, width, channels]"
        )
    grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] == 3)) or array.size == 0:
        raise ConvoyError(
            f"an array of {array.dtype} {list(array.shape)} is no picture: give uint8 [height, width] or "
            "[height, width, 1 or 3]"
        )
    return Image.fromarray(array.reshape(array.shape[:2]) if grey else array)


class Page(NamedTuple):
    """The report of a run, which a notebook shows."""

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="800" style="border: 0"></iframe>'


@dataclass(frozen=True)
class TrainedRun:
    """What a run has delivered, or would have at a checkpoint."""

    path: Path  # the run directory
    recipe: Recipe = field(repr=False)  # how it was trained; its network begins with no weights of others
    network: nn.Module = field(repr=False)  # with the weights (or averaged ones, `ema`), evaluating, on the CPU
    transform: Transform = field(repr=False)  # prepares a picture for the network
    classes: list[str] = field(repr=False)  # names, by the network's outputs
    network_input: NetworkInput = field(repr=False)
    changed: str = ""  # a sentence where the code makes a layer otherwise than when the weights were written
    trust_code: bool = False  # metrics that the recipe names may be from anywhere

    @property
    def task(self) -> Task:
        """What the network was trained for."""
        return create_task(self.recipe, self.classes, self.network_input.task)

    @property
    def summary(self) -> dict[str, Any]:
        """How the run ended: `summary.json`."""
        return RunDirectory(self.path).summary()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, on updates and evaluations."""
        lines = RunDirectory(self.path).metrics.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]  # a killed run's last may be half there

    def report(self) -> Page:
        """The page of the run, as the command left it (`convoy report` writes it again)."""
        return Page(self.path / "report.html")

    @property
    def memory_format(self) -> torch.memory_format:
        """Of pictures and weights, as in training."""
        return torch.channels_last if self.recipe.channels_last else torch.contiguous_format

    def to(self, device: torch.device) -> None:
        """Move the network to a device, in its memory format."""
        self.network.to(device=device, memory_format=self.memory_format)  # type: ignore[call-overload]


def _of_loop(place: Path, read: Callable[[Any], Any]) -> Any:
    """What the loop has put into a checkpoint that is whole."""
    with values_explained(f"checkpoint {place}"):
        return read(checked_record(place)["values"]["loop"])


def checkpoint_step(run: RunDirectory, which: str | int) -> int:
    """The update after which a checkpoint was written: the `best` of the evaluations, the `last`, or an update's; a
    ConvoyError where there is none.
    """
    store = CheckpointStore(run.checkpoints)
    steps, step = store.steps(), which
    if steps and which == "last":
        step = steps[-1]
    for newest in reversed(steps) if which == "best" else ():
        try:
            step = _of_loop(store.place(newest), lambda loop: loop["progress"]["best_step"])
            break
        except DamagedCheckpointError:  # the one before knows, too
            if newest == steps[0]:
                raise
    if str(step) in map(str, steps):
        return int(step)
    there = ", ".join(map(str, steps)) or "none"
    raise ConvoyError(f"{run.path} has no checkpoint {which}: choose best, last, or an update that has one: {there}")


def load_run(
    path: str | os.PathLike[str], checkpoint: str | int | None = None, *, trust_code: bool = False
) -> TrainedRun:
    """Load the network that a run has trained, and what it takes to use it. The data need not be there.

    >>> run = convoy.load_run("runs/first")
    >>> images = torch.stack([run.transform("cat.png"), run.transform("dog.png")])  # or PIL images, or uint8 arrays
    >>> with torch.inference_mode():
    ...     probabilities = run.network(images).softmax(1)  # [pictures, classes]
    >>> [run.classes[best] for best in probabilities.argmax(1)]
    ['cat', 'dog']

    Args:
        path: the run directory.
        checkpoint: `best`, `last` or an update, instead of the final weights: of any run, also one that was stopped.
            The best one has the best metric, as accuracy, of the evaluations on the test split.
        trust_code: build a network that the run names as `package.module:factory` also where that lies outside of the
            current folder: whoever wrote the run then has your rights.

    Returns:
        The network in evaluation mode on the CPU, with float32 input [samples, channels, image_size, image_size] and
        logits [samples, classes]; the transform that makes such a sample of a picture; the names of the classes.

    Raises:
        ConvoyError: this is no run, it has no weights yet, no such checkpoint, they do not fit, or its network is code
            from elsewhere.

    A warning says where the network's code is another than that which trained the weights.
    """
    run = restored(path, checkpoint, trust_code)
    if run.changed:
        warnings.warn(run.changed, stacklevel=2)
    return run


def restored(path: str | os.PathLike[str], checkpoint: str | int | None = None, trust_code: bool = False) -> TrainedRun:
    """`load_run` without its warning."""
    run = RunDirectory(Path(path))
    run.check_trained(checkpoint)
    source = run.weights
    if checkpoint is not None:
        source = CheckpointStore(run.checkpoints).place(checkpoint_step(run, checkpoint))
    recipe = settle(load_recipe(str(run.config)), torch.device("cpu")).recipe  # runs keep what was settled
    if not trust_code:
        own.check_own(recipe.model.name, run.config, "network")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": None})})
    network_input = NetworkInput.of_run(run)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus):  # whoever calls this may have seeded the generators
        network, _ = build_model(recipe, network_input)
    try:
        weights = load_file(source) if checkpoint is None else delivered_weights(read_checkpoint(source))
        network.load_state_dict(weights)
    except (SafetensorError, OSError) as error:
        raise ConvoyError(f"{source} is damaged ({error}): train again, or put back a whole copy") from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[2].strip().partition("\n")[0].rstrip(".")
        raise ConvoyError(f"{source} does not fit {recipe.model.name}: {reason}") from error
    size = network_input.image_size
    changed = _changed_code(run, checkpoint, network, (network_input.channels, size, size))
    network.eval()
    transform, classes = Transform(network_input, recipe.data), list(network_input.classes)
    return TrainedRun(run.path, recipe, network, transform, classes, network_input, changed, trust_code)


def _changed_code(
    run: RunDirectory, checkpoint: str | int | None, network: nn.Module, shape: tuple[int, int, int]
) -> str:
    try:
        step = checkpoint_step(run, "last" if checkpoint is None else checkpoint)
        was = _of_loop(CheckpointStore(run.checkpoints).place(step), lambda loop: loop["code"])
    except ConvoyError:  # final weights need no checkpoint
        return ""
    # a run looked at two microbatches of two samples, or of one, where they have no more
    graphs = (graph_of(network, shape, samples, training=True) for samples in (4, 2))
    changes = [code_difference(was, code_of(network, graph)) for graph in graphs]
    sentence = f"the network's code is another than that which trained {run.path} ({changes[0]})"
    return f"{sentence}: its results are others" if all(changes) else ""


def evaluation_data(run: TrainedRun, path: str | None = None) -> tuple[DataSet, list[str]]:
    """The data to evaluate a run on, labelled by its classes and prepared for its network in the same way, and
    sentences on how they were opened. A ConvoyError where there are no such data, or they have classes that the run
    does not know.

    With `path` they are other data, whose classes are found among the run's by their names; a folder of pictures
    without class folders is of the class that it is named after. Those without a split count as a whole, as nothing
    there is for training, unless they are the run's own: what it was trained on says nothing.
    """
    if path is None:
        data = open_data(run.recipe.data, task=run.recipe.task)
        if data.classes != run.classes:
            raise ConvoyError(
                f"the data at {run.recipe.data.path} are no longer those that {run.path} was trained on (other "
                "classes): name the data by --data"
            )
        return data.at_end(), []
    advice = f"convoy predict {run.path} {printable(path)} says what is on pictures without a class to compare with"
    if Path(path).suffix.lower() in suffixes() and Path(path).is_file():
        raise ConvoyError(f"{printable(path)} is one picture, without a class to compare with: {advice}")
    task = "auto" if run.task.name == "classification" else run.task.name
    data = open_data(_settings(run, path, {}), to_evaluate=True, task=task)
    unknown = [repr(printable(name)) for name in data.classes if name not in run.classes]
    if unknown:
        classes = f"the class{'es' if len(unknown) > 1 else ''} {listed(unknown, 5)}"
        raise ConvoyError(
            f"{printable(path)} has {classes}, which {run.path} was not trained on (it knows "
            f"{listed([printable(name) for name in run.classes], 5)}): give its classes the same names; {advice}"
        )
    notes = list(data.notes)
    if data.test is data.train:
        summary = RunDirectory(run.path).summary()
        number = summary.get("num_train", 0) + summary.get("num_test", 0)
        # The run's own data, moved: what it was trained on counts nowhere.
        if (len(data.test), data.classes) == (number, run.classes):
            split = {key: getattr(run.recipe.data, key) for key in ("validation_fraction", "split_seed", "fold")}
            data = open_data(_settings(run, path, split), task=task)
            notes = list(data.notes)
        else:
            notes.append(f"{data.name} has no split of its own: all of its {len(data.test):,} pictures are evaluated")
    data = data.at_end()
    if data.task == "classification":
        relabel((data.train, data.test), data.classes, run.classes)
    return data, notes


def _settings(run: TrainedRun, path: str, split: Mapping[str, Any]) -> DataConfig:
    """The run's section for other data."""
    settings = {"path": path, "format": "auto", **dict.fromkeys(("validation_fraction", "split_seed", "train", "test"))}
    settings |= {key: getattr(run.network_input, key) for key in ("image_size", "resize", "channels", "mean", "std")}
    settings["classes"] = tuple(run.classes) if run.task.name != "classification" else None
    return run.recipe.data.model_copy(update={"fold": None, **settings, **split})


def evaluate_run(run: TrainedRun, data: DataSet, device: torch.device, ranks: Ranks | None = None) -> Evaluation:
    """Evaluate a run on every sample of the test split, in turns where there are several ranks. All of them call it.

    The data are labelled by the run's classes (`evaluation_data`).
    """
    set_numerics(run.recipe)
    run.to(device)
    pipeline = InputPipeline(data, device, run.memory_format)
    task = run.task
    for name in () if run.trust_code else run.recipe.metrics:
        own.check_own(name, RunDirectory(run.path).config)
    add_own_metrics(task, run.recipe)
    return evaluate(run.network, pipeline, run.recipe, task, EVALUATION_BATCH, ranks)
