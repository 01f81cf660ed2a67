"""The network that a recipe names: built, and tried before it is trained, with the data and for coupled samples."""

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ConfigDict
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from convoy import models
from convoy.comm.collectives import Group, by_way_of_host
from convoy.comm.ranks import Ranks
from convoy.data.config import DataConfig
from convoy.data.dataset import DataSet
from convoy.data.loader import evaluation_batches
from convoy.data.pixels import PixelSource
from convoy.data.transforms import Normalize
from convoy.engine.coupling import Probe, coupling, microbatch_sizes, probe, why_coupled
from convoy.engine.recorded import graph_on
from convoy.engine.shards import deferred
from convoy.errors import ConvoyError
from convoy.failure import place_of
from convoy.graph import tree
from convoy.graph.capture import prepare_given
from convoy.graph.graph import CaptureError, Graph, Ref
from convoy.models.weights import first_convolution
from convoy.ops import capture
from convoy.planner.cost.step import Staging
from convoy.planner.workload import workload_of
from convoy.plans.fit import check_patterns
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE
from convoy.recipe.recipe import DEFAULT_MICROBATCH, Recipe
from convoy.resources import host_memory
from convoy.run.directory import RunDirectory
from convoy.run.records import Record
from convoy.script.data import evaluating
from convoy.tasks.task import Task
from convoy.training.derived import num_microbatches
from convoy.training.optimizer import check_groups, freeze_always
from convoy.training.precision import lowered


class NetworkInput(Record):
    """What a network is given: kept with the run, so that other pictures are prepared for it in the same way."""

    model_config = ConfigDict(extra="forbid")  # what this version does not know would be prepared otherwise

    classes: list[str]  # names, by label
    channels: int  # 1 or 3
    image_size: int  # height and width
    resize: int  # short side of a picture before its center is taken
    mean: tuple[float, ...]  # of each channel, pixels from 0 to 1
    std: tuple[float, ...]  # likewise
    in_memory: bool = False  # all pictures were decoded beforehand, and had their channels before they were resized
    task: str = "classification"

    @staticmethod
    def of(data: DataSet) -> "NetworkInput":
        names = ("classes", "channels", "image_size", "resize", "mean", "std", "task")
        in_memory = isinstance(data.train, PixelSource)
        return NetworkInput(in_memory=in_memory, **{name: getattr(data, name) for name in names})

    @staticmethod
    def of_run(run: RunDirectory) -> "NetworkInput":
        """Read it from a run's `environment.json`; a ConvoyError where the file is missing or damaged."""
        try:
            return NetworkInput.model_validate(json.loads(run.environment.read_text(encoding="utf-8"))["input"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConvoyError(
                f"{run.environment} does not say how pictures were prepared: put back the file that the run wrote"
            ) from error


def make_lazy(model: nn.Module, image_shape: tuple[int, int, int]) -> None:
    """Let a pass make the parameters that hang on the images."""
    if any(map(is_lazy, model.parameters())):
        with evaluating(model), torch.no_grad():
            model(torch.zeros(1, *image_shape))


def build_model(recipe: Recipe, given: DataSet | NetworkInput) -> tuple[nn.Module, list[str]]:
    """The recipe's network for some classes and channels, initialized from the seed, with its weights loaded, and notes
    on what was done to it.
    """
    section, notes = recipe.model, []
    options = dict(section.options)
    if models.accepts(section.name, "image_size"):
        options.setdefault("image_size", given.image_size)
    if section.zero_init_residual:
        if models.accepts(section.name, "zero_init_residual"):
            options["zero_init_residual"] = True
        else:
            notes.append(
                f"{section.name} has no residual blocks to start at zero: model.zero_init_residual does nothing"
            )
    torch.manual_seed(recipe.seed)
    model = models.create(section.name, num_classes=len(given.classes), in_channels=given.channels, **options)
    make_lazy(model, (given.channels, given.image_size, given.image_size))
    prepare_given(model, needs_numbers=not torch.empty(0).is_meta)  # of other ranks than the first
    if section.weights is not None and recipe.extends is None:  # all weights are those of the other run then
        notes += models.load_weights(model, section.weights, models.published(section.weights))
    return model, [*notes, *choose_trained(model, recipe)]


def choose_trained(model: nn.Module, recipe: Recipe) -> list[str]:
    """Freeze what a recipe never trains of its network, with notes; a ConvoyError where the network lacks it."""
    if recipe.model.whiten is not None:
        convolution = _to_whiten(model)
        convolution.weight.requires_grad_(False)
        if convolution.bias is not None:
            nn.init.zeros_(convolution.bias)
    check_groups(model, recipe.optimizer)
    return freeze_always(model, recipe.optimizer.freeze)


def _to_whiten(model: nn.Module) -> nn.Conv2d:
    """The network's first convolution; a ConvoyError where it cannot give every direction of its patches twice."""
    convolution = first_convolution(model)
    numel = 0 if convolution is None else convolution.weight[0].numel()
    if convolution is None or convolution.groups > 1 or convolution.out_channels != 2 * numel:
        raise ConvoyError(
            "model.whiten needs a first convolution with twice as many filters as a patch has numbers"
            + ("" if convolution is None else f", {2 * numel} of {convolution.out_channels}")
            + ": leave it out, or choose airbench94"
        )
    return convolution


_WHITENING_EPS = 5e-4  # added to variances of normalized pixels: directions with less are noise


@torch.no_grad()
def whiten(convolution: nn.Conv2d, data: DataSet, config: DataConfig, num_pictures: int) -> None:
    """Let a convolution give the principal components of its patches, each with a mean square of about 1, and their
    negatives (Page, 2018; Jordan, 2024, section 3.2).

    The filters are the eigenvectors of the patches' second moments, by falling eigenvalue λ, over √(λ + ε).
    """
    num_pictures, numel = min(num_pictures, len(data.train)), convolution.weight[0].numel()
    # from all over the data, which may be in the order of its classes
    some = data.train.subset(np.arange(num_pictures) * len(data.train) // num_pictures)
    moments = torch.zeros(numel, numel, dtype=torch.float64)
    number, normalize = 0, Normalize(data.mean, data.std)
    config = config.model_copy(update={"workers": 0})
    for batch in evaluation_batches(replace(data, test=some), config, batch=256):
        patches = F.unfold(normalize(batch.images).double(), convolution.kernel_size).transpose(1, 2).flatten(0, 1)
        moments += patches.T @ patches
        number += len(patches)
    variances, directions = torch.linalg.eigh(moments / number)
    filters = (directions / (variances + _WHITENING_EPS).sqrt()).T.flip(0)
    convolution.weight.copy_(torch.cat([filters, -filters]).view_as(convolution.weight))


LARGE = 2**30  # bytes of weights from which on no rank but the first has a whole network in its memory


def build_for(
    recipe: Recipe, given: DataSet | NetworkInput, plan: Plan | None, ranks: Ranks
) -> tuple[nn.Module, list[str]]:
    """The network as ranks need it that are to have parts of it: without numbers on all but the first, where it is
    large or stages divide it.

    The weights are the same in either case. A network that cannot be built so, or does not show its calls without
    numbers, is built whole on every rank, with a note. All ranks call it.
    """
    model, notes = _build_for(recipe, given, plan, ranks)
    if recipe.model.whiten is not None and isinstance(given, DataSet):
        convolution = _to_whiten(model)
        if ranks.rank == 0:  # hosts may round eigenvectors otherwise
            whiten(convolution, given, recipe.data, recipe.model.whiten)
        filters = ranks.broadcast(convolution.weight.detach())
        if not convolution.weight.is_meta:
            convolution.weight.data.copy_(filters)
    return model, notes


def _build_for(
    recipe: Recipe, given: DataSet | NetworkInput, plan: Plan | None, ranks: Ranks
) -> tuple[nn.Module, list[str]]:
    if ranks.num == 1:
        return build_model(recipe, given)
    weights = on_meta(recipe, len(given.classes), given.channels)
    is_large = weights is not None and sum(weight.nbytes for weight in weights.parameters()) >= LARGE
    if not is_large and (plan is None or "stage" not in plan.mesh.names):
        return build_model(recipe, given)
    model: nn.Module | None = None
    refused, notes = "", list[str]()
    try:
        with deferred():
            model, notes = build_model(recipe, given)
        capture(model, [torch.empty(2, given.channels, given.image_size, given.image_size, device="meta")])
    except Exception as error:  # of a network of others; what is wrong in any case is said again below
        refused = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    refused = next(filter(None, ranks.gather(refused)), "")
    if model is not None and not refused:
        return model, notes
    model, notes = build_model(recipe, given)
    return model, [*notes, f"every device builds all of {recipe.model.name} before it takes its part, as {refused}"]


def on_meta(recipe: Recipe, num_classes: int | None = None, channels: int | None = None) -> nn.Module | None:
    """The recipe's network without contents, if need be with its own number of classes; None where it cannot be so."""
    section = recipe.model
    try:
        with torch.device("meta"):
            channels = channels or recipe.data.channels
            return models.create(section.name, num_classes=num_classes, in_channels=channels, **section.options)
    except ConvoyError:
        raise
    except Exception:  # a network of others, which reads its tensors or makes them elsewhere
        return None


_MANY_CLASSES = 2**16


def check_layers(recipe: Recipe, plan: Plan) -> None:
    """Refuse a plan that names no layer of the network, or that divides a layer or cuts the network as is impossible,
    before the data are opened. What depends on the images, or on the number of classes, is seen later.
    """
    usual = models.describe(recipe.model.name).input_shape
    model = on_meta(recipe, _MANY_CLASSES if usual is not None else None)
    if model is None:
        return
    check_patterns(plan, [name for name, _ in model.named_modules()])
    of_images = {"height", "width"} if recipe.data.channels else {"height", "width", "channel"}
    if usual is None or {name for _, strategies in plan.layers for name in strategies.values()} & of_images:
        return
    size = recipe.data.image_size
    shape = (recipe.data.channels or usual[0], size or usual[1], size or usual[2])
    workload = workload_of(model.train(), torch.empty(1, *shape), max(recipe.batch, plan.mesh.num_devices))
    workload.place(plan)
    Staging.of(plan, workload.graph, workload.outputs, workload.samples_of_passes)


@dataclass
class TriedNetwork:
    """A recipe's network on its device, and what it has shown there: how its batch may be cut, and run."""

    recipe: Recipe
    model: nn.Module  # the plain network; a session makes it its own
    image_shape: tuple[int, int, int]  # channels, height and width
    device: torch.device
    probe: Probe

    @staticmethod
    def of(
        recipe: Recipe,
        model: nn.Module,
        image_shape: tuple[int, int, int],
        device: torch.device,
        change: str,
        task: Task | None = None,
    ) -> "TriedNetwork":
        """Read off the network's calls what it does with two microbatches of images, in training and in evaluation.

        A ConvoyError says that it cannot train on such images, with `change` as what a user could change, or gives
        other outputs than the task needs (None: any).
        """
        sizes = microbatch_sizes(recipe.batch, num_microbatches(recipe))
        samples = min(2, *sizes)
        try:
            result = probe(model, image_shape, device, samples, lowered(recipe))
            if task is not None:
                image = torch.zeros(1, *image_shape, device=device)
                task.check_outputs(_outputs(model, result.graph, image), image_shape, recipe.model.name)
        except (ConvoyError, torch.OutOfMemoryError):
            raise
        except (CaptureError, RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
            if "is too small" in str(error) or "than actual input" in str(error):
                usual = models.describe(recipe.model.name).input_shape
                small = f"{image_shape[1]} px are too small for {recipe.model.name}: raise --image-size"
                raise ConvoyError(small + (f" to {usual[1]}" if usual is not None else "")) from error
            reason, place = str(error).partition("\n")[0].rstrip("."), place_of(error)
            where = f"; {type(error).__name__} at {place}" if place is not None else ""
            raise ConvoyError(
                f"{recipe.model.name} cannot train on images of {'×'.join(map(str, image_shape))} in microbatches of "
                f"{min(sizes)} ({reason}{where}): change {change}"
            ) from error
        return TriedNetwork(recipe, model, image_shape, device, result)

    def divisible_sizes(self, parts: int, useful: int | None = None) -> tuple[tuple[int, ...], str | None]:
        return divisible_sizes(self.recipe, self.model, parts, self.probe, useful)

    def microbatches_in_pass(self, sizes: tuple[int, ...], sharing: int = 1, passes: int = 1) -> tuple[int, str]:
        """How many microbatches of each part of the batch run in one pass, and why. `sharing` devices work on a part,
        each of which keeps its share of it alone: a pass takes as many times the microbatches. Where parts go through
        stages, there are to be `passes`.
        """
        num, result = len(sizes), self.probe
        if self.recipe.reproducible:
            return 1, "reproducible: one by one"
        if self.recipe.batch_norm != "microbatch":
            return num, f"all {num}: batch_norm={self.recipe.batch_norm} is over the whole batch"
        if result.graph is None:
            return 1, "one by one: the network cannot be captured"
        if result.draws and not result.owned:
            return 1, "one by one: the network draws random numbers in a way of its own"
        if not result.separable:
            return 1, "one by one: the network couples the samples of a batch"
        merge = result.merge(sizes, self.device, self._memory(), sharing)
        exact = -(-num // passes)  # with a smaller pass at the end, if that makes as many as are asked for
        if passes > 1 and merge > (most := exact if -(-num // exact) == passes else max(1, num // passes)):
            return most, f"so that {-(-num // most)} passes go through the stages one after the other"
        kept = f"{result.bytes_per_sample / 2**20:.2f} MiB a sample"
        return merge, f"as many of {num} as fit the budget of a pass, {kept}"

    def _memory(self) -> float:
        """Bytes that a rank has: its part of the device's, or its limit; not what is free, as a run that goes on is to
        have the same passes."""
        on_gpu = self.device.type == "cuda"
        total = torch.cuda.get_device_properties(self.device).total_memory if on_gpu else host_memory()
        return min(total / self.probe.on_device, self.recipe.parallel.memory_bytes or total)

    def counts_of_passes(self, sizes: tuple[int, ...], merge: int, devices: int) -> tuple[int, ...]:
        """Into how many passes through stages an update may be divided, of `merge` microbatches at a time: none where
        the batch has given parts, or the network is compiled.
        """
        shares = self.recipe.parallel.shares
        if devices == 1 or self.recipe.compile or (isinstance(shares, tuple) and len(shares) > 1):
            return ()
        finest, _ = self.divisible_sizes(devices, useful=self.recipe.batch)
        samples = merge * max(sizes) // max(finest) * devices
        counts = {-(-len(finest) // number) for number in range(1, min(len(finest), samples) + 1)}
        if len(finest) == self.recipe.batch:  # of any size, so that the trainer makes as many as are usual for a plan
            usual = {PARTS_PER_STAGE * stages for stages in range(2, devices + 1) if devices % stages == 0}
            counts |= {number for number in usual if max(len(sizes), min(counts)) <= number <= len(finest)}
        return tuple(sorted(counts))

    def check_coupling(self, ranks: Ranks) -> None:
        """Refuse microbatches of several ranks in one pass where more than batch norm couples the samples of a batch:
        they would not be computed as each by itself. The model is this rank's part by now.
        """
        recipe, result = self.recipe, self.probe
        if ranks.num_sample_ranks == 1 or recipe.batch_norm != "microbatch":
            return
        advice = f"choose a plan that does not divide samples, e.g. filter={ranks.num}, or"
        may_couple = not result.separable or result.draws
        if may_couple and (what := why_coupled(self.model, in_training_alone=result.separable)) is not None:
            raise ConvoyError(
                f"{what} computes with several samples at once, so a microbatch cannot run together with those of "
                f"other devices: {advice} batch_norm=sync"
            )
        graph = result.graph
        if recipe.reproducible and graph and coupling(graph) is None and coupling(graph, by_gradients=True) is not None:
            raise ConvoyError(
                f"weights of {recipe.model.name} are computed from others, whose gradients are not added in the same "
                f"order on several devices: {advice} leave --reproducible away"
            )

    def why_not_recorded(self, devices: int, group: Group = None, num_stages: int = 1) -> str | None:
        """Why updates are not recorded and replayed here, empty where nobody expects it; None where that is tried."""
        if self.recipe.cuda_graphs == "off" or graph_on(self.device) is None:
            return ""
        if num_stages > 1:
            return "the plan has stages, which send to each other"
        if self.probe.draws and not self.probe.owned:
            return f"{self.recipe.model.name} draws random numbers in a way of its own"
        if self.recipe.reproducible and devices > 1:
            return "reproducible adds gradients up in a fixed order, which sends from device to device"
        if by_way_of_host(self.device, group):
            return "gloo carries what the devices exchange, by way of the CPU"
        return None


def _outputs(model: nn.Module, graph: Graph | None, image: torch.Tensor) -> Any:
    """Those of the network, or tensors of their shapes."""
    if graph is not None:
        return tree.replace(graph.output, Ref, lambda ref: torch.empty(graph.shape(ref.name), device="meta"))
    with evaluating(model), torch.no_grad():
        return model(image)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a layer is batch norm."""
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def divisible_sizes(
    recipe: Recipe, model: nn.Module, parts: int, result: Probe | None = None, useful: int | None = None
) -> tuple[tuple[int, ...], str | None]:
    """Samples of every microbatch, so small that each of the `parts` of the batch has one, where that changes no
    result; and a sentence where they are smaller than usual. There may still be fewer microbatches than parts.

    Where the user has not said how large microbatches are, the recipe leaves their size open, and so do `config.yaml`
    and checkpoints: the run can go on with other numbers of devices. More than `parts`, the `useful` ones let stages
    wait less for each other.
    """
    sizes = microbatch_sizes(recipe.batch, num_microbatches(recipe))
    is_set = recipe.microbatch != DEFAULT_MICROBATCH
    useful = useful or parts
    if len(sizes) >= useful or parts > recipe.batch or is_set or _depends_on_microbatches(recipe, model, result):
        return sizes, None
    finer, most = microbatch_sizes(recipe.batch, useful), " at most" * (recipe.batch % useful > 0)
    why = "each device has one" if useful == parts else "stages wait less for each other"
    return finer, (
        f"the batch of {recipe.batch} is {useful} microbatches of {finer[0]} samples{most}, not {len(sizes)} of "
        f"{sizes[0]}, so that {why}: the result does not depend on it"
    )


def _depends_on_microbatches(recipe: Recipe, model: nn.Module, result: Probe | None) -> bool:
    """Whether it matters which samples are a microbatch, by more than the order of sums."""
    if recipe.reproducible or recipe.data.mix.on:  # the tree of sums has a leaf for each; partners are of the same
        return True
    if recipe.batch_norm != "microbatch":
        return False
    couples = result is not None and (not result.separable or (result.draws and not result.owned))
    return couples or has_batch_norm(model)
