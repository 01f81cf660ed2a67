"""`convoy.plan`: the planner for a script of one's own.

The explanation of a plan as JSON has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.groups import join, num_ranks
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.planner.cost.link import Links, links_named
from convoy.planner.cost.local import BatchNorm
from convoy.planner.cost.store import ProfileStore
from convoy.planner.layers import Layer
from convoy.planner.planner import Planned, Scored, make_plan
from convoy.planner.text import explanation_text
from convoy.planner.verdict import Explained, explained
from convoy.planner.workload import MakeOptimizer, momentum, workload_of
from convoy.plans.plan import Plan


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


@dataclass(frozen=True, eq=False)
class FoundPlan(Plan):
    """A plan that the planner has found; it goes wherever a plan goes, and equals the plan that was written by hand.

    Attributes:
        planned: what was predicted of it, and of others.
    """

    planned: Planned | None = field(default=None, repr=False, compare=False)

    def explain(self) -> str:
        """Why this plan: verdict, where the time goes, what would change it, and every layer, as text."""
        return explanation_text(explained(self._planned()))

    def to_document(self) -> dict[str, Any]:
        """The explanation as JSON has it."""
        return document(explained(self._planned()))

    @property
    def seconds(self) -> float:
        """Predicted, of one update."""
        return self._planned().best.seconds

    @property
    def speedup(self) -> float:
        """Predicted, over one device."""
        return self._planned().speedup

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return (self.mesh, self.layers) == (other.mesh, other.layers)

    __hash__ = Plan.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.mesh, self.layers)  # copies go to other processes and files, without the reasons

    def _planned(self) -> Planned:
        if self.planned is None:
            raise ConvoyError("this plan was not found by the planner, so there is nothing to explain: use convoy.plan")
        return self.planned


def plan(
    model: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    devices: int | None = None,
    global_batch: int | None = None,
    *,
    fix: Sequence[str] | str = (),
    score: Sequence[str | Path | Plan] | str | Path | Plan = (),
    memory_limit: float | None = None,
    link: str | Links | None = None,
    batch_norm: BatchNorm = "sync",
    microbatches: int | None = None,
    passes: int = 1,
    precision: torch.dtype | None = None,
    optimizer: MakeOptimizer = momentum,
    store: bool | Path = True,
) -> FoundPlan:
    """The plan that is predicted to train a network fastest. The network is not changed, and no data is needed.

    Under torchrun with as many ranks as `devices`, all of them call it: layers and links are measured on all of them.
    In a process by itself, layers are measured on its device, and the links are those of `link`, or assumed.

    >>> plan = convoy.plan(model, example=images, devices=2, global_batch=64)  # doctest: +SKIP
    >>> print(plan.explain())  # doctest: +SKIP
    >>> net = convoy.parallelize(model, plan, example=images)  # doctest: +SKIP

    Given plans are predicted without a search, and the fastest is returned:

    >>> plan = convoy.plan(model, example=images, score=["sample=2", "filter=2"], store=False)
    >>> str(plan) in {"sample=2", "filter=2"} and plan.seconds > 0
    True

    Args:
        model: any network whose inputs are tensors with the samples along dim 0.
        example: images; only the shape of one sample, the type and the device matter.
        devices: number of devices; by default the number of ranks.
        global_batch: samples of one update on all devices together; by default as many as the example has.
        fix: strategies that layers must have, such as `classifier.*=filter`; the first that matches a layer counts.
        score: plans to predict instead of a search; the fastest of them is returned.
        memory_limit: bytes that each device has; of plans to score, those that need more are left out.
        link: link between devices that are not at hand: a name of the catalog, as `pcie4`, or a rate, as `10gbit`.
        batch_norm: samples over which batch norm takes its statistics, as in `convoy.parallelize`.
        microbatches: number of microbatches of the batch, which are not split; None if it has none.
        passes: forward and backward passes of an update, if gradients are accumulated.
        precision: type of `torch.autocast`, if it is used.
        optimizer: function that makes the optimizer for some parameters; by default SGD with momentum.
        store: whether measured times are kept for later plans, or the folder for them.

    Raises:
        TooLargeError: no plan, or none of those to score, fits into the memory.
        ConvoyError: there is no such plan, or the network cannot be seen as one graph.
    """
    join()
    here = num_ranks()
    devices = here if devices is None else devices
    if devices < 1:
        raise ConvoyError(f"a plan for {devices} devices cannot be: give at least 1")
    if here > 1 and here != devices:
        raise ConvoyError(
            f"{here} ranks run, but the plan is for {devices} devices: start {devices} ranks, or only one"
        )
    first = example[0] if isinstance(example, tuple) else example
    batch = len(first) if global_batch is None else global_batch
    if microbatches is not None and not 1 <= microbatches <= batch:
        raise ConvoyError(f"microbatches={microbatches} cannot be made of {batch} samples: give at most {batch}")
    if passes > 0 and batch % passes:
        raise ConvoyError(f"{batch} samples cannot be divided into {passes} equal passes: give a multiple of that")
    workload = workload_of(
        model,
        example,
        batch,
        passes=passes,
        batch_norm=batch_norm,
        microbatch=-(-batch // microbatches) if microbatches else 0,
        precision=precision,
        optimizer=optimizer,
    )
    given = [score] if isinstance(score, str | Path | Plan) else list(score)
    links, notes = (link, ()) if not isinstance(link, str) else _named(link, first.device)
    planned = make_plan(
        workload,
        devices,
        Ranks.here() if here > 1 else Ranks(),
        links=links,
        store=ProfileStore(store if isinstance(store, Path) else None) if store else None,
        fixes=[fix] if isinstance(fix, str) else list(fix),
        memory_limit=memory_limit,
        plans=[Plan.parse(one, num_devices=devices) for one in given],
    )
    return found_plan(replace(planned, notes=(*notes, *planned.notes)))


def found_plan(planned: Planned) -> FoundPlan:
    """The best plan with what is known of it."""
    best = planned.best.plan
    return FoundPlan(best.mesh, best.layers, planned)


def _named(text: str, device: torch.device) -> tuple[Links, tuple[str, ...]]:
    links, note = links_named(text, device.type == "cpu")
    return links, (note,)
