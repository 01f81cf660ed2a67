"""Measures a training as it runs, and changes of it, for the doctor's rules.

Nothing is written, but a few checkpoints to a temporary folder where these may cost much. Changes of what devices
compute are tried; those of the input are not, and pictures are measured one by one instead: how long their bytes are
waited for, what decoding them takes, and the same from a pack of them.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from convoy.checkpoint.store import CheckpointStore
from convoy.comm.collectives import all_reduce
from convoy.data.batch import BatchMaker
from convoy.data.config import DataConfig
from convoy.data.dataset import DataSet
from convoy.data.decode import BadImage, turbo_lacks
from convoy.data.loader import batch_maker, samples_ahead
from convoy.data.order import Order
from convoy.data.pack import packed_picture
from convoy.data.packed import PackOptions
from convoy.data.parquet import MemorySource
from convoy.data.sources import EncodedSource
from convoy.doctor.facts import Facts, Pictures
from convoy.doctor.trials import Budget, try_changes
from convoy.doctor.updates import Watch
from convoy.errors import ConvoyError
from convoy.training.checkpoints import Saver, Timetable
from convoy.training.evaluation import StoppedError
from convoy.training.recorder import Numbers, Recorder, compare
from convoy.training.session import Session
from convoy.training.step import random_batch, wait_for
from convoy.units import per_second, plural, seconds

_WATCHED = Numbers((2, 4, 6), (), last=6)  # the updates whose parts are looked at; few and early, as that takes longer
# What each part of the work may take of the time that is left when it begins; trials have the rest.
_UPDATES_PART, _PICTURES_PART, _EVALUATION_PART, _CHECKPOINTS_PART = 0.4, 0.2, 0.15, 0.25
_WINDOWS = 24  # windows of updates in their part of the time
_MOST = 10**6  # updates for which batches are asked for: more than there is time for
_FEW = 10  # fewer updates are mentioned as few
_PICTURES = 64
_TEST_BATCHES = 4
_MESSAGE = 2**22  # bytes by which links are measured
_CHECKPOINTS = 3  # checkpoints that are timed, after one that is not
_RUNS = _CHECKPOINTS + 4  # runs of updates in which these are timed
_FREQUENT_S = 120.0  # where two checkpoints are further apart, their cost is not looked at
_LONG_PAUSES = 0.05  # part of an update from which on evaluations are counted with the checkpoints that follow them
_BEST = 0.5  # the share of evaluations that find the best weights so far: a guess

# When a training has its pace: worker processes run, batches that lay ready are used up, kernels are chosen.
_WINDOWS_ALIKE = 4  # windows whose two halves are to agree
_WITHIN = 0.05  # how near the halves have to be, as a part of the slower one
_NEAR = 0.1  # how near to the pace earlier windows have to be to count as well
_WAITING = 0.01  # part of a window from which on batches were waited for, so that none lay ready
# Batches, as a multiple of those that may lie ready, after which these hide no loader that is a tenth too slow.
_TIMES_READY = 10


@dataclass(frozen=True)
class Window:
    """Some updates in a row: how many, the seconds that they took and waited for their batches, on any rank."""

    updates: int
    seconds: float
    waited: float

    @property
    def update_s(self) -> float:
        return self.seconds / self.updates


def _pace(windows: Sequence[Window]) -> tuple[Sequence[Window], bool]:
    """The windows that tell the pace of a training, and whether it has one: the last ones, where their halves are
    alike, and all before them that are as fast; as long as they are not, the later half of those since workers
    started."""
    settled = windows[1:]  # kernels are tried out in the first, memory grows, and workers start
    half, last = _WINDOWS_ALIKE // 2, settled[-_WINDOWS_ALIKE:]
    faster, slower = sorted(_update_s(part) for part in (last[:half], last[half:]))
    if len(last) < _WINDOWS_ALIKE or faster < (1 - _WITHIN) * slower:
        return settled[len(settled) // 2 :], False
    pace_s, earlier = _update_s(last), reversed(settled[:-_WINDOWS_ALIKE])
    as_fast = takewhile(lambda window: abs(window.update_s - pace_s) <= _NEAR * pace_s, earlier)
    return settled[-_WINDOWS_ALIKE - len(list(as_fast)) :], True


def _hides_a_loader(windows: Sequence[Window], ready: float) -> bool:
    """Whether batches that lay `ready`, so many, may hide a loader that is a little too slow."""
    waits = all(window.waited > _WAITING * window.seconds for window in windows[-_WINDOWS_ALIKE:])
    return not waits and sum(window.updates for window in windows[1:]) < _TIMES_READY * ready


def _update_s(windows: Sequence[Window]) -> float:
    return sum(window.seconds for window in windows) / max(1, sum(window.updates for window in windows))


def examine(session: Session, budget: Budget, *, trials: bool = True, folder: Path | None = None) -> Facts:
    """Measure a training, whose weights change, and with `trials` try changes of it. All ranks call it, and get the
    same.

    Setting up the session may have taken some of the budget; at least one update is measured. `folder` is where the run
    would lie, which need not be there; None looks at no checkpoints.
    """
    ranks, recipe = session.ranks, session.recipe
    session.model.train()
    facts = _measure_updates(session, budget)
    budget.tell("timing pictures")
    if budget.allows(0.0, "how pictures are made"):
        most_s = budget.part(_PICTURES_PART).left
        everyone = ranks.gather(measure_pictures(session.data, recipe.data, _fresh(session), recipe.seed, most_s))
        of_ranks = [pictures for pictures in everyone if pictures is not None]
        if of_ranks:
            facts = replace(facts, pictures=max(of_ranks, key=lambda pictures: pictures.read_s + pictures.cpu_s))
    if ranks.num > 1 and budget.allows(0.0, "the link"):
        facts = replace(facts, link_bits_per_s=_bits_per_s(session))
    budget.tell("timing an evaluation")
    part = budget.part(_EVALUATION_PART)
    samples = session.evaluation_batch() * ranks.num_sample_ranks
    if part.allows(facts.update_s * samples / facts.batch / 3, "an evaluation"):  # a third of an update, about
        evaluation_s = _evaluation_s(session, part)
        if part.allows(part.seconds / 2):  # for the first one, memory and kernels are made
            evaluation_s = _evaluation_s(session, part)
        facts = replace(facts, evaluation_s=evaluation_s)
    if folder is not None:
        facts = _with_checkpoints(session, facts, folder, budget)
    busy_cores = max((rank.load.others_cores or 0.0 for rank in facts.ranks if rank.load is not None), default=0.0)
    ready_s = facts.update_s - facts.wait_s
    compute_s, results = try_changes(session, budget, update_s=ready_s, taken=busy_cores, wanted=trials)
    if compute_s is not None:
        if any(trial.threads is not None and trial.threads < facts.threads <= facts.cores for trial in results):
            # Others have cores of its threads, and an update takes now twice, now five times as long: the mean of many.
            compute_s = max(compute_s, facts.update_s - facts.wait_s)
            results = tuple(replace(trial, before_s=compute_s) for trial in results)
        facts = replace(facts, compute_s=min(compute_s, facts.update_s), trials=results)
    if budget.missed:
        *parts, last_part = budget.missed
        what = f"{', '.join(parts)} or {last_part}" if parts else last_part
        note = f"There was no time for {what}: --seconds {2 * budget.seconds:g} leaves more."
        facts = replace(facts, notes=(*facts.notes, note))
    return ranks.broadcast(facts)


def _fresh(session: Session) -> NDArray[np.int64]:
    """Training samples for this rank alone, which come last in an epoch, so that the updates here read few of them."""
    ranks, recipe = session.ranks, session.recipe
    last = Order(len(session.data.train), recipe.batch, recipe.seed).samples(0)[::-1].copy()
    share = max(1, min(_PICTURES, len(last) // ranks.num))
    return last[ranks.rank * share % len(last) :][:share]


def _measure_updates(session: Session, budget: Budget) -> Facts:
    """The facts that updates tell which run with their input, as they come, once they have their pace."""
    ranks, recipe = session.ranks, session.recipe
    step = session.step()
    recorder = Recorder(session, _WATCHED, remembered=None)
    watch = Watch(recorder)
    samples = max(1, len(session.division.positions(ranks.sample_rank)))
    ahead = max(ranks.gather(samples_ahead(samples) / samples if session.workers else 0.0))
    part, windows = budget.part(_UPDATES_PART), list[Window]()
    window_s, number, num_updates, bad = part.seconds / _WINDOWS, 1, 0, set[int]()
    budget.tell("timing updates")
    with closing(session.batches(0, _MOST)) as batches:
        while True:
            began, waited = time.perf_counter(), 0.0
            for place in range(number):
                recorder.ask(num_updates)
                # The host of a GPU may be ahead of it by many updates.
                update = recorder.update(step, next(batches), num_updates, waits=place == number - 1)
                waited += update.wait_s
                bad.update(sample for _, sample, _ in update.unreadable)
                num_updates += 1
            spans, waits = zip(*ranks.gather((time.perf_counter() - began, waited)), strict=True)  # all know the same
            window = Window(number, max(spans), max(waits))
            windows.append(window)
            budget.tell(f"timing updates, {per_second(recipe.batch / window.update_s)} images a second so far")
            if num_updates == 1:
                if not budget.allows(window.update_s):
                    break
                watch.begin()
            else:
                late, over = not part.allows(part.seconds / 2), not part.allows(window.update_s)
                if over or (_pace(windows)[1] and (late or not _hides_a_loader(windows, ahead))):
                    break
            # No more than four times as many as in the window before, which may have been faster than usual.
            fitting = math.ceil(min(window_s, part.left) / max(window.update_s, 1e-9))
            number = ranks.broadcast(max(1, min(fitting, 4 * number)))
        watch.look()
    counted, has_pace = _pace(windows)
    num_counted = sum(window.updates for window in counted)
    facts = watch.facts(compare(recorder, session.chosen.scored, None), num_counted or 1)
    notes = [] if has_pace else [_without_pace(facts, counted, num_counted)]
    if unread := len(set().union(*ranks.gather(bad))):
        check = f"convoy data {recipe.data.path} --check names them, and others"
        notes.append(f"{plural(unread, 'picture')} cannot be read: {check}.")
    return replace(facts, notes=tuple(notes))


def _without_pace(facts: Facts, windows: Sequence[Window], num_updates: int) -> str:
    """What to say where there was no time to see the pace that a training keeps."""
    if not windows:
        return f"The first update took {seconds(facts.update_s)}, and was the only one that there was time for."
    if num_updates < _FEW:
        return f"An update takes {seconds(facts.update_s)}, so only {plural(num_updates, 'update')} could be timed."
    rates = [facts.batch / window.update_s for window in windows]
    between = f"{per_second(min(rates))} to {per_second(max(rates))} images a second"
    return f"The pace changed as long as there was time to look: {between}."


def _bits_per_s(session: Session) -> float:
    """Bits a second that an all-reduce moves each way: 2 (n - 1) / n times the size of a message (Patarasuk, 2009)."""
    ranks, message = session.ranks, torch.zeros(_MESSAGE // 4, device=session.device)
    sent_s = list[float]()
    for _ in range(3):
        ranks.barrier()
        began = time.perf_counter()
        all_reduce(message, ranks.group)
        wait_for(session.device)
        sent_s.append(time.perf_counter() - began)
    (longest,) = ranks.largest(round(1e6 * min(sent_s)))
    return 8 * _MESSAGE * 2 * (ranks.num - 1) / ranks.num / (1e-6 * max(1, longest))


def _evaluation_s(session: Session, part: Budget) -> float:
    """Seconds of an evaluation, as its first batches tell."""
    size = max(1, session.evaluation_batch() * session.ranks.num_sample_ranks)
    number = -(-len(session.data.test) // size)
    moments = list[float]()

    def stop() -> bool:
        moments.append(time.perf_counter())
        return len(moments) > 1 and (len(moments) > _TEST_BATCHES or not part.allows(0.0))

    began = time.perf_counter()
    try:
        session.evaluate(stop)
        evaluation_s = time.perf_counter() - began
    except StoppedError:
        counted_moments = moments[1:] if len(moments) > 2 else moments
        batch_s = (counted_moments[-1] - counted_moments[0]) / (len(counted_moments) - 1)
        evaluation_s = moments[1] - began + batch_s * (number - 1)
    session.model.train()
    return max(session.ranks.gather(evaluation_s))


def _with_checkpoints(session: Session, facts: Facts, folder: Path, budget: Budget) -> Facts:
    """The facts with what checkpoints cost, where they come often, or evaluations that save the best weights do."""
    every, evaluate_every = session.quantities.checkpoint_every, facts.evaluate_every
    is_often = every is not None and every * facts.update_s < _FREQUENT_S
    pauses = evaluate_every is not None and facts.pauses_s > _LONG_PAUSES * facts.update_s
    between = [number for number, counts in ((every, is_often), (evaluate_every, pauses)) if number and counts]
    if not between:
        return facts
    budget.tell("timing checkpoints")
    part = budget.part(_CHECKPOINTS_PART)
    if not part.allows(_RUNS * facts.update_s, "checkpoints"):
        return facts
    with suppress(OSError, ConvoyError):  # a full disk, or a folder that is not to be written to
        checkpoint_s = _checkpoint_s(session, min(between), facts, folder, part)
        if is_often:
            facts = replace(facts, checkpoint_s=checkpoint_s, checkpoint_every=every)
        if pauses and facts.evaluation_s is not None:
            facts = replace(facts, evaluation_s=facts.evaluation_s + _BEST * checkpoint_s)
    return facts


def _checkpoint_s(session: Session, every: int, facts: Facts, folder: Path, part: Budget) -> float:
    """Seconds that a checkpoint adds to the updates between two of them."""
    ranks = session.ranks
    fitting = ranks.broadcast(max(1, int(part.left / _RUNS / facts.update_s)))
    step, between = session.step(), min(every, fitting)
    batch = random_batch(step)

    def updates() -> float:
        ranks.barrier()
        began = time.perf_counter()
        for done in range(between):
            step(batch, done)
        wait_for(session.device)
        return time.perf_counter() - began

    with ExitStack() as stack:
        place = ranks.first(partial(_temporary, folder, stack))
        saver = Saver(CheckpointStore(place, 1), Timetable(every, ranks), ranks, lambda _: None)
        updates()
        plain = min(updates(), updates())
        with saver.open(place / "seen"):
            for number in range(_CHECKPOINTS + 1):
                if number == 1:  # the first one finds no memory to copy to
                    began = time.perf_counter()
                elif number > 1 and not part.allows(0.0):
                    break
                timed = number
                saver.save(number, "", *session.state.contents({}), None)
                updates()
            passed = time.perf_counter() - began
            saver.finish()
        ranks.barrier()
    return max(0.0, max(ranks.gather(passed)) / timed - plain)


def _temporary(folder: Path, stack: ExitStack) -> Path:
    """A folder of its own on the disk of the run, which need not be there yet."""
    while not folder.is_dir():
        folder = folder.absolute().parent
    temporary = tempfile.TemporaryDirectory(prefix=".convoy-doctor-", dir=folder, ignore_cleanup_errors=True)
    place = Path(stack.enter_context(temporary))
    (place / "seen").touch()
    return place


_KINDS = 8  # measurements of pictures, at most, each of which gets as much of the time
_READERS = 8
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def _idle_s() -> float:
    """A clock that goes on while this thread waits for something else than a core, and stands still otherwise."""
    try:
        preempted = int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        preempted = 0.0
    return time.perf_counter() - time.thread_time() - preempted


def measure_pictures(
    data: DataSet, config: DataConfig, samples: NDArray[np.int64], seed: int, most_s: float = 32.0
) -> Pictures | None:
    """Make some pictures ready in this process, as a worker would; None where that cannot be measured.

    The training `samples` are ones that nobody has read yet, so that they come from where they are stored. All of it
    takes about `most_s` seconds, but each kind looks at one picture at least.
    """
    each_s, source = most_s / _KINDS, data.train
    try:
        maker = batch_maker(data, config, source, seed)
        side = max(data.resize, data.image_size)
        if not isinstance(source, EncodedSource):
            return Pictures(cpu_s=_cpu(maker, samples, each_s), in_memory=maker.vectorised, short_side=side)
        half = max(1, len(samples) // 2)
        read_s, read = _reading(source, samples[:half], each_s)
        if maker.skip_bad:
            read = np.array([sample for sample in read.tolist() if _is_good(source, sample)], np.int64)
            if not len(read):
                return None
        turbo_s = None
        if maker.decoder != "turbo" and not turbo_lacks():
            turbo = batch_maker(data, config.model_copy(update={"decoder": "turbo"}), source, seed)
            turbo_s = _cpu(turbo, read, each_s)
        packed_s, raw_s = (_packed(maker, source, read, PackOptions(side, raw), each_s) for raw in (False, True))
        at_once_s, cpu_s = _at_once(source, samples[half:], each_s), _cpu(maker, read, each_s)
        return Pictures(read_s, at_once_s, cpu_s, packed_s, raw_s, turbo_s, short_side=side)
    except (BadImage, ConvoyError):
        return None


def _reading(source: EncodedSource, samples: NDArray[np.int64], most_s: float) -> tuple[float, NDArray[np.int64]]:
    """Seconds that a picture's bytes are waited for, and the samples that were read."""
    began, idle_s, read = time.perf_counter(), _idle_s(), 0
    while read < len(samples) and (not read or time.perf_counter() - began < most_s):
        source.read(int(samples[read]))
        read += 1
    return max(0.0, _idle_s() - idle_s) / max(1, read), samples[:read]


def _is_good(source: EncodedSource, sample: int) -> bool:
    try:
        source.load(sample)
    except BadImage:
        return False
    return True


def _at_once(source: EncodedSource, samples: NDArray[np.int64], most_s: float) -> float:
    """Seconds for each of several pictures that are read at once; none is begun after the time is over."""
    began = time.perf_counter()

    def read(sample: int) -> tuple[bool, float]:
        start_s = time.thread_time()
        if in_time := time.perf_counter() < began + most_s:
            source.read(sample)
        return in_time, time.thread_time() - start_s

    with ThreadPoolExecutor(_READERS) as readers:
        of_samples = list(readers.map(read, samples.tolist()))
    wall_s = time.perf_counter() - began
    return max(0.0, wall_s - sum(cpu_s for _, cpu_s in of_samples)) / max(1, sum(done for done, _ in of_samples))


def _cpu(maker: BatchMaker, samples: NDArray[np.int64], most_s: float) -> float:
    """Seconds of the processor that a picture takes, but for the first ones, for which all that is needed is loaded."""
    if maker.vectorised:
        maker.make(samples, 0)
        start_s = time.thread_time()
        maker.make(samples, 0)
        return (time.thread_time() - start_s) / len(samples)
    times = list[float]()
    images = np.empty((1, *maker.shape), np.uint8)
    began = time.perf_counter()
    for place in range(len(samples)):
        start_s = time.thread_time()
        maker.fill(images, samples[place : place + 1], 0)
        times.append(time.thread_time() - start_s)
        if time.perf_counter() - began > most_s:
            break
    return float(np.mean(times[1:] or times))


def _packed(
    maker: BatchMaker, source: EncodedSource, samples: NDArray[np.int64], options: PackOptions, most_s: float
) -> float | None:
    """Seconds of the processor for a picture from a pack; None where packing changes nothing."""
    began, files = time.perf_counter(), []
    for sample in samples.tolist():
        files.append(packed_picture(source, sample, options)[0])
        if time.perf_counter() - began > most_s:
            break
    if all(source.read(sample) == file for sample, file in zip(samples.tolist(), files, strict=False)):
        return None
    of_pack = replace(maker, source=MemorySource(source, files), skip_bad=False)
    return _cpu(of_pack, np.arange(len(files)), most_s)
