"""Puts the live objects of a run together under a plan, with what is said of that to the user."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from convoy import models
from convoy.data.loader import num_workers
from convoy.engine.coupling import microbatch_sizes
from convoy.engine.stages import StagedNetwork
from convoy.engine.uncaptured import Uncaptured
from convoy.errors import ConvoyError, TooLargeError
from convoy.ops.memory import memory_in_stages, what_is_recomputed
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.prediction import most as most_of
from convoy.planner.cost.prediction import rank_memory
from convoy.planner.cost.step import Staging
from convoy.planner.workload import memory_of_updates
from convoy.plans.fit import note_on_hosts
from convoy.plans.place import Placement
from convoy.plans.schedule import PARTS_PER_STAGE, bubble
from convoy.plans.traffic import rows_of_stages
from convoy.run.records import Derived, StageRecord
from convoy.training.build import has_batch_norm
from convoy.training.derived import derive
from convoy.training.division import Division, divide, text
from convoy.training.gradients import Exchange, divided_network
from convoy.training.optimizer import create_optimizer, optimizer_for
from convoy.training.precision import Scaler
from convoy.training.session import ChosenPlan, Prepared, Session
from convoy.training.state import AveragedWeights, MovingAverage, RunState, SlowWeights
from convoy.units import plural, rough_percent, size


def assemble(ready: Prepared, chosen: ChosenPlan) -> Session:
    """The session under a plan, with the planner's shares and stages where the recipe gives none; a TooLargeError where
    it is predicted to need more memory than is allowed. All ranks call it."""
    recipe, data, ranks, model, plan = ready.recipe, ready.data, ready.ranks, ready.model, chosen.plan
    staging = chosen.staging if plan.num_stages > 1 else None
    sizes = ready.quantities.sizes
    if staging is not None:  # microbatches small enough for as many passes as the planner has found
        sizes, _ = ready.divisible_sizes(plan.parts, plan.parts * len(staging.samples))
    counts = models.count(model, ready.image_shape)
    example = torch.empty(sizes[0], *ready.image_shape, device=ready.device)
    schedule = recipe.parallel.schedule or (staging.schedule if staging is not None else "1f1b")
    network = divided_network(model.train(), plan, example, recipe)
    exchange = Exchange(network, recipe, ready.quantities.average_from)
    ranks.follow(plan.mesh, network.sample_axes)
    num_passes = 1
    if plan.num_stages > 1:
        of_part = len(staging.samples) if staging is not None else PARTS_PER_STAGE * plan.num_stages
        num_passes = of_part * ranks.num_sample_ranks
    sharing = ranks.num // ranks.num_sample_ranks
    merge, why_merged = ranks.broadcast(ready.microbatches_in_pass(sizes, sharing, num_passes))
    ready.check_coupling(ranks)
    shares = recipe.parallel.shares if ranks.num_sample_ranks > 1 else None
    given_shares = shares if isinstance(shares, tuple) else None
    if chosen.shares is not None and given_shares is None:
        division = Division(sizes, chosen.shares)
    else:
        division = divide(sizes, ranks.num_sample_ranks, given_shares)
    exchange.weigh(division)
    workers, why = num_workers(data, recipe.data)
    samples = [len(division.positions(part)) for part in range(ranks.num_sample_ranks)]
    quantities = replace(ready.quantities, sizes=sizes)
    numbers = derive(recipe, quantities, len(data.train), samples=samples, workers=(workers, why))
    in_one_pass = Derived("microbatches in one pass", merge, why_merged, "tried before training: docs/numerics.md")
    scaler = Scaler(ready.device, recipe.precision, ranks.any if exchange.divides_gradients else None)
    averaged: AveragedWeights | None = MovingAverage(model, recipe.ema.decay) if recipe.ema else None
    if recipe.lookahead is not None:
        averaged = SlowWeights(model, recipe.lookahead, ready.quantities.total_updates)
    optimizer = create_optimizer(model, recipe.optimizer, ready.quantities.lr, ready.quantities.group_ends)
    session = Session(
        **vars(ready) | {"quantities": quantities, "derived": [*numbers, *ready.derived, in_one_pass]},
        chosen=chosen,
        division=division,
        schedule=schedule,
        counts=counts,
        pipeline=ready.new_pipeline(),
        state=RunState(exchange, optimizer, scaler, averaged),
        merge=merge,
        stages=[],
        workers=workers,
    )
    session.notes = [*recipe.notes(), *data.notes, *ready.notes, *chosen.notes, *_notes(session)]
    session.derived += _rows(session)
    _check_sizes(session)
    return session


def _check_sizes(session: Session) -> None:
    """Refuse a plan that cannot have pictures of all sizes that training and evaluation show, before either begins."""
    data, network, section = session.data, session.network, session.recipe.data
    growing = section.progressive.sizes(data.image_size) if section.progressive is not None else set()
    of_evaluation = {data.evaluation_size} - {None, data.image_size}
    samples = max(tuple(map(len, piece.parts)) for piece in session.passes)
    for training, sizes in ((True, growing - {data.image_size}), (False, of_evaluation)):
        for side in sorted(filter(None, sizes)) if not isinstance(network, Uncaptured) else ():
            try:
                network.staged(network.example_placement(training, samples, (side, side)))
            except ConvoyError as error:
                key = "progressive" if training else "evaluation_size"
                raise ConvoyError(
                    f"pictures of {side}×{side} pixels (data.{key}) cannot run under the plan {session.plan}: {error}: "
                    "choose another size, plan or network"
                ) from error


def _notes(session: Session) -> Iterator[str]:
    """Sentences on what follows from the plan; the session has its stages after that."""
    recipe, plan, network, passes = session.recipe, session.plan, session.network, session.passes
    yield from note_on_hosts(plan, session.ranks.on_host)
    if recipe.data.progressive is not None:
        side = session.data.image_size
        yield f"training pictures grow to {side}×{side} pixels: what is predicted is an update of the largest"
    if session.thaws:
        parts = ", ".join(part for part in recipe.optimizer.freeze if ":" in part)
        yield f"frozen at first: {parts}; what is predicted is an update after that"
    if recipe.parallel.shares is not None and session.ranks.num_sample_ranks == 1:
        yield "--shares has no effect: the plan does not divide the batch"
    limit = recipe.parallel.memory_bytes
    is_staged, is_captured = isinstance(network, StagedNetwork), not isinstance(network, Uncaptured)
    if is_captured and (limit is not None or is_staged or network.recomputes):
        most = max((tuple(map(len, piece.parts)) for piece in passes), key=max)
        placement = session.typed(network.example_placement(True, most))  # of the largest pass
        staging = session.staging(placement)
        in_flight = [] if staging is None else [staging.in_flight(stage) for stage in range(staging.number)]
        if staging is not None:
            session.stages = _stages(placement, staging, in_flight)
            yield _cuts(session, len(passes))
        if limit is not None:
            _check_memory(session, placement, staging, limit)
        recomputation = None
        if network.recomputes:
            recomputation = what_is_recomputed(placement, network.staged(placement), in_flight)
        if recomputation is not None:
            yield recomputation
    elif limit is not None:
        yield "--memory-limit has no effect: the memory of a network that cannot be captured is not predicted"
    if not is_staged and recipe.parallel.schedule is not None:
        yield "--schedule has no effect: the plan has no stages"


def _stages(placement: Placement, staging: Staging, in_flight: list[int]) -> list[StageRecord]:
    memory = memory_in_stages(placement, staging.staged, in_flight)
    records = []
    for row in rows_of_stages(placement, staging.staged):
        held = max((memory[rank] for rank in row.ranks), key=lambda of_rank: of_rank.total)
        sent = {"forward": row.received_bytes.forward, "backward": row.received_bytes.backward}
        kept = {name: getattr(held, name) for name in ("parameters", "gradients", "activations")}
        records.append(StageRecord(layer=row.begins, ranks=list(row.ranks), takes=list(row.takes), **sent, **kept))
    return records


def _check_memory(session: Session, placement: Placement, staging: Staging | None, limit: float) -> None:
    update = memory_of_updates(partial(optimizer_for, recipe=session.recipe))
    costs = Costs(Calibrated({}), update=update, on_cpu=session.device.type == "cpu")
    needed = most_of(rank_memory(placement, costs, staging)).total
    if needed > limit:
        raise TooLargeError(
            f"the plan {session.plan} needs {size(needed)} on a device for weights, gradients, optimizer and "
            f"activations, and --memory-limit is {session.recipe.parallel.memory_limit}: let --plan auto look for one "
            "that fits, or add --recompute or smaller microbatches"
        )


def _cuts(session: Session, passes: int) -> str:
    """Where the stages begin, how the batch goes through them, and what to do where they wait for much of the time."""
    recipe, plan, schedule = session.recipe, session.plan, session.schedule
    begins = ", ".join(f"stage {number} from {stage.layer}" for number, stage in enumerate(session.stages, 1))
    waiting = bubble(schedule, passes, plan.num_stages)
    sentence = f"{begins}; {plural(passes, 'pass', 'passes')}, {schedule}, stages wait about {rough_percent(waiting)} "
    sentence += "of the time"
    finest = min(PARTS_PER_STAGE * plan.num_stages, recipe.batch // plan.parts)
    if waiting < 0.25:
        return sentence
    if recipe.batch_norm != "microbatch":
        every = f"batch_norm={recipe.batch_norm} takes all microbatches at once"
        return f"{sentence}: {every}, and batch_norm=microbatch one after the other"
    if finest <= passes:
        return f"{sentence}: a larger --batch can have more microbatches"
    normed = " (another training, as batch norm is of each microbatch)" if has_batch_norm(session.model) else ""
    fewer = rough_percent(bubble(schedule, finest, plan.num_stages))
    return f"{sentence}: with --microbatches {finest * plan.parts} about {fewer}{normed}"


def _rows(session: Session) -> Iterator[Derived]:
    """Rows for the log and the report about devices and plan."""
    every, why = session.noise_every, session.why_no_noise or "1 % of the time at most"
    yield Derived("gradient noise scale", f"every {plural(every, 'update')}" if every else "not measured", why)
    section, plan, division, num_devices = session.recipe.parallel, session.plan, session.division, session.ranks.num
    if session.stages:
        through = f"through {plan.num_stages} stages"
        yield Derived("passes in an update", len(session.passes), through, "docs/plans.md")
        predicted = "predicted to be faster" if session.chosen.staging is not None else "the default"
        why = "as said" if section.schedule is not None else predicted
        yield Derived("schedule", session.schedule, why, "changes no result: docs/plans.md")
    if num_devices == 1:
        return
    yield Derived("devices", num_devices, f"plan {plan}", "no part of the experiment: docs/numerics.md")
    parts = len(division.counts)
    if parts > 1:
        if section.shares is not None:
            shared = "measured" if section.shares == "auto" else "in the shares given"
        elif division.counts == microbatch_sizes(len(division.sizes), parts):
            shared = "as even as can be"
        else:
            shared = "by the speeds that the planner measured"
        formula = f"{len(division.sizes)} over {parts}, {shared}"
        source = "each computes its own samples; the sum is that of one device"
        yield Derived("microbatches of each part", text(division.counts), formula, source)
    approximate = section.approximation(plan)
    if approximate is not None:
        yield Derived("approximate", approximate, "as said", "the result depends on the devices")
