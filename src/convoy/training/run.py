"""Begins a run, or goes on with one, and leaves its folder complete, also where it fails."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from convoy.checkpoint.files import write_tensors
from convoy.checkpoint.store import CheckpointStore
from convoy.comm.joining import meeting_store
from convoy.comm.memory import memory_explained
from convoy.comm.position import current
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import release_freed_memory
from convoy.errors import ConvoyError
from convoy.failure import failure_of
from convoy.files import write_atomically, write_json, write_text
from convoy.planner.comparison import Comparison
from convoy.progress import Reporter
from convoy.training import environment
from convoy.training.build import NetworkInput
from convoy.training.code import OtherCodeError
from convoy.training.defaults import as_begun
from convoy.training.finite import ADVICE, SKIP, NotFiniteError
from convoy.training.log import write_summary
from convoy.training.loop import Loop
from convoy.training.recipe import Recipe, load_recipe, to_yaml
from convoy.training.recorder import Subscriber
from convoy.training.resume import (
    check_data,
    check_extension,
    check_run,
    extended,
    load_latest,
    mended_files,
    moved_data,
    other_machine,
)
from convoy.training.run_directory import RunDirectory, briefly, disk_explained
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.watchdog import Watchdog, say_and_end

LIMIT_S = 600.0  # seconds that it may take


def trace_back(session: Session, store: CheckpointStore, identity: str, error: NotFiniteError, update_s: float) -> str:
    """Do the updates after the newest checkpoint again, in a fresh session, until the first that is not finite.

    All ranks call it. Returns the sentence to end with.
    """
    checkpoint, _ = load_latest(store, identity, session.ranks)
    begin = 0
    if checkpoint is not None:
        session.state.unpack(checkpoint)
        begin = checkpoint.step
    (too_long,) = session.ranks.largest(int((error.by - begin) * update_s > LIMIT_S))
    if too_long:
        return f"{error}; to see where it begins takes too long here: save more often (--set checkpoint.every=…)"
    step = session.step()
    step.guard = session.guard()
    session.model.train()
    batches = session.batches(begin, error.by - begin)
    try:
        for update, batch in enumerate(batches, begin):
            result = step(batch, update)
            if result.bad is not None:
                return f"{result.bad}: {ADVICE}{SKIP} ({error.saved})"
    finally:
        batches.close()
    return f"{error}; done again, all updates were finite"


LOCK_PATIENCE_S = 30.0  # in which a process that is about to end lets go of the run
# The same of ranks that are started again, whose host may be gone: a file server waits 90 s, then breaks its lock.
LEASE_S = 150.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: Path
    steps: int
    total_steps: int
    top1: float | None  # share of right answers on the test split, if it was evaluated
    signal: str | None  # that stopped the run; None where it finished
    comparison: Comparison | None = None  # None where the run ended too early


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    device: torch.device | None = None,
    ranks: Ranks | None = None,
    command: str = "",
    reporter: Reporter,
    on_start: Callable[[Session], None] = lambda session: None,
    handed_on: bool = False,
    jobs: Sequence[str] = (),
    watchdog: Watchdog | None = None,
    keep: bool = True,
    explicit_keys: Collection[str] = (),
    accept_code_change: bool = False,
    subscribe: Callable[[Loop], Subscriber] | None = None,
) -> Outcome:
    """Train a network as its recipe says, and leave everything about it in the folder `out`: a new or empty one, or
    with `resume` that of this very run. On several devices every rank calls it with the same recipe and folder; rank 0
    writes. A ConvoyError says what is wrong with the recipe, the data, or the folder.

    With `resume` the run goes on from the newest checkpoint, if there is one, and its final weights are those of a run
    that was never stopped; `accept_code_change` allows that, or to extend a run, also where the network computes
    something else than it did. `command` repeats the run, for the report. `on_start` is called on rank 0 when
    everything is checked and before the first update. `handed_on`: another process hands signals on to this rank
    (`convoy.launch`); the `jobs` that started the ranks know their run again by these names when they are started
    again.

    The watchdog watches already, patiently, and goes on to do so afterwards; None makes one for the run alone. `keep`
    says whether measured times are kept for later plans, and those that are kept are used; `explicit_keys` are keys of
    the recipe that the user has set just now, which are to have an effect; `subscribe` makes what looks at the updates.
    """
    run = RunDirectory(out)
    ranks = ranks or Ranks()
    first = ranks.rank == 0
    reporter = reporter if first else Reporter()
    with contextlib.ExitStack() as stack:
        if watchdog is None:
            watchdog = stack.enter_context(Watchdog(ranks, meeting_store(), say_and_end, patient=True))
        resuming, recipe = ranks.first(partial(_claim, stack, run, recipe, resume, jobs, reporter))
        device = device or environment.choose_device(None)
        current.to("start")  # this process may have trained before
        with memory_explained(ranks.rank, ranks.num):
            session = set_up(recipe, device, reporter.prepare, ranks, keep=keep, explicit_keys=explicit_keys)
        current.to("start")
        if first:
            on_start(session)
        loop = Loop(session, run, reporter, handed_on, watchdog.timeout_s, accept_code_change, subscribe)
        stack.enter_context(disk_explained(run.path))
        if recipe.extends is not None and not resuming:
            loop.extend()
        ranks.first(lambda: _begin(stack, run, session, (command, jobs), resuming, reporter))
        mesh = session.plan.mesh
        watchdog.begin(mesh.stage_of(ranks.rank) + 1 if mesh.stage_axis is not None else 0)
        if resuming:
            _go_on(run, session, loop, reporter)
        elif recipe.extends is not None:
            loop.take_metrics()
        if loop.finished:
            ranks.barrier()
            return Outcome(out, loop.done, loop.done, run.summary().get("top1"), None)
        ranks.first(lambda: write_text(run.plan, session.plan_with_cuts.to_yaml()))
        summary: Callable[..., None] = partial(write_summary, run, session) if first else lambda *of: None
        summary(loop.progress, "running", loop.done, None)
        hang, begun = watchdog.end, loop.done

        def has_gone_well() -> bool:
            return loop.done > begun

        def fail(sentence: str) -> None:
            why = sentence.partition("\n")[0]
            briefly(partial(summary, loop.progress, "failed", loop.done, loop.evaluation, why))
            briefly(reporter.end)  # a bar hides the cursor
            hang(sentence)

        try:
            memory = memory_explained(ranks.rank, ranks.num, has_gone_well)
            disk = disk_explained(run.path, lambda: run.check_there(loop.done))
            with watchdog.ending_by(fail), disk, memory:  # as it is printed, so it is kept
                signal = loop.run_to_end()
                if signal is None:
                    _deliver(run, session, loop)
        except NotFiniteError as error:
            briefly(partial(summary, loop.progress, "failed", loop.done, loop.evaluation, str(error)))
            parallel = session.recipe.parallel.model_copy(update={"plan": session.plan, "shares": None})
            ran = session.recipe.model_copy(update={"parallel": parallel})
            data, division = session.data, session.division
            store, name, update_s = loop.store, loop.identity, loop.progress.train_s / max(1, loop.done)
            # There may be no room for a second network beside the first.
            error.__traceback__ = None
            del session, loop, summary, has_gone_well, memory, disk
            release_freed_memory(device)

            def end(sentence: str, before: str = str(error)) -> None:
                hang(f"{before}\n{sentence}")

            try:
                with watchdog.ending_by(end):
                    again = set_up(ran, device, reporter.prepare, ranks, data)
                    again.division = division
                    sentence = trace_back(again, store, name, error, update_s)
            except Exception:
                raise error from None
            if first:
                briefly(partial(run.note_failure, sentence))
            raise ConvoyError(sentence) from error
        except BaseException as error:
            why = failure_of(ranks.rank, error).sentence
            briefly(partial(summary, loop.progress, "failed", loop.done, loop.evaluation, why))
            raise
        summary(loop.progress, "stopped" if signal else "finished", loop.done, loop.evaluation)
        ranks.barrier()  # nobody goes on, or away, before all is written
    top1 = loop.evaluation.top1 if loop.evaluation else None
    return Outcome(out, loop.done, session.quantities.total_updates, top1, signal, loop.comparison)


def _claim(
    stack: contextlib.ExitStack,
    run: RunDirectory,
    recipe: Recipe,
    resume: bool,
    jobs: Sequence[str],
    reporter: Reporter,
) -> tuple[bool, Recipe]:
    """Whether there is a run to go on with; others are then kept out of it before anything costly is done.

    Also the recipe, whose open choices become those of the run that it goes on with, or extends.
    """
    resuming = check_run(run, recipe, resume)
    if resuming:
        recipe = as_begun(recipe, load_recipe(str(run.config)))
    elif recipe.extends is not None:
        check_extension(recipe)
        recipe = as_begun(recipe, load_recipe(str(extended(recipe).config)))
    if resuming:
        again = bool(set(jobs) & set(run.begun_by().get("jobs") or ()))
        stack.enter_context(run.lock(LEASE_S if again else LOCK_PATIENCE_S, reporter.say))
        run.sweep()
    return resuming, recipe


def _begin(
    stack: contextlib.ExitStack,
    run: RunDirectory,
    session: Session,
    by: tuple[str, Sequence[str]],
    resuming: bool,
    reporter: Reporter,
) -> None:
    """Make the folder, keep others out of it, and write what the run is; or see that it goes on with the same data."""
    if resuming:
        check_data(session.data, run)
    else:
        run.make()
        stack.enter_context(run.lock(tell=reporter.say))
        run.check_free(mine=True)
        run.sweep()
        network_input = NetworkInput.of(session.data).as_dict()
        facts = environment.describe(by[0], session.device, session.ranks.num, str(session.plan))
        provenance = {
            "run": str(run.path),
            "jobs": list(by[1]),
            "input": network_input,
            "data": session.data.fingerprint,
        }
        run.create(to_yaml(session.recipe), {**facts, **provenance})


def _go_on(run: RunDirectory, session: Session, loop: Loop, reporter: Reporter) -> None:
    """Take over the newest checkpoint, and note that. All ranks call it."""
    rank = session.ranks.rank
    try:
        with disk_explained(run.path):
            loop.resume()
    except Exception as error:
        if rank == 0 and not isinstance(error, OtherCodeError):
            briefly(partial(run.note_failure, failure_of(rank, error).sentence))
        raise
    if loop.finished:
        reporter.say(f"going on after {loop.done:,} of {loop.done:,} updates: the run is finished, and stays as it is")
        return
    moved = mended = other = None
    if rank == 0:
        machine = environment.machine(session.device)
        moved, mended = moved_data(session.recipe, run), mended_files(session.data, run)
        other = other_machine(session.recipe, run, machine)
        session.notes[:0] = [note for note in run.summary().get("notes") or () if note not in session.notes]
        facts = environment.restart(loop.done, session.ranks.num, str(session.plan))
        facts |= {"data": session.recipe.data.path} if moved else {}
        run.add_restart(facts | (machine if other else {}))
    for sentence in filter(None, (moved, mended, other)):
        session.notes.append(sentence)
        reporter.say(sentence)
    nothing = "" if loop.done else ": no checkpoint was written before"
    reporter.say(f"going on after {loop.done:,} of {session.quantities.total_updates:,} updates{nothing}")


def _deliver(run: RunDirectory, session: Session, loop: Loop) -> None:
    """Write what the run was for. All ranks call it."""
    current.to("weights")
    kinds, wholes = session.state.whole_weights()
    if session.ranks.rank > 0:
        for _ in wholes:  # to send it
            pass
    else:
        assert loop.evaluation is not None
        data = session.data
        write_json(run.evaluation, loop.evaluation.save(run.path, data.classes, data.test.name))
        write_atomically(run.weights, lambda temporary: write_tensors(temporary, kinds, wholes))
