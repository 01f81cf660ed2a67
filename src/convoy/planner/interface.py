"""`convoy.plan`: the planner for a script of one's own."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.joining import join, num_ranks
from convoy.comm.ranks import Ranks
from convoy.engine.parallelize import Options, accumulate, forward_backward, local_samples, take_part
from convoy.engine.profiling import steady
from convoy.engine.shards import lacks_numbers
from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.graph.capture import copied
from convoy.graph.tree import leaves
from convoy.ops.recompute import Recompute, as_recompute
from convoy.planner.cost.link import Links
from convoy.planner.cost.local_op import BatchNorm
from convoy.planner.cost.prediction import Scored
from convoy.planner.explanation import Explanation, explanation_text
from convoy.planner.planner import Planned, Question, make_plan
from convoy.planner.profiling import autocast
from convoy.planner.store import ProfileStore
from convoy.planner.workload import MakeOptimizer, Workload, check_positive, momentum, workload_of
from convoy.plans.plan import Plan
from convoy.progress import ConsoleReporter
from convoy.terminal import Console


@dataclass(frozen=True, eq=False)
class FoundPlan(Plan):
    """A plan that the planner has found; it goes wherever a plan goes, and equals the plan that was written by hand."""

    planned: Planned = field(kw_only=True, repr=False)  # what was predicted of it, and of others

    def explain(self) -> str:
        """Why this plan: verdict, where the time goes, what would change it, and every layer, as text."""
        return explanation_text(Explanation(self.planned))

    def to_document(self) -> dict[str, Any]:
        """The explanation as JSON has it."""
        return Explanation(self.planned).document()

    @property
    def seconds(self) -> float:
        """Predicted, of one update."""
        return self.planned.best.seconds

    @property
    def speedup(self) -> float:
        """Predicted, over one device."""
        return self.planned.speedup

    @property
    def microbatches(self) -> int | None:
        """Parts of the batch that go through the stages, for `convoy.parallelize`; None where there are no stages."""
        best = self.planned.best
        return best.passes if best.staging is not None else None

    def __eq__(self, plan: object) -> bool:
        if not isinstance(plan, Plan):
            return NotImplemented
        return (self.mesh, self.layers, self.stages) == (plan.mesh, plan.layers, plan.stages)

    __hash__ = Plan.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        # copies go to other processes and files, without the reasons
        return Plan, (self.mesh, self.layers, self.stages)


def plan(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    devices: int | None = None,
    global_batch: int | None = None,
    *,
    fix: Sequence[str] | str = (),
    score: Sequence[Any] | str | Path | Mapping[str, Any] | Plan = (),
    memory_limit: float | None = None,
    link: str | Links | None = None,
    batch_norm: BatchNorm = "sync",
    microbatches: int | None = None,
    passes: int = 1,
    precision: torch.dtype | str | None = None,
    recompute: bool | Sequence[str] = False,
    optimizer: MakeOptimizer = momentum,
    store: bool | str | Path = True,
) -> FoundPlan:
    """The plan that is predicted to train a network fastest. The network is not changed, and no data is needed.

    Under torchrun with as many ranks as `devices`, all of them call it: layers and links are measured on all of them.
    In a process by itself, layers are measured on its device, and the links are those of `link`, or assumed.

    >>> plan = convoy.plan(model, example=images, devices=2, global_batch=64)  # doctest: +SKIP
    >>> print(plan.explain())  # doctest: +SKIP
    >>> net = convoy.parallelize(model, plan, example=images)  # doctest: +SKIP

    With stages, `microbatches=plan.microbatches` cuts the batch into as many parts as are predicted to be fastest.

    Given plans are predicted without a search, and the fastest is returned:

    >>> plan = convoy.plan(model, example=images, score=["sample=2", "filter=2"], store=False)
    >>> str(plan) in {"sample=2", "filter=2"} and plan.seconds > 0
    True

    Args:
        model: any network whose inputs are tensors with the samples along dim 0.
        example: images, or a tuple of all inputs; only the shape of one sample, the type and the device matter.
        devices: number of devices; by default the number of ranks.
        global_batch: samples of one update on all devices together; by default as many as the example has.
        fix: strategies that layers must have, such as `classifier.*=filter`; the first that matches a layer counts.
        score: a plan, or several, to predict instead of a search; the fastest of them is returned.
        memory_limit: bytes that each device has; of plans to score, those that need more are left out.
        link: link between devices that are not at hand: a name of the catalog, as `pcie4`, or a rate, as `10gbit`.
        batch_norm: samples over which batch norm takes its statistics, as in `convoy.parallelize`.
        microbatches: number of microbatches of the batch, which are not split; None if it has none.
        passes: forward and backward passes of an update, if gradients are accumulated.
        precision: type of `torch.autocast`, if it is used, or its name: `bf16`, `fp16`.
        recompute: layers whose activations are computed again, as in `convoy.parallelize`.
        optimizer: function that makes the optimizer for some parameters; by default SGD with momentum.
        store: whether measured times are kept for later plans, or the folder for them.

    Raises:
        TooLargeError: no plan, or none of those to score, fits into the memory.
        ConvoyError: there is no such plan, or the network cannot be seen as one graph.
    """
    join()
    running = num_ranks()
    devices = running if devices is None else devices
    check_positive(devices=devices, memory_limit=memory_limit)
    if running > 1 and running != devices:
        raise ConvoyError(
            f"{running} ranks run, but the plan is for {devices} devices: start {devices} ranks, or only one"
        )
    ranks, layers = Ranks.here() if running > 1 else Ranks(), as_recompute(recompute)
    workload = workload_of(
        model,
        example,
        global_batch,
        passes=passes,
        batch_norm=batch_norm,
        microbatches=microbatches,
        precision=precision,
        optimizer=optimizer,
        recompute=layers,
    )
    if (batch := workload.batch) % passes:
        raise ConvoyError(f"{batch} samples cannot be divided into {passes} equal passes: give a multiple of that")
    plans = [Plan.parse(one, devices) for one in ([score] if isinstance(score, str | Path | Mapping | Plan) else score)]
    for one in plans:
        workload.check(one, (name for name, _ in model.named_modules()))
    question = Question(
        workload,
        devices,
        link=link,
        store=ProfileStore(expanded(store) if isinstance(store, str | Path) else None) if store else None,
        fixes=[fix] if isinstance(fix, str) else list(fix),
        memory_limit=memory_limit,
        plans=plans,
    )
    runs = not plans and not ranks.any(lacks_numbers(model))
    with ConsoleReporter(Console(stderr=True, highlight=False, quiet=ranks.rank > 0)) as reporter:
        planned = make_plan(question, ranks, reporter.prepare, partial(race, model, layers) if runs else None)
    best = planned.best.plan
    return FoundPlan(best.mesh, best.layers, best.stages, planned=planned)


def race(model: nn.Module, recompute: Recompute, planned: Planned, racer: Scored, ranks: Ranks) -> float:
    """Seconds of an update of random samples under a plan, of the slowest rank; a ConvoyError where it cannot be run.
    All ranks, one for each of its devices, call it."""
    workload = planned.workload
    net, in_stages = copied(model).train(), racer.staging is not None
    samples = workload.batch if in_stages else racer.placement.batch.num_samples
    examples = [_example(workload, name, samples) for name in workload.graph.inputs]
    take_part(
        net,
        racer.plan,
        tuple(batch[: max(1, samples // racer.plan.parts)] for batch in examples),
        Options(workload.batch_norm, seed=0, microbatches=racer.passes if in_stages else None, recompute=recompute),
    )
    inputs = tuple(batch[local_samples(net, samples)] for batch in examples)
    optimizer = workload.optimizer(list(net.parameters()))

    def loss(outputs: object, _: object) -> Tensor:
        return torch.stack([output.float().square().mean() for output in leaves(outputs, Tensor)]).sum()

    def measure() -> float:
        ranks.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        with autocast(workload):
            with accumulate(net):
                for _ in range(1, 1 if in_stages else racer.passes):
                    forward_backward(net, inputs, inputs[0], loss)
            forward_backward(net, inputs, inputs[0], loss)
        optimizer.step()
        if workload.device.type == "cuda":
            torch.cuda.synchronize(workload.device)
        return max(ranks.gather(time.perf_counter() - began))

    return median(steady(measure, float, ranks.broadcast, most=8))


def _example(workload: Workload, name: str, samples: int) -> Tensor:
    shape, dtype = workload.graph.shape(name)[1:], workload.graph.values[name].dtype
    batch = torch.rand(samples, *shape, device=workload.device).to(dtype)
    return batch.contiguous(memory_format=torch.channels_last) if workload.channels_last and len(shape) == 3 else batch
