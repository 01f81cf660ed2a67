"""Builds all that a run needs from its recipe, and nothing on disk: what is wrong is said before a file is made."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy import models
from convoy.comm.backend import own
from convoy.comm.ranks import Ranks
from convoy.data import DataSet, num_workers, open_data
from convoy.data.loader import first_workers
from convoy.data.sources import Progress
from convoy.engine import Probe
from convoy.engine.coupling import microbatch_sizes
from convoy.engine.deferred import lacks_numbers
from convoy.engine.recorded import graph_on, leave_default_stream
from convoy.engine.uncaptured import Uncaptured
from convoy.errors import ConvoyError, TooLargeError
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.prediction import most, rank_memory
from convoy.planner.cost.store import ProfileStore
from convoy.planner.workload import memory_of_updates
from convoy.plans.fit import note_on_hosts
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE, Schedule, bubble
from convoy.training.build import build_for, check_coupling, divisible_sizes, merged, on_meta, probed
from convoy.training.code import code_of
from convoy.training.defaults import settle
from convoy.training.derived import derive, left_out_of_epochs, num_microbatches, resolve
from convoy.training.division import Division, Pass, divide, text
from convoy.training.optimizers import create_optimizer
from convoy.training.parallel import TrainedNetwork
from convoy.training.parallel_config import ParallelConfig, check_shares, plan_of
from convoy.training.precision import Scaler, check_precision, set_numerics
from convoy.training.recipe import LossConfig, Recipe
from convoy.training.records import Derived, StageRecord
from convoy.training.resume import check_ranks
from convoy.training.session import Prepared, Session
from convoy.training.state import AveragedWeights, RunState
from convoy.training.step import TrainingStep
from convoy.training.workloads import Chosen, Shares, choose_plan, optimizer_for
from convoy.units import plural, rough_percent, size


def set_up(
    recipe: Recipe,
    device: torch.device,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    data: DataSet | None = None,
    keep: bool = True,
    explicit_keys: Collection[str] = (),
    rivals: Sequence[Plan] = (),
) -> Session:
    """Open the data, build the network and everything around it; what the recipe leaves open is settled for the devices
    here. All ranks call it. A ConvoyError where the recipe, the plan, the data or the weights cannot be used as they
    are.

    `progress` is told of long work on the data: what, done, total. `data` stand in place of what the recipe names,
    where only the speed counts. `keep` says whether measured times are kept for the next time, and those that are kept
    are used; `explicit_keys` are keys of the recipe that the user has set just now, which are to have an effect on this
    network; `rivals` are plans beside those that the planner finds, where it chooses.
    """
    ranks = ranks or Ranks()
    leave_default_stream(device)
    set_numerics(recipe)
    check_devices(recipe, ranks.num)
    plan, notes = plan_of(recipe.parallel, ranks.num)
    check_precision(recipe.precision, device)
    if data is None:
        first = progress if ranks.rank == 0 else None
        if first is not None:
            first("opening the data", 0, 1)
        data = open_data(recipe.data, first)
        check_ranks(data, ranks)
    gpu = own(device).gpu
    gpus = ranks.gather(gpu)
    sharing = gpus.count(gpu) if gpu else ranks.on_host  # ranks that share the memory of the GPU, or of the host
    quantities = resolve(recipe, len(data.train))
    notes += left_out_of_epochs(recipe.batch, len(data.train))
    model, build_notes = build_for(recipe, data, plan, ranks)
    notes += build_notes
    if recipe.batch_norm != "microbatch" and not _has_batch_norm(model):
        notes.append(f"batch_norm={recipe.batch_norm} has no effect: {recipe.model.name} has no batch norm")
    shape = data.channels, data.image_size, data.image_size
    change = "data.image_size, data.channels, the microbatch or the model"
    store = ProfileStore() if keep else None

    as_graph = ranks.any(lacks_numbers(model))
    settled = settle(recipe, device, ranks)
    recipe = settled.recipe
    check_precision(recipe.precision, device)
    notes += settled.notes
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    # parts alone are brought to the device of a network that the first rank has
    model.to(device=None if as_graph else device, memory_format=memory_format)  # type: ignore[call-overload]
    probe = probed(model, recipe, shape, quantities.sizes, device, change, len(data.classes), as_graph)
    probe = replace(probe, on_device=sharing)
    notes += _without_heads(recipe, probe, explicit_keys)
    parts, useful = parts_of(recipe, plan, ranks.num)
    sizes, smaller = divisible_sizes(recipe, model, parts, probe, useful)
    quantities = replace(quantities, sizes=sizes)
    notes += [smaller] if smaller is not None else []
    code = ranks.first(lambda: code_of(model, probe.graph))
    ready = Prepared(recipe, data, quantities, model, probe, device, ranks, store, settled.derived, code)
    if plan is not None:
        chosen = Chosen(plan, ())
    else:

        def make_step(model: nn.Module, racing: Ranks, plan: Plan, *of_plan: Any) -> TrainingStep:
            return _assemble(replace(ready, model=model, ranks=racing), plan, [], *of_plan).step()

        merge, _ = ranks.broadcast(merged(recipe, probe, sizes, device))
        say = progress if progress is not None and ranks.rank == 0 else lambda *work: None
        chosen = choose_plan(ready, merge, rivals, make_step, say)
    notes += [*chosen.notes, *note_on_hosts(chosen.plan, ranks.on_host)]
    session = _assemble(ready, chosen.plan, notes, chosen.shares, chosen.staging)
    session.scored, session.one_device_s = chosen.scored, chosen.one_device_s
    session.notes += _of_recording(session, explicit_keys)
    return session


def _of_recording(session: Session, explicit_keys: Collection[str]) -> list[str]:
    """What to say where updates are not recorded, and somebody may expect it."""
    if session.recipe.cuda_graphs == "off":
        return []
    if graph_on(session.device) is None:
        no_gpu = "cuda_graphs has no effect: there are CUDA graphs on GPUs alone, and this run is on a CPU"
        return [no_gpu] if "cuda_graphs" in explicit_keys else []
    why = session.why_not_recorded
    return [] if why is None else [f"updates are not recorded as CUDA graphs: {why}"]


def parts_of(recipe: Recipe, plan: Plan | None, num_devices: int) -> tuple[int, int]:
    """Into how many parts a batch has to be divided, and how many are of use where they go through stages."""
    if plan is None:
        return num_devices, num_devices
    if plan.num_stages == 1:
        return plan.parts, plan.parts
    return plan.parts, plan.parts * min(PARTS_PER_STAGE * plan.num_stages, max(1, recipe.batch // plan.parts))


def check_devices(recipe: Recipe, num_devices: int) -> None:
    """Refuse devices and shares that the plan or the batch cannot have: another number of devices, too few
    microbatches, or not as many shares as parts of the batch.

    Into how many parts `owt`, and plans of several patterns, divide a batch depends on the network's layers: these are
    refused when it is there.
    """
    plan, _ = plan_of(recipe.parallel, num_devices)
    shares = recipe.parallel.shares if isinstance(recipe.parallel.shares, tuple) else None
    if plan is None:
        check_shares(shares, num_devices)
    elif plan.parts > 1 and all(pattern == "*" and "owt" not in given.values() for pattern, given in plan.layers):
        sizes = microbatch_sizes(recipe.batch, num_microbatches(recipe))
        if len(sizes) < plan.parts <= recipe.batch:
            model = on_meta(recipe)
            if model is None:  # what it is made of is seen when it is there
                return
            sizes, _ = divisible_sizes(recipe, model, plan.parts)
        divide(sizes, plan.parts, shares)


def _without_heads(recipe: Recipe, found: Probe, explicit_keys: Collection[str]) -> list[str]:
    """What to say where auxiliary heads have a weight of their own, but the network has none; a ConvoyError where the
    user has just set it.
    """
    weight = recipe.loss.aux_weight
    if found.outputs > 1 or ("loss.aux_weight" not in explicit_keys and weight == LossConfig().aux_weight):
        return []
    sentence = f"loss.aux_weight={weight:g} has no effect: {recipe.model.name} has no auxiliary heads"
    if "loss.aux_weight" in explicit_keys:
        raise ConvoyError(f"{sentence}; leave it out")
    return [sentence]


def _assemble(
    ready: Prepared, plan: Plan, notes: list[str], shares: Shares = None, staging: Staging | None = None
) -> Session:
    """The session under a plan, with the planner's shares and stages where the recipe gives none. All ranks call it."""
    staging = staging if plan.num_stages > 1 else None
    if staging is not None:  # microbatches small enough for as many passes as the planner has found
        useful = plan.parts * len(staging.samples)
        sizes, _ = divisible_sizes(ready.recipe, ready.model, plan.parts, ready.probe, useful)
        ready = replace(ready, quantities=replace(ready.quantities, sizes=sizes))
    recipe, data, device, ranks, model = ready.recipe, ready.data, ready.device, ready.ranks, ready.model
    sizes = ready.quantities.sizes
    counts = models.count(model, ready.image_shape)
    schedule = recipe.parallel.schedule or (staging.schedule if staging is not None else "1f1b")
    example = torch.empty(sizes[0], *ready.image_shape, device=device)
    network = TrainedNetwork(model.train(), plan, example, recipe, schedule)
    ranks.follow(plan.mesh, network.engine.sample_axes)
    sharing = ranks.num // ranks.num_sample_ranks
    passes = 1
    if plan.num_stages > 1:
        of_each = len(staging.samples) if staging is not None else PARTS_PER_STAGE * plan.num_stages
        passes = of_each * ranks.num_sample_ranks
    merge, reason = ranks.broadcast(merged(recipe, ready.probe, sizes, device, sharing, passes=passes))
    check_coupling(recipe, ready.probe, model, ranks)
    division = _division(recipe, sizes, ranks, notes, shares)
    pieces = division.passes(merge, late=not recipe.reproducible)
    stages = network.describe(pieces)
    if stages:
        notes.append(_cuts(recipe, model, plan, stages, len(pieces), network.schedule))
    notes += _within_limit(recipe, plan, network, pieces, device.type == "cpu")
    optimizer = create_optimizer(model, recipe.optimizer, ready.quantities.lr)
    averaged = AveragedWeights(model, recipe.ema.decay) if recipe.ema else None
    scaler = Scaler(device, recipe.precision, ranks.any if network.divides_gradients else None)
    recomputation = network.what_is_recomputed(pieces)
    notes += [recomputation] if recomputation is not None else []
    samples = [len(division.positions(part)) for part in range(ranks.num_sample_ranks)]
    workers, why = num_workers(data, recipe.data)
    if (num_first := first_workers(recipe.data, workers)) < workers:
        why += "; half of them begin, others follow when batches are waited for"
    numbers = derive(recipe, len(data.train), samples=samples, workers=(workers, why), sizes=sizes)
    derived = [*numbers, *ready.derived]
    derived.append(Derived("microbatches in one pass", merge, reason, "tried before training: docs/numerics.md"))
    if stages:
        through = f"through {plan.num_stages} stages"
        derived.append(Derived("passes in an update", len(pieces), through, "docs/plans.md"))
        schedule_is_set = recipe.parallel.schedule is not None
        chosen = "as said" if schedule_is_set else "predicted to be faster" if staging is not None else "the default"
        derived.append(Derived("schedule", network.schedule, chosen, "changes no result: docs/plans.md"))
    elif recipe.parallel.schedule is not None:
        notes.append("--schedule has no effect: the plan has no stages")
    return Session(
        **{**vars(ready), "derived": [*derived, *describe(recipe.parallel, plan, ranks.num, division)]},
        plan=plan,
        division=division,
        network=network,
        counts=counts,
        pipeline=ready.new_pipeline(),
        state=RunState(network, optimizer, scaler, averaged),
        merge=merge,
        notes=[*recipe.notes(), *data.notes, *notes],
        stages=stages,
        workers=num_first,
    )


def _within_limit(
    recipe: Recipe, plan: Plan, network: TrainedNetwork, passes: Sequence[Pass], on_cpu: bool
) -> list[str]:
    """What to say of a memory limit; a TooLargeError where the plan is predicted to need more."""
    limit = recipe.parallel.memory_bytes
    if limit is None:
        return []
    if isinstance(network.engine, Uncaptured):
        return ["--memory-limit has no effect: the memory of a network that cannot be captured is not predicted"]
    placement = network.largest(passes)
    staging = Staging.of(plan, placement.graph, tuple(placement.outputs), [len(piece.positions) for piece in passes])
    if staging is not None:
        staging = staging.scheduled(network.schedule)
    update = memory_of_updates(partial(optimizer_for, recipe=recipe))
    costs = Costs(Calibrated({}), update=update, on_cpu=on_cpu)
    needed = most(rank_memory(placement, costs, staging)).total
    if needed > limit:
        raise TooLargeError(
            f"the plan {plan} needs {size(needed)} on a device for weights, gradients, optimizer and activations, and "
            f"--memory-limit is {recipe.parallel.memory_limit}: let --plan auto look for one that fits, or add "
            "--recompute or smaller microbatches"
        )
    return []


def _cuts(
    recipe: Recipe, model: nn.Module, plan: Plan, stages: list[StageRecord], passes: int, schedule: Schedule
) -> str:
    """Where the stages begin, how the batch goes through them, and what to do where they wait for much of the time."""
    begins = ", ".join(f"stage {number} from {stage.layer}" for number, stage in enumerate(stages, 1))
    waiting = bubble(schedule, passes, plan.num_stages)
    sentence = (
        f"{begins}; {plural(passes, 'pass', 'passes')}, {schedule}, stages wait about {rough_percent(waiting)} of "
    )
    sentence += "the time"
    most = min(PARTS_PER_STAGE * plan.num_stages, recipe.batch // plan.parts)
    if waiting < 0.25:
        return sentence
    if recipe.batch_norm != "microbatch":
        every = f"batch_norm={recipe.batch_norm} takes all microbatches at once"
        return f"{sentence}: {every}, and batch_norm=microbatch one after the other"
    if most <= passes:
        return f"{sentence}: a larger --batch can have more microbatches"
    normed = " (another training, as batch norm is of each microbatch)" if _has_batch_norm(model) else ""
    fewer = rough_percent(bubble(schedule, most, plan.num_stages))
    return f"{sentence}: with --microbatches {most * plan.parts} about {fewer}{normed}"


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def describe(section: ParallelConfig, plan: Plan, num_devices: int, division: Division) -> list[Derived]:
    """Rows for the log and the report about devices and plan."""
    if num_devices == 1:
        return []
    parts = len(division.counts)
    even = microbatch_sizes(len(division.sizes), parts)
    if section.shares is None:
        shared = "as even as can be" if division.counts == even else "by the speeds that the planner measured"
    else:
        shared = "measured" if section.shares == "auto" else "in the shares given"
    rows = [Derived("devices", num_devices, f"plan {plan}", "no part of the experiment: docs/numerics.md")]
    if parts > 1:
        rows.append(
            Derived(
                "microbatches of each part",
                text(division.counts),
                f"{len(division.sizes)} over {parts}, {shared}",
                "each computes its own samples; the sum is that of one device",
            )
        )
    approximate = section.approximation(plan)
    if approximate is not None:
        rows.append(Derived("approximate", approximate, "as said", "the result depends on the devices"))
    return rows


def _division(recipe: Recipe, sizes: tuple[int, ...], ranks: Ranks, notes: list[str], planned: Shares) -> Division:
    shares = recipe.parallel.shares
    if shares is not None and ranks.num_sample_ranks == 1:
        notes.append("--shares has no effect: the plan does not divide the batch")
        shares = None
    if planned is not None and not isinstance(shares, tuple):
        return Division(sizes, planned)
    return divide(sizes, ranks.num_sample_ranks, shares if isinstance(shares, tuple) else None)
