"""Builds all that a run needs from its recipe, and nothing on disk: what is wrong is said before a file is made."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy import models
from convoy.comm.ranks import Ranks
from convoy.data import DataSet, Order, num_workers, open_data
from convoy.data.sources import Progress
from convoy.engine import Probe, prepare
from convoy.errors import ConvoyError
from convoy.planner.cost.store import ProfileStore
from convoy.plans.fit import note_on_hosts
from convoy.plans.plan import Plan
from convoy.training.auto_plan import Choice, Chosen, Shares, describe, method_of
from convoy.training.build import build_model, check_coupling, merged, try_out
from convoy.training.checks import check_devices
from convoy.training.derived import Derived, Quantities, derive, resolve
from convoy.training.division import Division, divide
from convoy.training.ema import AveragedWeights
from convoy.training.optimizers import create_optimizer
from convoy.training.parallel import OneDevice, ParallelNetwork, TrainedNetwork
from convoy.training.parallel_config import plan_of
from convoy.training.precision import Scaler, check_precision, set_numerics
from convoy.training.recipe import LossConfig, Recipe
from convoy.training.session import Session
from convoy.training.state import RunState
from convoy.training.step import InputPipeline, TrainingStep


def set_up(
    recipe: Recipe,
    device: torch.device,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    data: DataSet | None = None,
    keep: bool = True,
    explicit_keys: Collection[str] = (),
) -> Session:
    """Open the data, build the network and everything around it. All ranks call it.

    Args:
        recipe: what to train, and how.
        device: where.
        progress: is told of long work on the data: what, done, total.
        ranks: the ranks; None for one device.
        data: in place of what the recipe names, where only the speed counts.
        keep: whether measured times are kept for the next time, and those that are kept are used.
        explicit_keys: keys of the recipe that the user has set just now, which are to have an effect on this network.

    Raises:
        ConvoyError: the recipe, the plan, the data or the weights cannot be used as they are.
    """
    ranks = ranks or Ranks()
    set_numerics(recipe)
    check_devices(recipe, ranks.num)
    plan, notes = plan_of(recipe.parallel, ranks.num)
    check_precision(recipe.precision, device)
    if data is None:
        first = progress if ranks.rank == 0 else None
        if first is not None:
            first("opening the data", 0, 1)
        data = open_data(recipe.data, first)
    quantities = resolve(recipe, len(data.train))
    model, found_notes = build_model(recipe, data)
    notes += found_notes
    if recipe.batch_norm != "microbatch" and not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        notes.append(f"batch_norm={recipe.batch_norm} has no effect: {recipe.model.name} has no batch norm")
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    found = try_out(model, recipe, data, quantities.sizes, device)
    notes += _without_heads(recipe, found, explicit_keys)
    ready = _Ready(recipe, data, quantities, model, found, device, ranks, ProfileStore() if keep else None)
    chosen, shares = None, None
    if plan is None:
        chosen = _choose_plan(ready, progress)
        plan, shares = chosen.plan, chosen.shares
        notes += chosen.notes
    notes += note_on_hosts(plan, ranks.on_host)
    session = _assemble(ready, plan, notes, shares)
    if chosen is not None:
        session.scored, session.one_device_s = chosen.scored, chosen.one_device_s
    return session


def _without_heads(recipe: Recipe, found: Probe, explicit_keys: Collection[str]) -> list[str]:
    """What to say where auxiliary heads have a weight of their own, but the network has none.

    Raises:
        ConvoyError: the user has just set it.
    """
    weight = recipe.loss.aux_weight
    if found.outputs > 1 or ("loss.aux_weight" not in explicit_keys and weight == LossConfig().aux_weight):
        return []
    sentence = f"loss.aux_weight={weight:g} has no effect: {recipe.model.name} has no auxiliary heads"
    if "loss.aux_weight" in explicit_keys:
        raise ConvoyError(f"{sentence}; leave it out")
    return [sentence]


@dataclass(frozen=True)
class _Ready:
    """What a session is made of, whatever the plan.

    Attributes:
        model: the plain network; a session makes it its own.
        profiles: times that are kept; None keeps nothing.
    """

    recipe: Recipe
    data: DataSet
    quantities: Quantities
    model: nn.Module
    probe: Probe
    device: torch.device
    ranks: Ranks
    profiles: ProfileStore | None


def _assemble(ready: _Ready, plan: Plan, notes: list[str], shares: Shares = None) -> Session:
    """The session under a plan, with the planner's shares where the recipe gives none. All ranks call it."""
    recipe, data, device, ranks, model = ready.recipe, ready.data, ready.device, ready.ranks, ready.model
    sizes = ready.quantities.sizes
    counts = models.count(model, (data.channels, data.image_size, data.image_size))
    network: TrainedNetwork
    if plan.mesh.num_devices > 1 or ready.probe.draws:
        network = _parallel_network(recipe, model, plan, data, sizes, device)
    else:
        context = prepare(model, recipe.seed, recipe.batch_norm)
        forward = torch.compile(model) if recipe.compile else model
        network = OneDevice(model, context, device, forward, recipe.reproducible)
    ranks.follow(plan.mesh, network.sample_axes)
    sharing = ranks.num // ranks.num_sample_ranks
    merge, reason = ranks.broadcast(merged(recipe, ready.probe, sizes, device, sharing, alone=ranks.num == 1))
    check_coupling(recipe, ready.probe, model, ranks)
    division = _division(recipe, sizes, ranks, notes, shares)
    optimizer = network.share(create_optimizer(model, recipe.optimizer, ready.quantities.lr))
    averaged = AveragedWeights(model, recipe.ema.decay) if recipe.ema else None
    scaler = Scaler(device, recipe.precision, ranks.any)
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    return Session(
        recipe=recipe,
        ranks=ranks,
        plan=plan,
        division=division,
        data=data,
        order=Order(len(data.train), recipe.batch, recipe.seed),
        quantities=ready.quantities,
        device=device,
        model=model,
        network=network,
        counts=counts,
        pipeline=InputPipeline(data, device, memory_format),
        state=RunState(network, optimizer, scaler, averaged),
        probe=ready.probe,
        merge=merge,
        derived=[
            *derive(
                recipe,
                len(data.train),
                samples=[len(division.positions(part)) for part in range(ranks.num_sample_ranks)],
                workers=num_workers(data, recipe.data),
            ),
            Derived("microbatches in one pass", merge, reason, "tried before training: docs/numerics.md"),
            *describe(recipe.parallel, plan, ranks.num, division),
        ],
        notes=[*recipe.notes(), *data.notes, *notes],
        profiles=ready.profiles,
    )


def _choose_plan(ready: _Ready, progress: Progress | None) -> Chosen:
    """The plan for `--plan auto`. All ranks call it."""
    ranks, sizes = ready.ranks, ready.quantities.sizes
    merge, _ = ranks.broadcast(merged(ready.recipe, ready.probe, sizes, ready.device))

    def make_step(model: nn.Module, plan: Plan, racing: Ranks, shares: Shares) -> TrainingStep:
        return _assemble(replace(ready, model=model, ranks=racing), plan, [], shares).step()

    return Choice(
        recipe=ready.recipe,
        model=ready.model,
        data=ready.data,
        sizes=sizes,
        merge=merge,
        device=ready.device,
        ranks=ranks,
        profiles=ready.profiles,
        make_step=make_step,
        progress=progress if progress is not None and ranks.rank == 0 else _silent,
    )()


def _silent(what: str, done: int, total: int) -> None:
    """No progress."""


def _parallel_network(
    recipe: Recipe,
    model: nn.Module,
    plan: Plan,
    data: DataSet,
    sizes: tuple[int, ...],
    device: torch.device,
) -> ParallelNetwork:
    """The network as the engine runs it: on several devices, and on one where random numbers that no layer controls
    must be the same as on several."""
    example = torch.empty(sizes[0], data.channels, data.image_size, data.image_size, device=device)
    model.train()
    return ParallelNetwork(
        model,
        plan,
        example,
        batch_norm=recipe.batch_norm,
        seed=recipe.seed,
        method=method_of(recipe),
        compile=recipe.compile,
    )


def _division(recipe: Recipe, sizes: tuple[int, ...], ranks: Ranks, notes: list[str], planned: Shares) -> Division:
    shares = recipe.parallel.shares
    if shares is not None and ranks.num_sample_ranks == 1:
        notes.append("--shares has no effect: the plan does not divide the batch")
        shares = None
    if planned is not None and not isinstance(shares, tuple):
        return Division(sizes, planned)
    return divide(sizes, ranks.num_sample_ranks, shares if isinstance(shares, tuple) else None)
