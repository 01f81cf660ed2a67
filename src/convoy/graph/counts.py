"""How much work a network is, call by call: floating-point operations, bytes that move, parameters."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from convoy.graph import tree
from convoy.graph.graph import Call, Graph, Ref


@dataclass(frozen=True)
class Work:
    """What a call does in the forward pass, over the whole batch.

    Attributes:
        flops: of convolutions and matrix products, 2 for a multiply-add, as torch's FlopCounterMode counts; 0 for
            all else, whose time is that of its bytes.
        read: bytes of the activations that it takes.
        written: bytes of the activations that it gives.
        parameters: numbers in the parameters that it takes.
    """

    flops: int = 0
    read: int = 0
    written: int = 0
    parameters: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.read + other.read,
            self.written + other.written,
            self.parameters + other.parameters,
        )


def work(graph: Graph, call: Call) -> Work:
    """What one call does."""
    taken = [graph.values[name] for name in call.inputs]
    activations = [value.name for value in taken if value.origin not in ("parameter", "buffer")]
    return Work(
        flops(graph, call),
        sum(num_bytes(graph, name) for name in activations),
        sum(num_bytes(graph, name) for name in call.outputs),
        sum(prod(value.shape) for value in taken if value.origin == "parameter"),
    )


def total(graph: Graph) -> Work:
    """What all calls do; parameters that several calls share count once."""
    whole = sum((work(graph, call) for call in graph.calls), Work())
    return Work(whole.flops, whole.read, whole.written, sum(prod(value.shape) for value in graph.parameters()))


def num_bytes(graph: Graph, name: str) -> int:
    """Bytes of a tensor."""
    value = graph.values[name]
    return prod(value.shape) * value.dtype.itemsize


def flops(graph: Graph, call: Call) -> int:
    """Floating-point operations of a call's forward pass, 2 for a multiply-add."""
    match call.op:
        case "conv":
            weight = graph.shape(call.attributes["weight"])
            larger = call.attributes["input"] if call.attributes["transposed"] else call.outputs[0]
            shape = graph.shape(larger)  # every number of the larger-channelled side meets one group's filters
            return 2 * shape[0] * prod(shape[2:]) * prod(weight)
        case "linear":
            inputs, weight = graph.shape(call.attributes["input"]), graph.shape(call.attributes["weight"])
            return 2 * prod(inputs[:-1]) * prod(weight)
        case "matmul":
            return 2 * prod(graph.shape(call.outputs[0])) * graph.shape(call.attributes["a"])[-1]
        case "opaque":
            return _measured(graph, call)
    return 0


def _measured(graph: Graph, call: Call) -> int:
    """Count by running the call on tensors without storage; 0 for what they cannot do."""

    def stand_in(ref: Ref) -> Tensor:
        return torch.empty(graph.shape(ref.name), dtype=graph.values[ref.name].dtype, device="meta")

    args, kwargs = tree.replace((call.args, call.kwargs), Ref, stand_in)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call.function(*args, **kwargs)
    except Exception:
        return 0
    return int(counter.get_total_flops())


def summary(graph: Graph) -> str:
    """A table: a line for every call that does more than look at its input otherwise, and the totals."""
    rows = [("call", "op", "output", "MFLOP", "MB out", "parameters")]
    for call in graph.calls:
        if call.op in ("identity", "reshape", "permute", "select", "split"):
            continue
        done = work(graph, call)
        rows.append((call.name, call.op, _shape(graph, call), *_figures(done)))
    rows.append(("total", "", "", *_figures(total(graph))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = (cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True))
        right = (cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True))
        lines.append("  ".join((*left, *right)).rstrip())
    return "\n".join(lines)


def _shape(graph: Graph, call: Call) -> str:
    return "x".join(map(str, graph.shape(call.outputs[0]))) or "1"


def _figures(done: Work) -> tuple[str, str, str]:
    return f"{done.flops / 1e6:,.1f}", f"{done.written / 1e6:,.2f}", f"{done.parameters:,}"
