"""Measures a training as it runs, and changes of it, for the doctor's rules.

Nothing is written, but a few checkpoints to a temporary folder where these may cost much. Changes of what devices
compute are tried; those of the input are not, and pictures are measured one by one instead.
"""

import math
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.checkpoint.store import CheckpointStore
from convoy.comm.collectives import all_reduce
from convoy.data import Order
from convoy.doctor.facts import Facts
from convoy.doctor.pictures import measure_pictures
from convoy.errors import ConvoyError
from convoy.training.checkpoint_interval import Every
from convoy.training.checkpoints import Saver
from convoy.training.checkup import LEAST, UPDATES, Checkup
from convoy.training.evaluate import StoppedError
from convoy.training.observation import Observation
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.step import random_batch, wait_for
from convoy.training.trials import try_changes

Say = Callable[[str, int, int], None]

_WARM_UP, _WATCHED = 3, (4, 6, 8)
"""How many updates do not count, and those whose parts are looked at: before the timed ones, as that takes longer."""
_MOST, _SAMPLES = 200, 2048
"""Updates that are measured at most, and the samples that suffice: more than lay ready when they began."""
_LONGEST_S = 15.0
_PICTURES = 64
_TEST_BATCHES = 4
_MESSAGE = 2**22
"""Bytes by which links are measured."""
_CHECKPOINTS = 3
"""Checkpoints that are timed, after one that is not."""
_FREQUENT_S = 120.0
"""Seconds between two checkpoints from which on what they cost is not looked at."""
_LONG_PAUSES = 0.05
"""Part of an update from which on evaluations are counted with the checkpoints that follow them."""
_BEST = 0.5
"""The part of evaluations that find the best weights so far, about."""


def examine(
    session: Session, *, seconds: float = 60.0, say: Say = lambda *work: None, folder: Path | None = None
) -> Facts:
    """Measure a training, and try changes of it. All ranks call it, and get the same.

    Args:
        session: of the training; its weights change.
        seconds: time for trying changes, after which no other trial is begun.
        say: is told of the work: what, done, total.
        folder: where the run would lie, which need not be there; None looks at no checkpoints.
    """
    ranks, recipe = session.ranks, session.recipe
    session.model.train()
    facts = _measure_updates(session, say)
    say("timing pictures", 0, 1)
    everyone = ranks.gather(measure_pictures(session.data, recipe.data, _fresh(session), recipe.seed))
    known = [one for one in everyone if one is not None]
    if known:
        facts = replace(facts, pictures=max(known, key=lambda one: one.read_s + one.cpu_s))
    if ranks.num > 1:
        facts = replace(facts, link_bits_per_s=_bits_per_s(session))
    say("timing an evaluation", 0, 1)
    facts = replace(facts, evaluation_s=_evaluation_s(session))
    if folder is not None:
        facts = _with_checkpoints(session, facts, folder, say)
    taken = max((rank.load.others_cores or 0.0 for rank in facts.ranks if rank.load is not None), default=0.0)
    make = partial(set_up, keep=session.profiles is not None)
    compute_s, trials = try_changes(session, make, time.perf_counter() + seconds, say, taken)
    if any(trial.threads is not None and trial.threads < facts.threads <= facts.cores for trial in trials):
        # Others have cores of its threads, and an update takes now twice, now five times as long: the mean of many.
        compute_s = max(compute_s, facts.update_s - facts.wait_s)
        trials = tuple(replace(trial, before_s=compute_s) for trial in trials)
    return ranks.broadcast(replace(facts, compute_s=min(compute_s, facts.update_s), trials=trials))


def _fresh(session: Session) -> NDArray[np.int64]:
    """Training samples for this rank alone, which come last in an epoch, so that the updates here read few of them."""
    ranks, recipe = session.ranks, session.recipe
    last = Order(len(session.data.train), recipe.batch, recipe.seed).samples(0)[::-1]
    each = max(1, min(_PICTURES, len(last) // ranks.num))
    return last[ranks.rank * each % len(last) :][:each]


def _measure_updates(session: Session, say: Say) -> Facts:
    """The facts that updates tell which run with their input, as they come."""
    ranks, batch = session.ranks, session.recipe.batch
    step, checkup = session.step(), Checkup(session, gpu=True)
    observation = Observation(session, watched=_WATCHED, apart=(), last=max(_WATCHED))
    total = _WARM_UP + LEAST
    done = 0
    with closing(session.batches(0, _WARM_UP + _MOST, checkup.told)) as batches:
        while done < total:
            observation.begin()
            checkup.ask()
            made = next(batches)
            checkup.got()
            with observation.update(step):
                result = step(made, done)
            checkup.add(result)
            done += 1
            if done == _WARM_UP:
                wait_for(session.device)
                checkup.begin()
            elif checkup.num == _WARM_UP:
                wait_for(session.device)
                (microseconds,) = ranks.largest(round(1e6 * checkup.seconds / checkup.num))
                enough = min(max(LEAST, math.ceil(_SAMPLES / batch)), _MOST)
                total = _WARM_UP + min(enough, max(LEAST, round(_LONGEST_S / (1e-6 * microseconds))))
            say("timing updates", done, total)
        wait_for(session.device)
        checkup.look()
    since = max(0, min(checkup.num, UPDATES) - math.ceil(checkup.num / 2))  # the later half, as far as it is remembered
    return checkup.facts(observation.conclude(session.scored, None), since=since)


def _bits_per_s(session: Session) -> float:
    """Bits a second that an all-reduce moves each way: 2 (n - 1) / n times the size of a message (Patarasuk, 2009)."""
    ranks, message = session.ranks, torch.zeros(_MESSAGE // 4, device=session.device)
    taken = list[float]()
    for _ in range(3):
        ranks.barrier()
        began = time.perf_counter()
        all_reduce(message, ranks.group)
        wait_for(session.device)
        taken.append(time.perf_counter() - began)
    (longest,) = ranks.largest(round(1e6 * min(taken)))
    return 8 * _MESSAGE * 2 * (ranks.num - 1) / ranks.num / (1e-6 * max(1, longest))


def _evaluation_s(session: Session) -> float:
    """Seconds of the second evaluation, as all later ones take: for the first, memory and kernels are made."""
    _from_first_batches(session)
    return _from_first_batches(session)


def _from_first_batches(session: Session) -> float:
    """Seconds of an evaluation, as its first batches tell."""
    size = max(1, session.evaluation_batch() * session.ranks.num_sample_ranks)
    number = -(-len(session.data.test) // size)
    asked = list[float]()

    def stop() -> bool:
        asked.append(time.perf_counter())
        return len(asked) > _TEST_BATCHES

    began = time.perf_counter()
    try:
        session.evaluate(stop)
        taken = time.perf_counter() - began
    except StoppedError:
        each = (asked[-1] - asked[1]) / (len(asked) - 2)
        taken = asked[1] - began + each * (number - 1)
    session.model.train()
    return max(session.ranks.gather(taken))


def _with_checkpoints(session: Session, facts: Facts, folder: Path, say: Say) -> Facts:
    """The facts with what checkpoints cost, where they come often, or evaluations that save the best weights do."""
    every, evaluate_every = session.quantities.checkpoint_every, facts.evaluate_every
    is_often = every is not None and every * facts.update_s < _FREQUENT_S
    pauses = evaluate_every is not None and facts.pauses_s > _LONG_PAUSES * facts.update_s
    between = [number for number, counts in ((every, is_often), (evaluate_every, pauses)) if number and counts]
    if not between:
        return facts
    say("timing checkpoints", 0, 1)
    with suppress(OSError, ConvoyError):  # a full disk, or a folder that is not to be written to
        taken = _checkpoint_s(session, min(between), facts, folder)
        if is_often:
            facts = replace(facts, checkpoint_s=taken, checkpoint_every=every)
        if pauses and facts.evaluation_s is not None:
            facts = replace(facts, evaluation_s=facts.evaluation_s + _BEST * taken)
    return facts


def _checkpoint_s(session: Session, every: int, facts: Facts, folder: Path) -> float:
    """Seconds that a checkpoint adds to the updates between two of them."""
    ranks = session.ranks
    step, between = session.step(), min(every, max(1, int(_LONGEST_S / _CHECKPOINTS / facts.update_s)))
    batch = random_batch(step, session.image_shape, session.device)
    while not folder.is_dir():
        folder = folder.absolute().parent

    def updates() -> float:
        ranks.barrier()
        began = time.perf_counter()
        for done in range(between):
            step(batch, done)
        wait_for(session.device)
        return time.perf_counter() - began

    with ExitStack() as stack:
        place = ranks.first(partial(_temporary, folder, stack))
        saver = Saver(CheckpointStore(place, 1), Every(every), ranks, lambda _: None)
        updates()
        plain = min(updates(), updates())
        with saver.open(place / "seen"):
            for number in range(_CHECKPOINTS + 1):
                if number == 1:  # the first one finds no memory to copy to
                    began = time.perf_counter()
                tensors, rest = session.state.contents({})
                saver.save(number, "", tensors, rest, None)
                updates()
            passed = time.perf_counter() - began
            saver.finish()
        ranks.barrier()
    return max(0.0, max(ranks.gather(passed)) / _CHECKPOINTS - plain)


def _temporary(folder: Path, stack: ExitStack) -> Path:
    made = tempfile.TemporaryDirectory(prefix=".convoy-doctor-", dir=folder, ignore_cleanup_errors=True)
    place = Path(stack.enter_context(made))
    (place / "seen").touch()
    return place
