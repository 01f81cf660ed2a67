"""How a global batch is cut into microbatches, and how many of them may run as one pass.

One pass over several microbatches uses the device better, and is exact where the network treats every microbatch as it
would by itself. Batch norm, which couples samples, and dropout, which draws random numbers, run so that they do.
Whether anything else does is read off the captured graph (`coupling`): in the outputs of fifty layers, under TF32,
rounding that differs by the size of the batch is more than 1 %. A call without a rule is tried by itself, on random
numbers in float64, where the network's weights, which may be next to zero at first, cannot hide what it does.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.engine.network import network_of
from convoy.engine.uncaptured import Uncaptured, drawing
from convoy.graph.capture import copied
from convoy.graph.graph import Call, CaptureError, Graph, Ref
from convoy.graph.tree import leaves
from convoy.graph.tree import replace as replace_leaves
from convoy.ops import OPERATIONS, capture, place
from convoy.ops.memory import predict_memory
from convoy.ops.registry import sharing_axes, under_autocast
from convoy.plans.layout import balanced
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch, PlacedCall
from convoy.plans.plan import Plan

_ALONE = Plan.parse("serial")
_HALVES = Plan(Mesh(("sample",), (2,)), (("*", {"sample": "sample"}),))


def coupling(graph: Graph, by_gradients: bool = False) -> Call | None:
    """The first call, batch norm aside, that needs more than its own samples where the samples lie on two devices. A
    call without a rule counts as one. The graph is of at least two samples. `by_gradients` also counts weights that are
    computed, whose gradients are added before the backward pass of what computes them."""
    batch = Batch(_HALVES.mesh, (0,), balanced(graph.shape(graph.inputs[0])[0], 2))
    placement = place(graph, _HALVES, batch, [])
    return next((placed.call for placed in placement.calls if _couples(placed, graph, by_gradients)), None)


def _couples(placed: PlacedCall, graph: Graph, by_gradients: bool) -> bool:
    call = placed.call
    if call.op == "batch_norm":
        return False
    is_sent = any(
        graph.values[name].origin in ("call", "input") and (by_gradients or any(step.kind != "copy" for step in steps))
        for name, steps in placed.transfers.items()
    )
    partial = any(layout.partial for layout in placed.placed.outputs.values())
    return is_sent or partial or bool(sharing_axes(call, placed.placed, graph))


def why_together(graph: Graph, batch_norm: str) -> str:
    """Why a pass of two or more samples cannot be cut into parts that run in turn, in words; empty where it can."""
    whole = batch_norm == "sync" or not graph.training  # as by the plain layer, which may have no other statistics
    normed = [call for call in graph.calls if whole and call.op == "batch_norm" and call.attributes["training"]]
    obstacle = next(iter(normed), coupling(graph))
    if obstacle is not None:
        layer = f"layer {obstacle.layer}" if obstacle.layer else "the network itself"
        who = f"batch norm over the global batch ({layer})" if normed else layer
        return f"{who} computes with all samples of a pass at once"
    of_samples = set(graph.inputs)
    for call in graph.calls:
        if of_samples.intersection(call.inputs):
            of_samples.update(call.outputs)
    if any(ref.name not in of_samples for ref in leaves(graph.output, Ref)):
        return "the network returns a tensor in which there are no samples"
    return ""


def microbatch_sizes(batch: int, num_microbatches: int) -> tuple[int, ...]:
    """Cut `batch` samples into microbatches as even as can be, the larger ones first."""
    assert 1 <= num_microbatches <= batch, f"{num_microbatches} microbatches of {batch} samples"
    return tuple(map(len, balanced(batch, num_microbatches)))


def why_coupled(net: nn.Module, in_training_alone: bool) -> str | None:
    """What, batch norm aside, makes a sample's output depend on others of its batch, for a sentence: as a trial has
    shown, or `in_training_alone`, where no trial shows it, as the network draws random numbers. None where nothing does
    (in evaluation a trial shows more), or batch norm that is called as a function."""
    network = network_of(net)
    if isinstance(network, Uncaptured):
        return None if in_training_alone else "the network"
    if in_training_alone and coupling(network.example_placement(False).graph) is not None:
        return None
    graph = network.example_placement(True).graph
    if (call := coupling(graph)) is not None:
        function = getattr(call.function, "__name__", "a call").strip("_")
        return f"{function} in {f'layer {call.layer}' if call.layer else 'the network itself'}"
    layers = {name for name, module in net.named_modules() if isinstance(module, _BatchNorm)}
    by_hand = any(call.op == "batch_norm" and call.layer not in layers for call in graph.calls)
    return None if by_hand or in_training_alone else "the network"


PROBE_SAMPLES = 2
TOLERANCE = 1e-6  # of the largest number, in float64
DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
CPU_BUDGET = 512 * 2**20  # bytes that a pass keeps on a CPU at most: docs/benchmarks/small-passes.md
# Parts of a rank's memory that a pass may keep: a CPU's is for the data and for other programs too.
CPU_SHARE, CUDA_SHARE = 1 / 8, 1 / 2


@dataclass(frozen=True)
class Probe:
    """What two microbatches of two samples show. A network that cannot be captured is separable, as each microbatch of
    it runs by itself in any pass, and draws in a way of its own, so that a pass has one of them."""

    separable: bool  # microbatches in one pass give what they give in turn (in evaluation, if the network draws)
    draws: bool  # it draws random numbers that no layer here controls, or one dropout layer runs several times
    bytes_per_sample: int = 0  # that a forward pass keeps for the backward pass
    outputs: int = 1  # tensors that it gives in training: with auxiliary heads more than one
    owned: bool = False  # the engine draws all of them itself, each as a function of (seed, step, layer, sample)
    graph: Graph | None = field(default=None, repr=False)  # of two microbatches in training, if it can be captured
    on_device: int = 1  # ranks that share the memory of a GPU, or of a host's CPUs

    @property
    def by_batch(self) -> bool:
        """Whether batch norm has no running statistics, so that evaluation depends on the batch too."""
        normed = (call.attributes for call in self.graph.calls if call.op == "batch_norm") if self.graph else ()
        return any(attributes["training"] and attributes["running_mean"] is None for attributes in normed)

    def merge(self, sizes: tuple[int, ...], device: torch.device, memory: float, sharing: int = 1) -> int:
        """Microbatches in one pass: all of them, as many as fit in a pass's part of the rank's `memory` in bytes, or
        one. Where several devices are `sharing` the work on a pass, each keeps a part of it."""
        if (self.draws and not self.owned) or not self.separable:
            return 1
        budget = CUDA_SHARE * memory if device.type == "cuda" else min(CPU_SHARE * memory, CPU_BUDGET)
        return max(1, min(len(sizes), int(sharing * budget // max(1, self.bytes_per_sample * max(sizes)))))


def probe(
    plain: nn.Module,
    image_shape: tuple[int, ...],
    device: torch.device,
    samples: int = PROBE_SAMPLES,
    precision: torch.dtype | None = None,
) -> Probe:
    """What a network does with two microbatches, read off its calls. `image_shape` is (channels, height, width),
    `samples` the size of each microbatch, and `precision` that of autocast, None where it is off, in which the kept
    bytes are counted."""
    graph = graph_of(plain, image_shape, 2 * samples, training=True)
    draw_counts = Counter(call.layer for call in graph.calls if OPERATIONS[call.op].is_random) if graph else {}
    tried_graph = graph_of(plain, image_shape, 2 * samples, training=False) if draw_counts else graph
    if graph is None or tried_graph is None:
        images = torch.zeros(2 * samples, *image_shape, device=device)
        with torch.no_grad(), drawing(0, device):  # that it runs on such images at all, and how many heads it has
            return Probe(True, True, outputs=len(leaves(copied(plain).train()(images), Tensor)))
    cast_graph = under_autocast(graph, precision, device.type)
    outputs = leaves(graph.output, Ref)

    def kept_bytes(plan: Plan, batch: Batch) -> int:
        return predict_memory(place(cast_graph, plan, batch, [ref.name for ref in outputs]))[0].activations

    # What all samples share, as the weights that autocast has copied, is there once.
    of_both = kept_bytes(_ALONE, Batch(_ALONE.mesh, (), (range(2 * samples),)))
    of_one = of_both - kept_bytes(_HALVES, Batch(_HALVES.mesh, (0,), balanced(2 * samples, 2)))
    layers = dict(plain.named_modules())
    draws = any(number > 1 or type(layers.get(layer)) not in DROPOUT_LAYERS for layer, number in draw_counts.items())

    def separates(graph: Graph) -> bool:
        half = graph_of(plain, image_shape, samples, graph.training) if any(map(_has_no_rule, graph.calls)) else None
        return coupling(graph if half is None else _tried(graph, half)) is None

    is_separable = separates(graph)
    return Probe(
        separable=separates(tried_graph) if draws else is_separable,
        draws=draws,
        bytes_per_sample=of_one // samples,
        outputs=len(outputs),
        owned=draws and is_separable,
        graph=graph,
    )


def graph_of(plain: nn.Module, image_shape: tuple[int, ...], samples: int, training: bool) -> Graph | None:
    """The network with some samples; None where it does something that a graph cannot say."""
    try:
        return capture(plain, [torch.empty(samples, *image_shape, device="meta")], training=training)
    except CaptureError:
        return None


def _has_no_rule(call: Call) -> bool:
    return call.op == "opaque" and not (call.attributes.get("independent") or call.updates)


def _tried(graph: Graph, half: Graph) -> Graph:
    """The graph, in which a call without a rule counts as one of each sample by itself where a trial beside the graph
    of half the samples shows it."""
    if len(half.calls) != len(graph.calls):
        return graph
    calls = []
    for call, half_call in zip(graph.calls, half.calls, strict=True):
        names = list(zip(call.inputs, half_call.inputs, strict=True))
        shared = {name for name, half_name in names if graph.shape(name) == half.shape(half_name)}
        if _has_no_rule(call) and _samples_apart(graph, call, half_call, shared):
            call = replace(call, attributes={"independent": (0,), "shared": tuple(shared)})
        calls.append(call)
    return replace(graph, calls=tuple(calls))


def _samples_apart(graph: Graph, call: Call, half_call: Call, shared: Collection[str]) -> bool:
    """Whether a call gives for the halves of its inputs, but for the shared ones, what it gives for the whole, and
    draws no random numbers."""
    cpu = torch.device("cpu")

    def outputs(of: Call, tensors: Iterable[Tensor]) -> list[Tensor]:
        by_name = {name: x.clone() for name, x in zip(of.inputs, tensors, strict=True)}
        args, kwargs = replace_leaves((of.args, of.kwargs), Ref, lambda ref: by_name[ref.name])
        return leaves(of.function(*args, **kwargs), Tensor)

    types = {name: graph.values[name].dtype for name in call.inputs}
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in types.values()):
        return False
    with drawing(0, cpu):
        whole = {
            name: torch.randn(graph.shape(name), dtype=torch.complex128 if dtype.is_complex else torch.float64)
            for name, dtype in types.items()
        }
        state = torch.get_rng_state()
        try:
            halves = [
                outputs(half_call, (x if name in shared else x.chunk(2)[number] for name, x in whole.items()))
                for number in range(2)
            ]
            pairs = zip(outputs(call, whole.values()), zip(*halves, strict=True), strict=True)
            is_same = all(_close(x, torch.cat(pieces)) for x, pieces in pairs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return False
        return is_same and torch.equal(state, torch.get_rng_state())


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max().clamp(min=1e-12))
