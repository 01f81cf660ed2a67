"""Calls that draw random numbers: one for each sample, as in stochastic depth, and dropout."""

import math
from functools import partial

import torch
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.graph.graph import Recognized, TorchCall
from convoy.ops.gpu import Constants
from convoy.ops.kernel import Kernel, NotCompiled, Site
from convoy.ops.layouts import resolved
from convoy.ops.operation import Operation
from convoy.ops.random_bits import drop, layer_key, random_bits, threshold
from convoy.plans.layout import Indices, Layout
from convoy.plans.place import Placed, Situation


def _place_random(situation: Situation) -> Placed:
    """Output [samples, ...], divided as the samples of the layer are."""
    samples = situation.batch.split(situation.axes("sample"))
    layout = Layout.of({0: samples} if samples else {})
    return Placed({}, {situation.call.outputs[0]: layout})


def _build_random(site: Site) -> Kernel:
    """Draws numbers that are functions of (seed, step, layer, sample)."""
    call, context = site.call, site.context
    context.need_keys()
    value = site.graph.values[call.outputs[0]]
    samples, key = _samples(site, value.name), layer_key(call.name)
    local, count = site.local_shape(value.name), math.prod(value.shape[1:])
    draw, p = call.attributes["draw"], call.attributes["p"]

    def kernel() -> list[Tensor]:
        bits = random_bits(context.keys_of(samples, value.shape[0]), key, count).view(local)
        return [bernoulli(bits, p, value.dtype) if draw == "bernoulli" else uniform(bits, value.dtype)]

    return NotCompiled(kernel)


def _samples(site: Site, name: str) -> range | Constants:
    """The positions in a pass of the samples that this rank holds of a value."""
    samples = site.parts(name, 0)
    return samples if isinstance(samples, range) else Constants(samples)


def bernoulli(bits: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """One with probability `p`, else zero."""
    return torch.ones_like(bits, dtype=dtype) if p == 1.0 else (bits < threshold(p)).to(dtype)


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1), in steps that every float type up to float32 can represent."""
    steps = min(24, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return (bits >> (32 - steps)).bitwise_and_((1 << steps) - 1).to(dtype) * 2.0**-steps


def _dropout(call: TorchCall, channels: bool) -> Recognized | None:
    arguments = call.bound(input=None, p=0.5, training=True)
    if not arguments["training"] or arguments["p"] == 0:
        return Recognized("identity", {"input": call.input})
    rank = len(call.shape(call.input))
    if channels and (rank < 3 or (call.name == "dropout3d" and rank != 5)):
        return None  # without a dimension of samples
    attributes = {"input": call.input, "p": float(arguments["p"]), "channels": channels}
    return Recognized("dropout", attributes, draws=True)


def _inactive(call: TorchCall) -> Recognized | None:
    """Alpha dropout, for which there is no rule while it draws."""
    is_inactive = not call.bound(input=None, p=0.5, training=False)["training"]
    return Recognized("identity", {"input": call.input}) if is_inactive else None


def _place_dropout(situation: Situation) -> Placed:
    """Input [samples, ...]."""
    call = situation.call
    source = call.attributes["input"]
    rows, samples = situation.shape(source)[0], situation.batch.num_samples
    if rows != samples:
        raise ConvoyError(
            f"{situation.where} drops elements of {rows} samples of a batch of {samples}: the network folds something "
            "into the batch, so its masks cannot follow the samples; remove that dropout"
        )
    layout = resolved(situation, source)
    return Placed({source: layout}, {call.outputs[0]: layout})


def _build_dropout(site: Site) -> Kernel:
    """Draws the mask of just the elements that the rank holds; it is the whole mask's part."""
    call, context = site.call, site.context
    context.need_keys()
    source, p = call.attributes["input"], call.attributes["p"]
    shape = site.graph.shape(source)
    channels = call.attributes["channels"]
    dims = range(1, 2) if channels else range(1, len(shape))
    samples, key = _samples(site, source), layer_key(call.name)
    parts, sizes = [site.parts(source, dim) for dim in dims], [shape[dim] for dim in dims]
    whole = parts == [range(size) for size in sizes]
    elements = None if whole else Constants(positions(parts, sizes))

    def kernel(x: Tensor) -> list[Tensor]:
        part = None if elements is None else elements.like(x, torch.int32)
        return [drop(x, context.keys_of(samples, shape[0]), key, p, channels, part)]

    return NotCompiled(kernel)


def positions(parts: list[Indices], sizes: list[int]) -> Tensor:
    """Where the elements at `parts` of each dimension are in a tensor of `sizes`: int32 [elements]."""
    flat_positions = torch.zeros(1, dtype=torch.int32)
    for part, size in zip(parts, sizes, strict=True):
        inner = torch.tensor(part, dtype=torch.int32)
        flat_positions = (flat_positions[:, None] * size + inner).flatten()
    return flat_positions


OPERATIONS = (
    Operation(
        "random",  # the recorder recognizes what draws by itself
        _place_random,
        {},
        _build_random,
        is_random=True,
        by_function=True,
        options=("draw",),
    ),
    Operation(
        "dropout",
        _place_dropout,
        {
            "dropout": partial(_dropout, channels=False),
            **{n: partial(_dropout, channels=True) for n in ("dropout1d", "dropout2d", "dropout3d", "feature_dropout")},
            **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _inactive),
        },
        _build_dropout,
        keeps_inside=1,
        is_random=True,
        follows=True,
        passes=2.0,
        options=("channels",),
    ),
)
