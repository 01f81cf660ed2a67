"""Trials of changes of a training: a few updates of each change, in turns with updates as they are."""

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from statistics import fmean
from typing import Any

import torch

from convoy.comm.joining import meeting_store
from convoy.comm.ranks import Ranks
from convoy.doctor.advice import LEAST, STEADY
from convoy.doctor.facts import Cause, Trial
from convoy.doctor.host import HostWatch, network_place
from convoy.engine.allocation import release_freed_memory
from convoy.errors import ConvoyError
from convoy.launch import cores
from convoy.plans.plan import plan_text
from convoy.training.defaults import has_bf16
from convoy.training.derived import num_threads
from convoy.training.precision import set_numerics
from convoy.training.recipe import DEFAULT_MICROBATCH, Recipe
from convoy.training.session import Session
from convoy.training.step import TrainingStep, update_seconds

SetUp = Callable[..., Session]
_ENOUGH, _MOST = 3, 10
"""How many measurements near the fastest are enough, and how many there are at most."""
_LEAST_S = 0.1
"""Seconds of a measurement: more than the slices in which a system hands out cores."""
_LARGER, _SMALL = (2, 4, 16), 64
"""How many times as large batches are tried, but only small ones more than 4 times as large."""
_LONGEST = timedelta(minutes=10)
"""The time that one rank may take for a trial while others wait."""
_FREE = 0.3
"""Part of a core that other processes may use before there is a thread less for it."""
_UPDATES = 12
"""Updates, about, that a trial takes."""


@dataclass(frozen=True)
class Change:
    """A change to try.

    Attributes:
        cause: what it would mend.
        arguments: arguments of the command line that make it.
        settings: the recipe's fields that make it.
        samples: how many times as many samples an update has with it.
        another_training: whether it changes what is learned, or its last bits.
        alone: whether one device tries it, with the cores of all.
    """

    cause: Cause
    arguments: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    samples: int = 1
    another_training: bool = False
    alone: bool = False

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with the change."""
        parallel = self.settings.get("parallel")
        settings = dict(self.settings)
        if parallel is not None:
            settings["parallel"] = recipe.parallel.model_copy(update=parallel)
        return recipe.model_copy(update=settings)


def changes(session: Session, taken: float = 0.0) -> Iterator[Change]:
    """The changes that are worth trying, the likeliest to help first.

    Args:
        session: of the training as it is.
        taken: how many of this rank's cores other processes keep busy.
    """
    recipe, ranks, device = session.recipe, session.ranks, session.device
    bits_may_change, sizes = not recipe.reproducible, session.quantities.sizes
    if device.type == "cpu":
        free = cores.own_share() - math.ceil(taken - _FREE)
        if num_threads(recipe) != (threads := int(max(1, free))):
            arguments = ("--set", f"threads={threads}")
            yield Change("threads", arguments, {"threads": threads}, another_training=not bits_may_change)
        if num_threads(recipe) > threads:  # before that is mended, other trials say nothing
            return
    if ranks.num > 1:
        single = {"devices": 1, "plan": None, "shares": None, "schedule": None}
        yield Change("devices", ("--devices", "1"), {"parallel": single}, alone=True)
    if sizes[0] < DEFAULT_MICROBATCH and session.merge < len(sizes) and recipe.batch > sizes[0]:
        larger = min(DEFAULT_MICROBATCH, recipe.batch // max(1, ranks.num_sample_ranks))
        if larger > sizes[0]:
            settings = {"microbatch": larger, "microbatches": None}
            yield Change("microbatch", ("--set", f"microbatch={larger}"), settings, another_training=True)
    if recipe.precision == "fp32" and bits_may_change and has_bf16(device):
        yield Change("precision", ("--precision", "bf16"), {"precision": "bf16"}, another_training=True)
    elif recipe.precision in ("bf16", "fp16") and device.type == "cpu":
        yield Change("precision", ("--precision", "fp32"), {"precision": "fp32"}, another_training=True)
    if bits_may_change:
        option = "--channels-first" if recipe.channels_last else "--channels-last"
        yield Change("memory_format", (option,), {"channels_last": not recipe.channels_last})
    for times in _LARGER:
        batch = times * recipe.batch
        if batch <= len(session.data.train) and (times <= 4 or batch <= _SMALL * ranks.num):
            number = None if recipe.microbatches is None else times * recipe.microbatches
            settings = {"batch": batch, "microbatches": number}
            arguments = ("--batch", str(batch), *(() if number is None else ("--microbatches", str(number))))
            yield Change("batch", arguments, settings, times, another_training=True)
    if ranks.num > 1 and bits_may_change and (recipe.parallel.plan or "").strip() != "auto" and session.scored is None:
        auto = {"plan": "auto", "shares": None, "schedule": None}
        yield Change("plan", ("--plan", "auto"), {"parallel": auto})
    if not recipe.compile and bits_may_change and device.type == "cuda":
        yield Change("compile", ("--compile",), {"compile": True})


def try_changes(
    session: Session,
    set_up: SetUp,
    ends: float,
    say: Callable[[str, int, int], None] = lambda *work: None,
    taken: float = 0.0,
) -> tuple[float, tuple[Trial, ...]]:
    """Seconds of an update whose input is ready, and a trial of each change that goes. All ranks call it.

    Args:
        session: as it is; its weights change.
        set_up: makes a session of another recipe, as `convoy.training.set_up.set_up`.
        ends: the time (`time.perf_counter`) after which no other trial is begun, on rank 0.
        say: is told of the work: what, done, total.
        taken: how many of a rank's cores other processes keep busy.
    """
    step, found = session.step(), list[Trial]()
    before_s = as_it_is = _seconds(session, step)
    possible = session.ranks.broadcast(list(changes(session, taken)))  # others may have other cores
    for number, change in enumerate(possible):
        in_time = session.ranks.broadcast(time.perf_counter() + _UPDATES * change.samples * as_it_is < ends)
        if not in_time:
            break
        say(f"trying {' '.join(change.arguments)}", number, len(possible))
        watch = HostWatch()
        try:
            what = partial(_by_one if change.alone else _by_all, session, set_up, change)
            if change.cause == "plan":  # its plans race, and each is tried by itself
                seconds = what(session.ranks)
            else:
                seconds = session.ranks.trying(f"trying {' '.join(change.arguments)}", what)
        except ConvoyError:
            continue  # it does not go with this network, or does not fit
        finally:
            set_numerics(session.recipe)
            release_freed_memory(session.device)
        if seconds is None:
            continue
        load = watch.read()
        after_s = _seconds(session, step)
        # A machine's speed drifts, so the mean of both counts; but what is a gain beside one of them alone is none, and
        # where the two are far apart the mean says nothing.
        least, most = sorted((before_s, after_s))
        is_faster = LEAST * seconds < change.samples * least
        as_it_was = fmean((least, most)) if is_faster and most <= STEADY * least else least
        before_s = after_s
        trial = Trial(change.cause, change.arguments, seconds, as_it_was, change.samples, change.another_training)
        if "threads" in change.settings:
            waits = session.ranks.gather((load.waited_s or 0.0) / load.wall_s / change.settings["threads"])
            waited = min(max(waits), 1.0)
            trial = replace(trial, threads=change.settings["threads"], waited=waited)
        found.append(trial)
    say("trying changes", len(possible), len(possible))
    return as_it_is, tuple(found)


def _seconds(session: Session, step: TrainingStep) -> float:
    return update_seconds(
        step, session.image_shape, session.device, session.ranks, enough=_ENOUGH, most=_MOST, least_s=_LEAST_S
    )


def _by_all(session: Session, set_up: SetUp, change: Change, ranks: Ranks) -> float | None:
    with _random_numbers_kept(session.device):
        other = set_up(change.of(session.recipe), session.device, None, ranks, session.data)
        if plan_text(other.plan) == plan_text(session.plan) and change.cause == "plan":
            return None
        return _seconds(other, other.step())


def _by_one(session: Session, set_up: SetUp, change: Change, ranks: Ranks) -> float | None:
    """By rank 0 with the cores of all on its host, while the others wait."""
    host = network_place()
    every = [own for where, own in ranks.gather((host, cores.own_cores())) if where == host]
    taken, done = None, f"convoy/trial/{ranks.broadcast(uuid.uuid4().hex)}"
    store = meeting_store()
    if ranks.rank > 0 and store is not None:  # without a core: those who wait in a collective look again and again
        store.wait([done], _LONGEST)
    elif ranks.rank == 0:
        try:
            with _random_numbers_kept(session.device), _on(sorted({core for own in every for core in own})):
                other = set_up(change.of(session.recipe), session.device, None, Ranks(), session.data)
                taken = _seconds(other, other.step())
        finally:
            if store is not None:
                store.set(done, "")
    return ranks.broadcast(taken)


@contextmanager
def _on(wanted: Sequence[int]) -> Iterator[None]:
    own, pinned = cores.own_cores(), os.environ.get(cores.PINNED)
    try:
        cores.pin(wanted)
        yield
    finally:
        cores.pin(own)
        if pinned is None:
            os.environ.pop(cores.PINNED, None)


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
