"""What is to be planned: a network, how many samples an update has, and how it is trained."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from convoy.engine.coupling import coupling
from convoy.errors import ConvoyError
from convoy.graph.capture import check_given
from convoy.graph.graph import CaptureError, Graph, Ref
from convoy.graph.tree import leaves
from convoy.ops import capture, place
from convoy.ops.recompute import Recompute, check_recompute, recomputing
from convoy.ops.registry import under_autocast
from convoy.planner.cost.costs import Update
from convoy.planner.cost.local_op import BatchNorm
from convoy.plans.fit import check_patterns
from convoy.plans.layout import balanced, consecutive
from convoy.plans.place import COMPUTE, Batch, Placement, sample_axes
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE, SCHEDULES, Schedule

# What a network may be trained in, and the type of autocast
PRECISIONS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def momentum(parameters: list[nn.Parameter]) -> Optimizer:
    """The optimizer that is assumed where nobody names another."""
    return SGD(parameters, lr=0.1, momentum=0.9)


def memory_of_updates(make: MakeOptimizer) -> Update:
    """An optimizer of which nothing is timed, for the memory that it takes.

    >>> memory_of_updates(momentum).state
    1.0
    """
    parameter = nn.Parameter(torch.zeros(1024))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    numbers = sum(x.numel() for x in optimizer.state[parameter].values() if isinstance(x, Tensor))
    return Update(state=float(round(numbers / len(parameter))))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network and one weight update of it."""

    name: str  # for people
    graph: Graph  # a pass in training, over the samples of all devices together, with the types that autocast gives it
    outputs: tuple[str, ...]  # names of the values that the network returns
    batch: int  # samples of an update
    passes: int  # forward and backward passes before an update
    device: torch.device
    channels_last: bool
    batch_norm: BatchNorm = "sync"
    microbatch: int = 0  # samples of each, where the batch is made of such; 0 where it is not
    precision: torch.dtype | None = None  # in which autocast has layers compute; None for the type of the weights
    recorded: bool = False  # passes without stages are replayed as CUDA graphs, which cost the host nothing
    optimizer: MakeOptimizer = momentum
    optimizer_name: str = ""  # under which measurements of its updates are kept; empty where none are
    # Microbatches of an update that each device computes, where they are not as even as can be: a pass then stands for
    # the mean of all. Parts of the batch that are not as many as devices are even, unless `bound`.
    shares: tuple[int, ...] | None = None
    bound: bool = False  # the batch may have no other number of parts than there are shares
    # With the shares that are asked for, or those by which devices end soonest that take so many times as long as in
    # the mean; None where there are no shares
    by_speed: "Callable[[Sequence[float]], Workload] | None" = field(default=None, repr=False, compare=False)
    # the update as one device by itself does it, in passes of its own; None where they are the same
    alone: "Workload | None" = field(default=None, repr=False, compare=False)
    # parameters and buffers by name, and images of any number, as far as they are at hand
    contents: Mapping[str, Tensor] = field(repr=False, compare=False)
    resized: Callable[[int], "Workload"] = field(repr=False, compare=False)  # with another number of samples of a pass
    # Numbers of passes that an update may have where they go through stages one after the other, ascending; empty where
    # stages are out of the question
    counts: tuple[int, ...]
    in_passes: Callable[[int], "Workload"] = field(repr=False, compare=False)  # in one of the `counts`
    schedules: tuple[Schedule, ...] = SCHEDULES  # that the passes through stages may have

    @property
    def default_schedule(self) -> Schedule:
        """The schedule of a requested plan."""
        return self.schedules[0] if len(self.schedules) == 1 else "1f1b"

    @property
    def samples(self) -> int:
        """Samples of a pass, on all devices together."""
        return self.graph.shape(self.graph.inputs[0])[0]

    @property
    def samples_of_passes(self) -> list[int]:
        """Samples of every pass of an update."""
        return [len(part) for part in balanced(self.batch, self.passes)]

    def through(self, stages: int, passes: int | None = None, parts: int = 1) -> "Workload":
        """The workload in a number of passes, or as many as go well through so many stages, where `parts` ranks share
        the samples of every pass."""
        if stages == 1 or not self.counts:
            return self
        least, counts = passes or PARTS_PER_STAGE * stages, self.counts_for(parts)
        count = next((number for number in counts if number >= least), counts[-1])
        return self if count == self.passes else self.in_passes(count)

    def counts_for(self, parts: int) -> tuple[int, ...]:
        """The numbers of passes in which each of so many ranks has samples."""
        return tuple(number for number in self.counts if self.counts[-1] // number >= parts) or self.counts[:1]

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one sample, as [channels, height, width]."""
        return self.graph.shape(self.graph.inputs[0])[1:]

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor of a pass."""
        return max(math.prod(value.shape) * value.dtype.itemsize for value in self.graph.values.values())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each microbatch of a pass."""
        size = self.microbatch or self.samples
        return tuple(min(size, self.samples - start) for start in range(0, self.samples, size))

    def parts(self, count: int) -> tuple[range, ...]:
        """The consecutive samples of each of `count` ranks: whole microbatches where there are such. A ConvoyError
        where there are fewer of them than ranks."""
        pieces = self.sizes if self.microbatch else (1,) * self.samples
        if count > len(pieces):
            what = ("microbatch", "microbatches") if self.microbatch else ("sample", "samples")
            raise ConvoyError(
                f"{count} ranks cannot share {len(pieces)} {what[len(pieces) > 1]}: use fewer sample ranks"
            )
        if self.shares is not None and count == len(self.shares):
            ends = [round(self.samples * end / sum(self.shares)) for end in accumulate(self.shares, initial=0)]
            return tuple(itertools.starmap(range, pairwise(ends)))
        if self.bound and self.shares is not None and count > 1:
            raise ConvoyError(
                f"the shares are those of {len(self.shares)} parts of the batch, but the plan divides it into {count}"
            )
        return consecutive([sum(pieces[part.start : part.stop]) for part in balanced(len(pieces), count)])

    def check(self, plan: Plan, modules: Iterable[str] = ()) -> None:
        """Refuse a plan that names layers which the network lacks. `modules` may be some that are not called."""
        layers = [call.layer for call in self.graph.calls if call.op in COMPUTE]
        check_patterns(plan, layers, [*(call.layer for call in self.graph.calls), *modules])

    def place(self, plan: Plan) -> Placement:
        """The network under a plan; a ConvoyError where a layer cannot be divided as it says."""
        axes = sample_axes(((call.layer, call.op) for call in self.graph.calls), plan)
        batch = Batch(plan.mesh, axes, self.parts(plan.mesh.size(axes)) if axes else (range(self.samples),))
        return place(self.graph, plan, batch, self.outputs)


def check_positive(**numbers: Any) -> None:
    """Refuse arguments that are no numbers above 0: of bytes and rates any, of all else whole ones."""
    for name, number in numbers.items():
        kind = Real if name in ("memory_limit", "images_per_second") else Integral
        if number is not None and not (isinstance(number, kind) and float(number) > 0):
            raise ConvoyError(f"{name}={number!r} must be a {'whole ' * (kind is Integral)}number above 0")


def workload_of(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    global_batch: int | None,
    *,
    passes: int = 1,
    microbatches: int | None = None,
    channels_last: bool | None = None,
    recompute: Recompute = False,
    **training: Any,
) -> Workload:
    """Look at a network without changing it; a ConvoyError where it cannot be seen as one graph, or not be trained so.

    Of the example, the shape of a sample, the type and the device matter, and what is in it a little. `global_batch` is
    the samples of one update on all devices together, by default those of the example. Without `channels_last`, example
    and weights decide. `recompute` adds to the layers for which the network itself asks for it. `training` are other
    fields of the workload: its name, batch norm, the samples of a microbatch where `microbatches` does not say how many
    there are, precision (also by its name), optimizer.
    """
    check_given(model)
    examples = tuple(example) if isinstance(example, list | tuple) else (example,)
    if not examples or not all(isinstance(x, Tensor) and x.dim() and len(x) for x in examples):
        raise ConvoyError("example must be a tensor with samples along dim 0, or a tuple of one for each input")
    batch = len(examples[0]) if global_batch is None else global_batch
    check_positive(global_batch=batch, passes=passes, microbatches=microbatches)
    if microbatches is not None:
        training["microbatch"] = -(-batch // microbatches)
        if microbatches > batch:
            raise ConvoyError(f"microbatches={microbatches} cannot be made of {batch} samples: give at most {batch}")
    device, precision, batch_norm = examples[0].device, training.get("precision"), training.get("batch_norm", "sync")
    if isinstance(precision, str):
        precision = training["precision"] = PRECISIONS.get(precision, precision)
    if precision not in PRECISIONS.values():
        raise ConvoyError(f"{precision!r} is no precision: choose one of {', '.join(PRECISIONS)}")
    if batch_norm not in get_args(BatchNorm):
        raise ConvoyError(f"batch_norm={batch_norm!r} is unknown: choose one of {', '.join(get_args(BatchNorm))}")
    if any(x.is_meta for x in examples):
        raise ConvoyError("the example is on the meta device: give one that is where the network is to be trained")
    captured: dict[int, Graph] = {}

    def graph_at(samples: int) -> Graph:
        graph = _scaled(captured, samples)
        if graph is None:
            images = tuple(torch.empty(samples, *x.shape[1:], dtype=x.dtype, device="meta") for x in examples)
            try:
                graph = captured[samples] = capture(model, images, training=True)
            except CaptureError as error:
                size = "×".join(map(str, examples[0].shape[1:]))
                raise ConvoyError(
                    f"the planner needs the network as one graph, but {error}: take larger images, if {size} are too "
                    "small for it, or write a plan yourself, e.g. sample=2"
                ) from error
        return under_autocast(recomputing(graph, recompute), precision, device.type)

    first = graph_at(math.ceil(batch / passes))
    check_recompute(recompute, (call.layer for call in first.calls))
    if channels_last is None:
        images = [x for x in (*examples, *model.parameters()) if x.dim() == 4]
        channels_last = any(
            x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous() for x in images
        )
    training = {"name": type(model).__name__, "device": device, "channels_last": bool(channels_last), **training}
    training["contents"] = _contents(model, dict(zip(first.inputs, examples, strict=True)))

    @cache
    def made(batch: int, number: int) -> Workload:
        graph = graph_at(math.ceil(batch / number))
        outputs = tuple(dict.fromkeys(ref.name for ref in leaves(graph.output, Ref)))
        return Workload(
            graph=graph,
            outputs=outputs,
            batch=batch,
            passes=number,
            counts=_counts(graph, batch, number, training),
            resized=lambda samples: made(samples * number, number),
            in_passes=lambda passes: made(batch, passes),
            **training,
        )

    return made(batch, passes)


def _scaled(captured: Mapping[int, Graph], samples: int) -> Graph | None:
    """The network at a number of samples from what it was captured at; None where that does not say it.

    Captured at two sizes, its shapes and arguments say which of them grow with the batch. Captures again were 70 % of
    the time of ResNet-152's search for cuts.
    """
    if samples in captured:
        return captured[samples]
    sizes = [size for size in captured if size > 1]  # some networks do something else with a single sample
    if samples == 1 or len(sizes) < 2:
        return None
    return captured[sizes[0]].scaled(captured[sizes[1]], samples)


def _counts(graph: Graph, batch: int, passes: int, training: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of passes that an update can be divided into, each of whole microbatches if there are any; only
    `passes` where samples of a pass are computed with together."""
    normed = any(call.op == "batch_norm" and call.attributes["training"] for call in graph.calls)
    microbatch = training.get("microbatch", 0)
    is_whole = normed and (training.get("batch_norm") != "microbatch" or not microbatch)
    if is_whole or (graph.shape(graph.inputs[0])[0] > 1 and coupling(graph) is not None):
        return (passes,)
    pieces = -(-batch // (microbatch or 1))
    return tuple(sorted({-(-pieces // together) for together in range(1, pieces + 1)}))


def _contents(model: nn.Module, examples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors at hand: none that has only a shape, and no images that are all of one color."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= {name: x for name, x in examples.items() if not x.is_meta and bool((x != x.flatten()[:1]).any())}
    return {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
