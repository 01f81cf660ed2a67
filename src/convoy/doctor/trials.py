"""Trials of changes of a training: a few updates of each change, in turns with updates as they are; and the time in
which the doctor answers, of which each part of its work gets a share.
"""

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from statistics import fmean

import torch

from convoy import resources
from convoy.comm.joining import meeting_store
from convoy.comm.ranks import Ranks
from convoy.doctor.diagnosis import LEAST, STEADY
from convoy.doctor.facts import Cause, Change, Trial
from convoy.engine.allocation import release_freed_memory
from convoy.errors import ConvoyError
from convoy.launch.host import HostWatch, network_place
from convoy.plans.plan import plan_text
from convoy.recipe.recipe import DEFAULT_MICROBATCH
from convoy.training.derived import num_threads
from convoy.training.precision import has_bf16, set_numerics
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.step import update_seconds

_MOST = 10  # measurements, at most
_LEAST_S = 0.1  # of a measurement: more than the slices in which a system hands out cores
_seconds = partial(update_seconds, most=_MOST, least_s=_LEAST_S)
# How many times as large batches are tried, but only small ones more than 4 times as large.
_LARGER, _SMALL = (2, 4, 16), 64
_LONGEST = timedelta(minutes=10)  # the time that one rank may take for a trial while others wait
_FREE = 0.3  # part of a core that other processes may use before there is a thread less for it
_UPDATES = 2  # updates that a measurement takes at least: one to warm up, and one that counts
# Seconds before the first update: guesses, as nothing ends them.
_PREPARING_S: dict[Cause, float] = {"compile": 30.0, "plan": 10.0}


@dataclass
class Budget:
    """Seconds for the work of all ranks. The clock of rank 0 counts."""

    ranks: Ranks
    seconds: float
    began: float = field(default_factory=lambda: time.perf_counter())  # by `time.perf_counter`
    # Told of the work: what, and how many of the seconds have passed.
    say: Callable[[str, int, int], None] = lambda *work: None
    missed: list[str] = field(default_factory=list)  # what there was no time for

    @property
    def left(self) -> float:
        """Seconds until the end, by the clock of this rank."""
        return max(0.0, self.began + self.seconds - time.perf_counter())

    def part(self, share: float) -> "Budget":
        """A share of what is left, from now on."""
        return Budget(self.ranks, share * self.left, missed=self.missed)

    def allows(self, seconds: float, what: str | None = None) -> bool:
        """Whether there are `seconds` left; if not, `what` is kept as missed. All ranks call it, and are told the
        same.
        """
        fits = self.ranks.broadcast(seconds <= self.left)
        if not fits and what is not None and what not in self.missed:
            self.missed.append(what)
        return fits

    def tell(self, what: str) -> None:
        """Say what is done now."""
        total = max(1, math.ceil(self.seconds))
        self.say(f"{what}, seconds", min(int(self.seconds - self.left), total - 1), total)


def changes(session: Session, taken: float = 0.0) -> Iterator[Change]:
    """The changes of a session that are worth trying, the likeliest to help first; other processes keep `taken` of this
    rank's cores busy.
    """
    recipe, ranks, device = session.recipe, session.ranks, session.device
    bits_may_change, sizes = not recipe.reproducible, session.quantities.sizes
    if device.type == "cpu":
        free = resources.own_share() - math.ceil(taken - _FREE)
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
    if not recipe.compile and bits_may_change and device.type == "cuda":
        yield Change("compile", ("--compile",), {"compile": True})
    for times in _LARGER:
        batch = times * recipe.batch
        if batch <= len(session.data.train) and (times <= 4 or batch <= _SMALL * ranks.num):
            number = None if recipe.microbatches is None else times * recipe.microbatches
            settings = {"batch": batch, "microbatches": number}
            arguments = ("--batch", str(batch), *(() if number is None else ("--microbatches", str(number))))
            yield Change("batch", arguments, settings, times, another_training=True)
    if ranks.num > 1 and bits_may_change and recipe.parallel.plan != "auto" and session.chosen.scored is None:
        auto = {"plan": "auto", "shares": None, "schedule": None}
        yield Change("plan", ("--plan", "auto"), {"parallel": auto})


def try_changes(
    session: Session, budget: Budget, *, update_s: float = 0.0, taken: float = 0.0, wanted: bool = True
) -> tuple[float | None, tuple[Trial, ...]]:
    """Seconds of an update whose input is ready, and, where `wanted`, a trial of each change that goes; the session's
    weights change. All ranks call it.

    What a memory format, bf16, threads or a larger batch do to kernels here nothing predicts, and a few updates tell.
    Each gets an equal share of the time that is left, and what it needs less is left to the others. Where not even two
    updates fit into it, it is not tried. An update takes about `update_s`, and other processes keep `taken` of a rank's
    cores busy.
    """
    step, results = session.step(), list[Trial]()
    candidates = list(changes(session, taken)) if wanted else []
    candidates = session.ranks.broadcast(candidates)  # others may have other cores
    budget.tell("timing updates whose input is ready")
    if not budget.allows(_UPDATES * update_s):
        budget.missed.extend(" ".join(change.arguments) for change in candidates)
        return None, ()
    before_s = as_it_is = _seconds(step, session.ranks, patience_s=budget.part(1 / (1 + len(candidates))).left)
    setting_up_s = 0.0
    for number, change in enumerate(candidates):
        name = " ".join(change.arguments)
        smaller = [trial for trial in results if trial.cause == change.cause == "batch"]
        if any(trial.samples * trial.before_s < LEAST * trial.seconds for trial in smaller):  # which brings nothing
            continue
        needed_s = setting_up_s + _PREPARING_S.get(change.cause, 0.0) + _UPDATES * (1 + change.samples) * as_it_is
        if not budget.allows(needed_s, name):
            continue
        budget.tell(f"trying {name}")
        share = budget.part(1 / (len(candidates) - number))
        watch = HostWatch()
        try:
            what = partial(_by_one if change.alone else _by_all, session, change, share)
            raced = change.cause == "plan"  # each of its plans is tried by itself
            outcome = what(session.ranks) if raced else session.ranks.trying(f"trying {name}", what)
        except ConvoyError:
            continue  # it does not go with this network, or does not fit
        finally:
            set_numerics(session.recipe)
            release_freed_memory(session.device)
        if outcome is None:
            continue
        seconds, setting_up_s = outcome
        load = watch.read()
        after_s = _seconds(step, session.ranks, patience_s=share.left)
        # A machine's speed drifts, so the mean of both counts; but what is a gain beside one of them alone is none, and
        # where the two are far apart the mean says nothing.
        least, most = sorted((before_s, after_s))
        is_faster = LEAST * seconds < change.samples * least
        as_it_was = fmean((least, most)) if is_faster and most <= STEADY * least else least
        before_s = after_s
        waits = session.ranks.gather((load.waited_s or 0.0) / load.wall_s / change.settings.get("threads", math.inf))
        waited = min(max(waits), 1.0)
        results.append(Trial(**vars(change), seconds=seconds, before_s=as_it_was, waited=waited))
    return as_it_is, tuple(results)


def _by_all(session: Session, change: Change, share: Budget, ranks: Ranks) -> tuple[float, float] | None:
    """Seconds of an update with a change, and of setting it up; None where it changes nothing."""
    with torch.random.fork_rng(devices=[session.device] if session.device.type == "cuda" else []):
        began = time.perf_counter()
        parallel = session.recipe.parallel.model_copy(update=change.settings.get("parallel"))
        recipe = session.recipe.model_copy(update=change.settings | {"parallel": parallel})
        other = set_up(recipe, session.device, None, ranks, session.data, keep=session.keeps_times)
        if change.cause == "plan" and plan_text(other.plan) == plan_text(session.plan):
            return None
        setting_up_s = time.perf_counter() - began
        return _seconds(other.step(), other.ranks, patience_s=share.left / 2), setting_up_s


def _by_one(session: Session, change: Change, share: Budget, ranks: Ranks) -> tuple[float, float] | None:
    """By rank 0 with the cores of all on its host, while the others wait."""
    host = network_place()
    members = ranks.gather((host, resources.own_cores()))
    all_cores = sorted({core for place, of_rank in members if place == host for core in of_rank})
    outcome, done = None, f"convoy/trial/{ranks.broadcast(uuid.uuid4().hex)}"
    store = meeting_store()
    if ranks.rank > 0 and store is not None:  # without a core: those who wait in a collective look again and again
        store.wait([done], _LONGEST)
    elif ranks.rank == 0:
        try:
            with _on(all_cores):
                outcome = _by_all(session, change, share, Ranks())
        finally:
            if store is not None:
                store.set(done, "")
    return ranks.broadcast(outcome)


@contextmanager
def _on(wanted: Sequence[int]) -> Iterator[None]:
    own, pinned = resources.own_cores(), os.environ.get(resources.PINNED)
    try:
        resources.pin(wanted)
        yield
    finally:
        resources.pin(own)
        if pinned is None:
            os.environ.pop(resources.PINNED, None)
