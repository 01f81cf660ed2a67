"""`convoy.parallelize`: a plain network becomes this rank's part of it.

Parameters are plain tensors of this rank's part, not DTensors: `Shard` can say the layout of 39 % of the divided
parameters of our networks under `filter=3`, and torch's default optimizer step takes 2.4 times as long with them
(docs/benchmarks/dtensor.md). `net.state_dict()` gives these live tensors, as in any module, so that averages and copies
kept of them stay what they were. Beside them stands an empty tensor whose name says whose parts they are: a
plain network, another rank or another plan that is given them names it, where shapes that happen to agree would have
been loaded in silence.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from convoy.comm.collectives import Group, broadcast, gather_ints
from convoy.comm.groups import Groups
from convoy.comm.joining import join, num_ranks
from convoy.engine.agreement import Form, agree, arguments
from convoy.engine.allocation import keep_freed_memory
from convoy.engine.gradients.divided import clip_grad_norm
from convoy.engine.gradients.reducer import GradientReducer
from convoy.engine.guard import Guard
from convoy.engine.network import Loss, Network, network_of
from convoy.engine.shards import CHANNELS_LAST, make_room, named_tensors, part_name, same_part
from convoy.engine.stages import StagedNetwork, differentiable_loss
from convoy.engine.uncaptured import Uncaptured
from convoy.errors import ConvoyError
from convoy.graph.capture import prepare_given
from convoy.graph.graph import CaptureError, ChangedError, KeptError
from convoy.graph.tree import leaves
from convoy.ops.context import StepContext
from convoy.ops.memory import memory_in_stages, predict_memory, what_is_recomputed
from convoy.ops.recompute import Recompute, as_recompute
from convoy.plans.fit import check_devices, check_patterns
from convoy.plans.layout import balanced
from convoy.plans.place import COMPUTE
from convoy.plans.plan import Plan
from convoy.plans.schedule import Schedule, bubble
from convoy.plans.traffic import explain as text_of_placement
from convoy.plans.traffic import setting_text
from convoy.units import plural, rough_percent

_MARK = "convoy: "


def mark_state(model: nn.Module) -> None:
    """Mark the states that a network gives from now on, and look at those that it is given, if it is divided."""
    if any(layout.splits for layout in network_of(model).layouts.values()):
        model.register_state_dict_post_hook(_mark)
        model.register_load_state_dict_pre_hook(_take)


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parameters and buffers, the live ones, by serial name."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(_MARK)}


def _mark(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[prefix + _name(network_of(model))] = torch.empty(0)


def _name(network: Network) -> str:
    """It ends as if it were the name of a module's attribute: `torch.distributed.checkpoint`, which would take one
    rank's parts for all, looks for that module, and names it in its error."""
    text = part_name(network.layouts, network.shapes, network.groups, network.plan)
    return f"{_MARK}{text.replace('.', '·')}: save whole tensors by convoy.save"


def _take(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the same parts, or cut them out of whole tensors; refuse all else."""
    network = network_of(model)
    own_mark = prefix + _name(network)
    marks = [name for name in state if name.startswith(prefix + _MARK)]
    for mark in marks:
        del state[mark]
        if not same_part(mark, own_mark):
            part, own_part = (text.removeprefix(prefix + _MARK).partition(": save")[0] for text in (mark, own_mark))
            raise ConvoyError(
                f"this state is {part.replace('·', '.')}, and the network has {own_part.replace('·', '.')}: save with "
                "convoy.save, or what convoy.state_dict gives, and load with convoy.load or convoy.load_state_dict"
            )
    if marks:
        return
    tensors = own_state(network.model)
    for name in [name for name in state if name.startswith(prefix)]:
        tensor, key = state[name], name.removeprefix(prefix)
        if not isinstance(tensor, Tensor) or key not in tensors:
            continue
        shape, layout = network.entry(key)
        if layout.splits and tuple(tensor.shape) == shape:
            state[name] = network.part(key, tensor)
        elif layout.splits and tensor.shape == tensors[key].shape:
            raise ConvoyError(
                f"{key} has the shape of one rank's part and does not say of which: load whole tensors, as "
                "convoy.state_dict gives them, or a state as net.state_dict() gave it on this rank"
            )


Model = TypeVar("Model", bound=nn.Module)
BatchNorm = Literal["sync", "microbatch", "local"]


def parallelize(
    model: Model,
    plan: "str | Path | dict[str, Any] | Plan",
    example: "Tensor | tuple[Any, ...] | dict[str, Any]",
    *,
    batch_norm: BatchNorm = "sync",
    loss: Loss = "mean",
    seed: int | None = None,
    microbatches: int | None = None,
    compile: bool = False,
    recompute: "bool | Sequence[str]" = False,
    checks: bool = True,
) -> Model:
    """Turn a network into this rank's part of it, in place: parameters become the rank's shards, under their names.

    Training is then that of the plain network on the global batch: `loss.backward()` leaves the gradient of the mean
    loss over the samples of all ranks, in whatever way the plan divides the work. Any optimizer that
    treats numbers one by one works on `model.parameters()`; others are refused on divided parameters before their first
    step. A penalty on the weights is computed by `convoy.penalty`. Under torchrun's variables the process group is
    joined, without them one device is used.

    >>> net = convoy.parallelize(model, "sample=2", example=images[:4])  # under torchrun with two ranks
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> mine = convoy.local_samples(net, len(images))
    >>> F.cross_entropy(net(images[mine]), labels[mine]).backward()
    >>> optimizer.step()

    Args:
        model: any network whose inputs are tensors with the samples along dim 0. The weights of rank 0 count; other
            ranks may have shapes alone (`convoy.deferred`). Each rank's parts are moved to the device of the example.
        plan: text such as `sample=2,filter=2`, a YAML file, a mapping or a `Plan` (docs/plans.md).
        example: one rank's batch, [samples, channels, height, width], as the network is called with it: a tensor, a
            tuple of arguments, or a dict of keyword arguments; only the tensors' shapes and types matter.
        batch_norm: statistics over the global batch (`sync`: those of the plain layer), each microbatch, or each
            rank's samples (`local`: not what one device computes).
        loss: the loss on which a rank calls `backward`. `mean`: the mean over its own samples, which is weighted by
            their number relative to the global batch. `part`: a term of the global batch's loss, so that the losses of
            ranks with different samples add up to it; there is no weighting.
        seed: seed of the dropout masks, which are functions of (seed, step, layer, sample); that of rank 0 counts, by
            default torch's initial seed there.
        microbatches: for plans with stages: into how many parts a pass of each rank is cut, which go through the stages
            one after the other; by default four for each stage, or one where the samples of a pass are computed with
            together, as by batch norm over the global batch.
        compile: run the code between the communications of training passes through `torch.compile`; the first pass of
            every batch size takes long. Refused under plans with stages.
        recompute: drop activations after the forward pass and compute them again in the backward pass, which takes
            less memory and more time: True for those of all layers, or patterns of layers' names, such as
            `["layer1.*", "layer2.*"]` (Chen et al., 2016). Results stay the same. Where the network itself asks for it,
            by `torch.utils.checkpoint`, it is done so too.
        checks: compare checksums between ranks after the first updates and ever more rarely, at most 0.2 % of the time,
            to find replicated state that differs, and losses that use weights outside of the network.

    Raises:
        ConvoyError: a layer cannot be divided as the plan says, a pattern of the plan or of `recompute` matches no
            layer, or the plan is not for as many devices as there are.
    """
    options = Options(batch_norm, loss, seed, microbatches, compile, as_recompute(recompute))
    network = take_part(model, plan, example, options)
    if network.plan.mesh.num_devices > 1:
        network.guard = Guard(network, compares=checks)
        mark_state(model)
    return model


@dataclass(frozen=True)
class Options:
    """How a network is run, as `parallelize` takes it."""

    batch_norm: BatchNorm = "sync"
    loss: Loss = "mean"
    seed: int | None = None
    microbatches: int | None = None
    compile: bool = False
    recompute: Recompute = False

    def check(self) -> None:
        """ConvoyError for what is no such value."""
        _check_option("batch_norm", self.batch_norm, get_args(BatchNorm))
        _check_option("loss", self.loss, get_args(Loss))
        number = self.microbatches
        if number is not None and (type(number) is not int or number < 1):
            raise ConvoyError(f"microbatches={number!r} must be a whole number from 1, or None for as many as serve")


def take_part(
    model: nn.Module,
    plan: "str | Path | dict[str, Any] | Plan",
    example: "Tensor | tuple[Any, ...] | dict[str, Any]",
    options: Options = Options(),
    devices: int | None = None,
) -> Network:
    """As `parallelize`, for a loop that Convoy runs itself: nothing watches over it. `devices` take part, by default as
    many as there are; one may while the others rest."""
    join()  # first, so that mistakes are said once for all ranks
    devices = num_ranks() if devices is None else devices
    prepare_given(model, needs_numbers=devices == 1 or dist.get_rank() == 0)
    if hasattr(model, "_convoy"):
        raise ConvoyError("this network is parallelized already: build it anew for another plan")
    if devices > 1:
        _check_parts(model)
    options.check()
    examples, form = _examples(model, example)
    keep_freed_memory(examples[0].device)
    parsed = Plan.parse(plan, num_devices=devices)
    check_devices(parsed.mesh, devices)
    # torch 2.13's inductor gives zeros for gradients of LeNet's second stage on a CPU, also without Convoy (Conv2d(6,
    # 16, 5), ReLU, MaxPool2d(2), Flatten, Linear; eight images of 14 × 14); by `eager` and `aot_eager` they are right
    if options.compile and parsed.num_stages > 1:
        raise ConvoyError(
            "a network in stages is not compiled, as torch.compile has given the layers of a stage wrong gradients: "
            "leave compile away, or choose a plan without stages"
        )
    groups = Groups(parsed.mesh, 0 if devices == 1 else None)
    world = groups.world
    with torch.inference_mode(False):
        make_room(model, world)
        network = _network(model, parsed, groups, examples, form, options)
        _take_shards(network, examples[0].device, world)
        network.reducer = GradientReducer(network.reduced(), groups)
        if devices > 1:
            for parameter in model.parameters():
                parameter._convoy = True  # type: ignore[attr-defined]
    # in place, where DistributedDataParallel wraps: names and hooks stay those of the plain network, which never exists
    # twice
    model._convoy = network  # type: ignore[assignment]
    model.forward = network.forward
    if not network.undivided:
        model._compiled_call_impl = network.call
    return network


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of the mean loss over the global batch, by the plain network's names. All ranks call it.

    >>> F.cross_entropy(net(images[mine]), labels[mine]).backward()
    >>> {name: tuple(gradient.shape) for name, gradient in convoy.gradients(net).items()}
    {'0.weight': (8, 3, 3, 3), '0.bias': (8,), '3.weight': (10, 32), '3.bias': (10,)}

    Args:
        net: what `convoy.parallelize` returned, after a backward pass.

    Returns:
        A tensor for every parameter that has a gradient, the same on every rank.
    """
    network = network_of(net)
    agree("convoy.gradients", network.groups)
    return {name: network.whole(name, p.grad) for name, p in net.named_parameters() if p.grad is not None}


def forward_backward(
    net: nn.Module,
    inputs: "Tensor | tuple[Tensor, ...]",
    targets: Any,
    loss: Callable[[Any, Any], Tensor],
    *,
    schedule: Schedule = "1f1b",
) -> Tensor:
    """The loss of this rank's samples, with its backward pass: under a plan with stages in the order of a schedule.

    As `loss(net(inputs), targets).backward()`, with the same gradients; but by 1F1B each stage begins with the backward
    pass of the first part of the batch as soon as it can, and so keeps the activations of no more parts than there are
    stages (Narayanan et al., PipeDream, 2019).

    >>> loss = convoy.forward_backward(net, images[mine], labels[mine], F.cross_entropy)
    >>> optimizer.step()

    Args:
        net: what `convoy.parallelize` returned.
        inputs: this rank's samples, or a tuple of the network's arguments.
        targets: of these samples: a tensor, or tuples, lists and dicts of tensors, with the samples along dim 0.
        loss: takes what the network gives for some samples, and their targets; gives the mean over them, or with
            `parallelize(..., loss="part")` a sum. With stages it is called in the last one, for each part of the batch.
        schedule: `1f1b`; `gpipe`, all parts forward, then all backward; or `zero-bubble`, which computes weight
            gradients of several parts at once while a stage would wait, and keeps more for that (Qi et al., 2024).

    Returns:
        The loss of this rank's samples, a scalar in float64 without a gradient, the same on all ranks that compute
        them.

    Raises:
        ConvoyError: the loss is no scalar or has no gradient, a target has another number of samples than the inputs,
            or, with stages, ranks have different schedules or run their passes otherwise.
    """
    _check_option("schedule", schedule, get_args(Schedule))
    network = network_of(net)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    if isinstance(network, StagedNetwork):
        return network.run_schedule(args, targets, loss, schedule)
    value = differentiable_loss(loss(net(*args), targets), network.loss)
    value.backward()
    return value.detach().double()


@contextmanager
def accumulate(net: nn.Module) -> Iterator[None]:
    """A context in which backward passes keep their gradients on this rank; the next pass after it adds up all of them.

    Saves the reduction of gradients in all but the last of several batches that are to give one update:

    >>> with convoy.accumulate(net):
    ...     (F.cross_entropy(net(images[:2]), labels[:2]) / 2).backward()
    >>> (F.cross_entropy(net(images[2:4]), labels[2:4]) / 2).backward()  # `p.grad` is now that of both

    As on one device, gradients add up: divide the losses by their number for a mean. All ranks enter and leave it
    together. Until that backward pass, `p.grad` and `convoy.gradients` are without meaning.

    Args:
        net: what `convoy.parallelize` returned.
    """
    reducer = network_of(net).reducer
    with reducer.paused() if reducer is not None else contextlib.nullcontext():
        yield


def clip_grad_norm_(net: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that the norm of them together is at most `max_norm`. All ranks call it.

    As `torch.nn.utils.clip_grad_norm_` of the plain network. Torch's function on `net.parameters()` is right too, but
    asks the other ranks once for every divided parameter, where this asks once for all.

    >>> F.cross_entropy(net(images[mine]), labels[mine]).backward()
    >>> norm = convoy.clip_grad_norm_(net, max_norm=1.0)
    >>> optimizer.step()

    Returns:
        The norm before.
    """
    network = network_of(net)
    agree("convoy.clip_grad_norm_", network.groups)
    divided = [(p, tuple(sorted(network.layouts[name].split_axes))) for name, p in net.named_parameters()]
    with torch._C.DisableTorchFunctionSubclass():  # they may be marked as parts, which would ask once for each
        return clip_grad_norm(divided, network.groups, max_norm)


def local_samples(net: nn.Module, num_samples: int) -> slice:
    """The slice of a global batch that this rank computes: consecutive, as even as can be over the sample ranks.

    >>> convoy.local_samples(net, 7)  # on rank 0 of two that divide the samples
    slice(0, 4, None)

    Args:
        net: what `convoy.parallelize` returned.
        num_samples: size of the global batch.
    """
    network = network_of(net)
    part = balanced(num_samples, network.num_sample_ranks)[network.sample_rank]
    return slice(part.start, part.stop)


def explain(net: nn.Module, samples: Sequence[int] | None = None) -> str:
    """The effect of a parallelized network's plan, layer by layer, as text.

    For every layer its strategy, how its output lies over the ranks, what is sent for its input, and the bytes that a
    rank sends and holds; which layers run whole on every rank, and why; how the network was captured. It holds for the
    mode that the network is in, and for as many samples on each rank as the example had, unless `samples` says
    otherwise. How long stages wait is said for the schedule of the last training pass. No rank waits for another.

    >>> print(convoy.explain(net))  # doctest: +ELLIPSIS
    plan sample=2
    training, 8 samples (4 + 4), 2 ranks, captured as one program
    <BLANKLINE>
    layer  work    strategy  gives                sent for its input  forward  backward  gradients  parameters
    0      conv    sample    samples over sample  -                         -         -      896 B       896 B
    ...

    Args:
        net: what `convoy.parallelize` returned.
        samples: number of samples of every sample rank, e.g. (96, 96, 64) where the batch is divided 3 : 3 : 2.

    Raises:
        ConvoyError: the network is not parallelized, or cannot run in this mode, or the batch is not divided into as
            many parts as `samples` says.
    """
    network = network_of(net)
    if isinstance(network, Uncaptured):
        shares = network.example_samples(samples)
        setting = setting_text(net.training, shares, network.plan.mesh.num_devices, network.captured)
        return f"plan {network.plan}\n{setting}\n\nevery rank runs all layers on the whole batch"
    placement = network.example_placement(net.training, samples)
    staged = network.staged(placement)
    memory = predict_memory(placement) if staged is None else memory_in_stages(placement, staged)
    recomputed_text = None if network.undivided else what_is_recomputed(placement, staged)
    notes = [] if recomputed_text is None else [recomputed_text]
    if staged is not None and isinstance(network, StagedNetwork):
        parts = network.example_parts(samples)
        share = rough_percent(bubble(network.schedule, parts, staged.number))
        notes.append(
            f"a rank's samples go through the stages in {plural(parts, 'part')}, schedule {network.schedule}: stages "
            f"of equal work wait {share} of the time"
        )
    return text_of_placement(placement, memory, network.plan, network.captured, staged, notes)


def _check_parts(model: nn.Module) -> None:
    """Refuse layers that several devices cannot train."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "_convoy"):
            raise ConvoyError(
                f"{name} belongs to a network that is parallelized already, as where two networks share layers: let "
                "all heads be parts of one network, or build the layers anew"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConvoyError(
                f"{name} has sparse gradients, which are not added over ranks: build it with sparse=False"
            )


def _check_option(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConvoyError(f"{name}={value!r} is unknown: it must be {', '.join(choices[:-1])} or {choices[-1]}")


def _examples(model: nn.Module, example: Any) -> tuple[tuple[Tensor, ...], Form | None]:
    args = example if isinstance(example, tuple) else () if isinstance(example, dict) else (example,)
    tensors = leaves(example, Tensor)
    if not tensors or any(not x.dim() or not len(x) for x in tensors):
        raise ConvoyError(
            "example must be a tensor with one rank's samples along dim 0, or a tuple or dict of the network's "
            "arguments with such tensors in it"
        )
    named = example if isinstance(example, dict) else {}
    return arguments(model, args, named, vars(model).get("forward"))


def _network(
    model: nn.Module, plan: Plan, groups: Groups, examples: tuple[Tensor, ...], form: Form | None, options: Options
) -> Network:
    """The network with its parameters placed: as one program where it can be captured, else whole on every rank."""
    world = groups.world
    context = StepContext(_seed(options.seed, world), batch_norm=options.batch_norm)
    channels_last = _is_channels_last(model, examples, world)
    made_with = (model, plan, groups, context, options.loss, channels_last, options.compile)
    try:
        if plan.num_stages > 1:
            network: Network = StagedNetwork(*made_with, recompute=options.recompute, microbatches=options.microbatches)
        else:
            network = Network(*made_with, recompute=options.recompute)
        network.look(examples, form)
    except CaptureError as error:
        if isinstance(error, KeptError) and plan.mesh.num_devices > 1:
            raise ConvoyError(
                f"{error}, where a pass on several devices runs as a program that would not set it: return it from "
                "forward"
            ) from error
        if plan.num_stages > 1:
            raise ConvoyError(
                f"the network cannot be cut into stages, as it was not captured as one program ({error}): choose a "
                "plan without an axis stage"
            ) from error
        if options.recompute:
            raise ConvoyError(
                f"recompute needs the network as one graph, but {error}: leave recompute away, or let the network "
                "itself recompute by torch.utils.checkpoint"
            ) from error
        network = Uncaptured(*made_with, captured=f"whole on every rank, as {error}")
        network.counts_passes = isinstance(error, ChangedError)
        network.look(examples, form)
    modules = [name for name, _ in model.named_modules()]
    check_patterns(plan, [name for name, op in network.layers if op in COMPUTE], modules, network.borrowed)
    network.place_parameters()
    return network


def _seed(seed: int | None, world: Group) -> int:
    """Rank 0's seed, on every rank."""
    own_seed = (torch.initial_seed() if seed is None else seed) % 2**64
    high, low = gather_ints([own_seed >> 32, own_seed % 2**32], world)[0]
    return (high << 32) + low


def _is_channels_last(model: nn.Module, examples: tuple[Tensor, ...], world: Group) -> bool:
    """Whether convolutions compute with the channels innermost: their images or their weights lie so on rank 0."""
    images = [x for x in (*examples, *model.parameters()) if x.dim() in CHANNELS_LAST]
    lies_so = any(x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()]) and not x.is_contiguous() for x in images)
    return gather_ints([int(lies_so)], world)[0][0] == 1


def _take_shards(network: Network, device: torch.device, world: Group) -> None:
    with torch.no_grad():
        for name, tensor in named_tensors(network.model).items():
            whole = tensor.data.to(device)
            whole = whole.clone() if 0 in whole.stride() else whole  # an expanded one has no room of its own
            tensor.data = network.part(name, whole.copy_(broadcast(whole.contiguous(), world)))
