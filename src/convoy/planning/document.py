"""The explanation of a plan as JSON has it."""

from typing import Any

from convoy.planning.layers import Layer
from convoy.planning.planner import Scored
from convoy.planning.verdict import Explained


def document(found: Explained) -> dict[str, Any]:
    """Everything that the explanation says, in seconds and bytes; lists stand in the order of the network."""
    planned, scored = found.planned, found.scored
    workload, search = planned.workload, planned.search
    return {
        "model": workload.name,
        "devices": planned.devices,
        "batch": workload.samples * workload.passes,
        "passes": workload.passes,
        "sample": list(workload.sample),
        "plan": _plan(scored),
        "shares": planned.shares(scored.plan),
        "pace": list(planned.costs.pace),
        "update_s": scored.seconds,
        "samples_per_s": found.samples_per_second,
        "speedup": found.speedup,
        "efficiency": found.efficiency,
        "serial_s": planned.serial.seconds,
        "memory": _memory(scored),
        "verdict": {
            "kind": found.verdict.kind,
            "layer": found.verdict.layer,
            "sentence": found.verdict.sentence,
            "advice": found.verdict.advice,
        },
        "time": [{"part": part.name, "seconds": part.seconds, "even_share_s": part.ideal} for part in found.parts],
        "changes": [
            {"kind": change.kind, "change": change.text, "gain": change.gain, "update_s": change.seconds}
            for change in found.changes
        ],
        "candidates": [
            {
                "plan": _plan(one),
                "update_s": one.seconds,
                "speedup": planned.serial.seconds / one.seconds if one.seconds else 1.0,
                "memory": _memory(one),
            }
            for one in planned.candidates
        ],
        "layers": [_layer(layer) for layer in found.layers],
        "exact": search.exact if search is not None else None,
        "notes": list(found.notes),
    }


def _plan(scored: Scored) -> dict[str, Any]:
    return {"text": str(scored.plan), **scored.plan.to_dict()}


def _memory(scored: Scored) -> dict[str, int]:
    memory = scored.memory
    return {
        "total": memory.total,
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "buffers": memory.buffers,
        "messages": memory.messages,
    }


def _layer(layer: Layer) -> dict[str, Any]:
    other = layer.other
    return {
        "layer": layer.name,
        "ops": list(layer.ops),
        "strategy": list(layer.strategy),
        "takes": list(layer.takes),
        "gives": list(layer.gives),
        "forward_s": layer.forward,
        "backward_s": layer.backward,
        "copies_s": layer.copies,
        "exposed_s": layer.exposed,
        "messages_s": layer.messages,
        "sent_bytes": layer.sent,
        "parameter_bytes": layer.parameters,
        "next_best": {"strategy": list(other.strategy), "extra_s": other.seconds} if other is not None else None,
    }
