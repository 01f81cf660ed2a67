"""How a global batch is cut into microbatches, and how many of them may run as one pass.

One pass over several microbatches uses the device better, and is exact where the network treats every microbatch as it
would by itself. Batch norm, which couples samples, and dropout, which draws random numbers, run so that they do.
Whether anything else does is read off the captured graph (`coupling`): no numbers in low precision decide it, which
hang on the size of the batch on a GPU. Where a call has no rule, or there is no graph, the network is run both ways in
float64. A branch whose first weights are zero or next to it, as the last of a residual block often are, shows
nothing: where there are such weights, it is run both ways with others in their place too.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.engine.network import network_of
from convoy.engine.uncaptured import DROPOUT_LAYERS, SampleDropout, Uncaptured, prepare, random_state
from convoy.graph.given import copied
from convoy.graph.graph import Call, CaptureError, Graph, Ref
from convoy.graph.tree import leaves
from convoy.ops import OPERATIONS, capture, place
from convoy.ops.context import BatchNormMode, StepContext
from convoy.ops.memory import predict_memory
from convoy.ops.placing import sharing_axes
from convoy.ops.registry import under_autocast
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
    size, larger = divmod(batch, num_microbatches)
    return (size + 1,) * larger + (size,) * (num_microbatches - larger)


def coupled_in_training(net: nn.Module) -> str | None:
    """What computes with several samples at once in training alone, for a sentence; no trial can show it, as the
    network draws random numbers. None where nothing does, or evaluation does too, of which a trial shows more."""
    network = network_of(net)
    if isinstance(network, Uncaptured) or coupling(network.example_placement(False).graph) is not None:
        return None
    call = coupling(network.example_placement(True).graph)
    return _name(call) if call is not None else None


def coupled(net: nn.Module) -> str | None:
    """What, batch norm aside, makes a sample's output depend on others of its batch, as a trial has shown; for a
    sentence. None where it is batch norm called as a function."""
    network = network_of(net)
    if isinstance(network, Uncaptured):
        return "the network"
    graph = network.example_placement(True).graph
    call = coupling(graph)
    if call is not None:
        return _name(call)
    layers = {name for name, module in net.named_modules() if isinstance(module, _BatchNorm)}
    by_hand = any(call.op == "batch_norm" and call.layer not in layers for call in graph.calls)
    return None if by_hand else "the network"


def _name(call: Call) -> str:
    function = getattr(call.function, "__name__", "a call").strip("_")
    return f"{function} in {f'layer {call.layer}' if call.layer else 'the network itself'}"


PROBE_SAMPLES = 2
TOLERANCE = 1e-6  # of the largest number, in float64
CPU_BUDGET = 512 * 2**20  # bytes that a pass keeps on a CPU at most: docs/benchmarks/small-passes.md
# Parts of a rank's memory that a pass may keep: a CPU's is for the data and for other programs too.
CPU_SHARE, CUDA_SHARE = 1 / 8, 1 / 2
ASLEEP = 0.2  # weights below this part of the usual size let a branch do next to nothing


@dataclass(frozen=True)
class Probe:
    """What two microbatches of two samples show."""

    separable: bool  # microbatches in one pass give what they give in turn (in evaluation, if the network draws)
    draws: bool  # it draws random numbers that no layer here controls, or one dropout layer runs several times
    bytes_per_sample: int  # that a forward pass keeps for the backward pass
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
    batch_norm: BatchNormMode = "microbatch",
    has_numbers: bool = True,
) -> Probe:
    """What a network does with two microbatches: read off its calls, or tried, where a graph does not say all of it
    and no rank has a deferred one (`has_numbers`). `image_shape` is (channels, height, width), `samples` the size of
    each microbatch, and `precision` that of autocast, None where it is off, in which the kept bytes are counted."""
    graph = graph_of(plain, image_shape, samples, training=True)
    eval_graph = graph_of(plain, image_shape, samples, training=False) if graph is not None and _draws(graph) else graph
    by_rules = graph and eval_graph and all(call.op != "opaque" for call in (*graph.calls, *eval_graph.calls))
    if graph is None or eval_graph is None or (has_numbers and not by_rules):
        return _tried(plain, image_shape, device, samples, precision, batch_norm, graph)
    cast_graph = under_autocast(graph, precision, device.type)
    outputs = leaves(graph.output, Ref)

    def kept_bytes(plan: Plan, batch: Batch) -> int:
        return predict_memory(place(cast_graph, plan, batch, [ref.name for ref in outputs]))[0].activations

    # What all samples share, as the weights that autocast has copied, is there once.
    of_both = kept_bytes(_ALONE, Batch(_ALONE.mesh, (), (range(2 * samples),)))
    of_one = of_both - kept_bytes(_HALVES, Batch(_HALVES.mesh, (0,), balanced(2 * samples, 2)))
    layers = dict(plain.named_modules())
    draw_counts = Counter(call.layer for call in graph.calls if OPERATIONS[call.op].is_random)
    draws = any(number > 1 or type(layers.get(layer)) not in DROPOUT_LAYERS for layer, number in draw_counts.items())
    obstacle = coupling(graph)
    return Probe(
        separable=(coupling(eval_graph) if draws else obstacle) is None,
        draws=draws,
        bytes_per_sample=of_one // samples,
        outputs=len(outputs),
        owned=draws and obstacle is None,
        graph=graph,
    )


def _draws(graph: Graph) -> bool:
    return any(OPERATIONS[call.op].is_random for call in graph.calls)


def graph_of(plain: nn.Module, image_shape: tuple[int, ...], samples: int, training: bool) -> Graph | None:
    """The network with two microbatches; None where it does something that a graph cannot say."""
    try:
        return capture(plain, [torch.empty(2 * samples, *image_shape, device="meta")], training=training)
    except CaptureError:
        return None


def _tried(
    plain: nn.Module,
    image_shape: tuple[int, ...],
    device: torch.device,
    samples: int,
    precision: torch.dtype | None,
    batch_norm: BatchNormMode,
    graph: Graph | None,
) -> Probe:
    """The same by a pass in training mode on random images; torch's random state is left as it was."""
    sizes = (samples, samples)
    images = torch.rand(sum(sizes), *image_shape, generator=torch.Generator().manual_seed(0)).to(device)
    model = copied(plain).train()
    context = prepare(model, 0, batch_norm)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        state = random_state(device)
        context.enter(0, 0, sizes, device)
        bytes_at: dict[int, int] = {}

        def note(x: Tensor) -> Tensor:
            if precision is None or not _is_of_weight(x):
                bytes_at[x.data_ptr()] = max(bytes_at.get(x.data_ptr(), 0), x.nbytes)
            # kept, so that no other gets its place, but without its node: in a circle with that it would stay for ever
            return x.detach()

        autocast = torch.autocast(device.type, precision, enabled=precision is not None)
        with autocast, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), _calls(model) as run_counts:
            outputs = len(leaves(model(images), Tensor))
        draws = not torch.equal(state, random_state(device)) or any(number > 1 for number in run_counts.values())
        separable = _separates(plain, image_shape, samples, device, training=not draws, batch_norm=batch_norm)
    weights = {p.data_ptr() for p in model.parameters()}
    return Probe(
        separable=separable,
        draws=draws,
        bytes_per_sample=sum(size for pointer, size in bytes_at.items() if pointer not in weights) // sum(sizes),
        outputs=outputs,
        graph=graph,
    )


def _separates(
    plain: nn.Module,
    image_shape: tuple[int, ...],
    samples: int,
    device: torch.device,
    *,
    training: bool,
    batch_norm: BatchNormMode,
) -> bool:
    """Whether microbatches in one pass give what they give in turn; in float64 on the CPU, for one answer on all
    devices."""

    def on(device: torch.device, dtype: torch.dtype) -> bool:
        model = copied(plain).to(device, dtype).train(training)
        context = prepare(model, 0, batch_norm)
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(2 * samples, *image_shape, generator=generator, dtype=torch.float64).to(device, dtype)
        return _separable(model, context, images)

    try:
        return on(torch.device("cpu"), torch.float64)
    except (RuntimeError, NotImplementedError, TypeError):  # it computes in a type, or on a device, of its own
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return on(device, next((p.dtype for p in plain.parameters()), torch.float32))


def _is_of_weight(x: Tensor) -> bool:
    """Whether it was made of a weight alone, as autocast's copies are: of those there is one, however many samples."""
    step = x.grad_fn
    while step is not None and len(step.next_functions) == 1:
        step = step.next_functions[0][0]
    return hasattr(step, "variable")


def _separable(model: nn.Module, context: StepContext, images: Tensor) -> bool:
    """Whether the two halves of the images one after the other give what they give together, as two microbatches; also
    with weights that are not next to zero."""
    if not _alike(model, context, images):
        return False
    weights = list(_asleep(model))
    if not weights:
        return True
    with _awake(weights):
        finite = all(
            bool(output.isfinite().all()) for output in _run(model, context, images, 0, (len(images) // 2,) * 2)
        )
        return not finite or _alike(model, context, images)  # else it shows nothing


def _run(
    model: nn.Module, context: StepContext, images: Tensor, first_sample: int, sizes: tuple[int, ...]
) -> list[Tensor]:
    context.enter(0, first_sample, sizes, images.device)
    with torch.no_grad():
        return leaves(model(images), Tensor)


def _alike(model: nn.Module, context: StepContext, images: Tensor) -> bool:
    """Whether two microbatches one after the other give, and leave in buffers, what they do together."""
    half, buffers = len(images) // 2, [b for b in model.buffers() if b.numel() and b.is_floating_point()]
    values = [buffer.clone() for buffer in buffers]
    outputs = _run(model, context, images, 0, (half, half))
    buffers_after = [buffer.clone() for buffer in buffers]
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
    halves = [_run(model, context, images[start : start + half], start, (half,)) for start in (0, half)]
    return all(map(_close, buffers_after, buffers)) and all(
        _close(output, torch.cat([pieces[i] for pieces in halves])) for i, output in enumerate(outputs)
    )


def _asleep(model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Weights so small that what they multiply hardly counts, with their usual size; biases multiply nothing."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or not weight.numel() or name.rpartition(".")[2] == "bias":
            continue
        usual = (len(weight) / weight.numel()) ** 0.5 if weight.dim() > 1 else 1.0
        if weight.detach().float().square().mean().sqrt() < ASLEEP * usual:
            yield weight.detach(), usual


@contextmanager
def _awake(weights: list[tuple[Tensor, float]]) -> Iterator[None]:
    """Random numbers of the usual size in place of weights."""
    generator = torch.Generator().manual_seed(0)
    copies = [weight.clone() for weight, _ in weights]
    try:
        for weight, usual in weights:
            weight.copy_(usual * torch.randn(weight.shape, generator=generator))
        yield
    finally:
        for (weight, _), value in zip(weights, copies, strict=True):
            weight.copy_(value)


@contextmanager
def _calls(model: nn.Module) -> Iterator[Counter[nn.Module]]:
    """How often each dropout layer runs: its second mask is another one, which it cannot know by itself."""
    ran: Counter[nn.Module] = Counter()
    layers = [layer for layer in model.modules() if isinstance(layer, SampleDropout) and layer.p > 0]
    handles = [layer.register_forward_hook(lambda layer, *_: ran.update([layer])) for layer in layers]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    scale = b.abs().max().clamp(min=1e-12)
    return bool((a - b).abs().max() <= (TOLERANCE if b.dtype == torch.float64 else 1e-2) * scale)
