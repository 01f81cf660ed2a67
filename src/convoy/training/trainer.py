"""Begins a run, or goes on with one, and leaves its folder complete, also where it fails."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from convoy.checkpoint.files import write_tensors
from convoy.checkpoint.store import CheckpointStore, sweep
from convoy.comm.position import current, memory_explained
from convoy.comm.ranks import Ranks
from convoy.engine.allocation import release_freed_memory
from convoy.errors import ConvoyError
from convoy.failure import failure_of
from convoy.files import write_atomically, write_json, write_text
from convoy.own import checksum
from convoy.planner.comparison import Comparison
from convoy.progress import Reporter
from convoy.recipe.recipe import Recipe, load_recipe, to_yaml
from convoy.run.directory import RunDirectory, briefly, disk_explained
from convoy.run.records import Status
from convoy.run.trackers import Trackers
from convoy.training import environment
from convoy.training.build import NetworkInput
from convoy.training.finite import ADVICE, SKIP, NotFiniteError
from convoy.training.log import write_summary
from convoy.training.loop import Loop
from convoy.training.precision import as_begun
from convoy.training.recorder import Look
from convoy.training.resume import (
    OtherCodeError,
    check_data,
    check_extension,
    check_run,
    extended,
    leaves,
    load_latest,
    since_begun,
)
from convoy.training.session import Session
from convoy.training.set_up import set_up
from convoy.training.watchdog import Watchdog

LOCK_PATIENCE_S = 30.0  # in which a process that is about to end lets go of the run
# The same of ranks that are started again, whose host may be gone: a file server waits 90 s, then breaks its lock.
LEASE_S = 150.0
LIMIT_S = 600.0  # seconds that it may take to do updates again, to see where numbers stopped being finite


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: Path
    steps: int
    total_steps: int
    metrics: dict[str, float]  # of the last evaluation, if there was any
    best_metric: str  # the name of the one that says which weights are best
    split: str  # that it was of
    signal: str | None  # that stopped the run; None where it finished
    comparison: Comparison | None = None  # None where the run ended too early

    @property
    def top1(self) -> float | None:
        """Share of right answers in that evaluation."""
        return self.metrics.get("top1")


@dataclass
class Trainer:
    """A network that is trained as its recipe says, and leaves everything about it in the folder `out`: a new or empty
    one, or with `resume` that of this very run. On several devices every rank makes it with the same recipe and folder;
    rank 0 writes.

    With `resume` the run goes on from the newest checkpoint, if there is one, and its final weights are those of a run
    that was never stopped.
    """

    recipe: Recipe
    out: Path
    _: KW_ONLY
    reporter: Reporter
    watchdog: Watchdog  # watches already, and afterwards
    device: torch.device
    resume: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    command: str = ""  # repeats the run, for the report
    on_start: Callable[[Session], None] = lambda session: None  # on rank 0, with all checked, before the first update
    handed_on: bool = False  # another process hands signals on to this rank (`convoy.launch`)
    jobs: Sequence[str] = ()  # that started the ranks, which know their run again by these names when started again
    keep: bool = True  # whether measured times are kept for later plans, and those that are kept are used
    explicit_keys: Collection[str] = ()  # that the user has set just now
    accept_code_change: bool = False  # resume or extend a run also where the network computes something else now
    subscribe: Callable[[Loop], Look] | None = None  # makes what looks at the updates

    def __post_init__(self) -> None:
        self._folder = RunDirectory(self.out)
        self._resuming = False

    def run(self) -> Outcome:
        """Train; a ConvoyError says what is wrong with the recipe, the data, or the folder."""
        with contextlib.ExitStack() as self._stack:
            loop = self._begin()
            best, split, total = loop.session.metric.name, loop.session.data.at_end().split, loop.total
            if self.ranks.rank == 0:
                names = [*([] if loop.finished else ["tensorboard"]), *self.recipe.trackers]
                tell = partial(_tell, loop.session.notes, self.reporter)  # not the loop's, which may be let go of
                told = Trackers(self._folder, names, dict(leaves(self.recipe)), tell)
                self._stack.enter_context(told)
            if loop.finished:
                self.ranks.barrier()
                summary = self._folder.summary()
                metrics = summary.get("metrics") or {"top1": summary.get("top1")}  # of runs of before
                return Outcome(self.out, loop.done, loop.done, metrics, best, split, None)
            # Cuts into stages are the devices', so they stand there and not in the recipe.
            self.ranks.first(lambda: write_text(self._folder.plan, loop.session.plan_with_cuts.to_yaml()))
            self._summarize(loop, "running")
            try:
                signal = self._train(loop)
            except NotFiniteError as error:
                end = self._ending(loop)
                error.__traceback__ = None  # its frames have the network, beside which there may be no room for another
                del loop
                end(error)
            self._summarize(loop, "stopped" if signal else "finished")
            self.ranks.barrier()  # nobody goes on, or away, before all is written
        metrics = loop.evaluation.metrics() if loop.evaluation else {}
        return Outcome(self.out, loop.done, total, metrics, best, split, signal, loop.comparison)

    def _begin(self) -> Loop:
        """The loop at its beginning, or at the newest checkpoint, in a folder that is this run's alone."""
        ranks = self.ranks
        reporter = self.reporter if ranks.rank == 0 else Reporter()
        self._resuming, self.recipe = ranks.first(self._claim)
        current.to("start")  # this process may have trained before
        with memory_explained(ranks.rank, ranks.num):
            session = set_up(
                self.recipe, self.device, reporter.prepare, ranks, keep=self.keep, explicit_keys=self.explicit_keys
            )
        current.to("start")
        if ranks.rank == 0:
            self.on_start(session)
        options = self.handed_on, self.watchdog.timeout_s, self.accept_code_change, self.subscribe
        loop = Loop(session, self._folder, reporter, *options)
        self._stack.enter_context(disk_explained(self.out))
        extends = self.recipe.extends is not None and not self._resuming
        if extends:
            loop.extend()
        ranks.first(lambda: self._make_folder(session))
        mesh = session.plan.mesh
        self.watchdog.begin(mesh.stage_of(ranks.rank) + 1 if mesh.stage_axis is not None else 0)
        if self._resuming:
            self._go_on(loop)
        elif extends:
            loop.take_metrics()
        return loop

    def _claim(self) -> tuple[bool, Recipe]:
        """Whether there is a run to go on with, from which others are kept out before anything costly is done; and the
        recipe, whose open choices become those of the run that it goes on with, or extends.
        """
        recipe, folder = self.recipe, self._folder
        resuming = check_run(folder, recipe, self.resume)
        if resuming:
            recipe = as_begun(recipe, load_recipe(str(folder.config)))
            again = bool(set(self.jobs) & set(folder.begun_by().get("jobs") or ()))
            self._stack.enter_context(folder.lock(LEASE_S if again else LOCK_PATIENCE_S, self.reporter.say))
            folder.sweep()
            sweep(folder.checkpoints, "step-*")  # a checkpoint may lie aside
        elif recipe.extends is not None:
            check_extension(recipe)
            recipe = as_begun(recipe, load_recipe(str(extended(recipe).config)))
        return resuming, recipe

    def _make_folder(self, session: Session) -> None:
        """Make the folder, keep others out of it, and write what the run is; or see that it goes on with the same
        data."""
        folder, data = self._folder, session.data
        if self._resuming:
            check_data(data, folder)
            return
        self._stack.enter_context(folder.lock(tell=self.reporter.say))
        folder.check_free(mine=True)
        folder.sweep()
        facts = environment.describe(self.command, session.device, session.ranks.num, str(session.plan))
        own_code = {name: checksum(name) for name in session.recipe.own_code().values()}
        facts |= {"own": own_code} if own_code else {}
        run = {"run": str(self.out), "jobs": list(self.jobs), "input": NetworkInput.of(data).model_dump(mode="json")}
        folder.create(to_yaml(session.recipe), {**facts, **run, "data": data.fingerprint})

    def _go_on(self, loop: Loop) -> None:
        """Take over the newest checkpoint, and note that. All ranks call it."""
        session, folder, rank, say = loop.session, self._folder, self.ranks.rank, loop.reporter.say
        try:
            with disk_explained(self.out):
                loop.resume()
        except Exception as error:
            if rank == 0 and not isinstance(error, OtherCodeError):
                briefly(partial(folder.note_failure, failure_of(rank, error).sentence))
            raise
        if loop.finished:
            say(f"going on after {loop.done:,} of {loop.done:,} updates: the run is finished, and stays as it is")
            return
        if rank == 0:
            session.notes[:0] = [note for note in folder.summary().get("notes") or () if note not in session.notes]
            facts = environment.restart(loop.done, session.ranks.num, str(session.plan))
            machine = environment.machine(session.device)
            for sentence, more_facts in since_begun(session.recipe, session.data, folder, machine):
                facts |= more_facts
                loop.tell(sentence)
            folder.add_restart(facts)
        nothing = "" if loop.done else ": no checkpoint was written before"
        say(f"going on after {loop.done:,} of {session.quantities.total_updates:,} updates{nothing}")

    def _train(self, loop: Loop) -> str | None:
        """Do the updates, and deliver; the signal that stopped them, if any. All ranks call it."""
        ranks, hang, num_before = self.ranks, self.watchdog.end, loop.done

        def fail(sentence: str) -> None:
            briefly(partial(self._summarize, loop, "failed", sentence.partition("\n")[0]))
            briefly(loop.reporter.end)  # a bar hides the cursor
            hang(sentence)

        disk = disk_explained(self.out, lambda: self._folder.check_there(loop.done))
        try:
            with (
                self.watchdog.ending_by(fail),
                disk,
                memory_explained(ranks.rank, ranks.num, lambda: loop.done > num_before),
            ):
                signal = loop.run_to_end()
                if signal is None:
                    self._deliver(loop)
        except BaseException as error:  # as it is printed, so it is kept
            briefly(partial(self._summarize, loop, "failed", failure_of(ranks.rank, error).sentence))
            raise
        return signal

    def _summarize(self, loop: Loop, status: Status, error: str | None = None) -> None:
        if self.ranks.rank == 0:
            write_summary(self._folder, loop.session, loop.progress, status, loop.done, loop.evaluation, error)

    def _deliver(self, loop: Loop) -> None:
        """Write what the run was for. All ranks call it."""
        current.to("weights")
        kinds, wholes = loop.session.state.whole_weights()
        if self.ranks.rank > 0:
            for _ in wholes:  # to send it
                pass
            return
        assert loop.evaluation is not None
        folder, data = self._folder, loop.session.data.at_end()
        write_json(folder.evaluation, loop.evaluation.save(folder.path, data), indent=None)
        write_atomically(folder.weights, lambda temporary: write_tensors(temporary, kinds, wholes))

    def _ending(self, loop: Loop) -> Callable[[NotFiniteError], NoReturn]:
        """What does the last updates of a loop again and ends with where it began; it keeps nothing of the network."""
        session, ranks, prepare = loop.session, self.ranks, loop.reporter.prepare
        parallel = session.recipe.parallel.model_copy(update={"plan": session.plan, "shares": None})
        recipe = session.recipe.model_copy(update={"parallel": parallel})
        device, data, division = session.device, session.data, session.division
        store, identity, update_s = loop.store, loop.identity, loop.progress.train_s / max(1, loop.done)
        watchdog, hang, folder = self.watchdog, self.watchdog.end, self._folder

        def end(error: NotFiniteError) -> NoReturn:
            try:
                with watchdog.ending_by(lambda sentence: hang(f"{error}\n{sentence}")):
                    release_freed_memory(device)
                    session_again = set_up(recipe, device, prepare, ranks, data)
                    session_again.division = division
                    sentence = trace_back(session_again, store, identity, error, update_s)
            except Exception:
                raise error from None
            if ranks.rank == 0:
                briefly(partial(folder.note_failure, sentence))
            raise ConvoyError(sentence) from error

        return end


def _tell(notes: list[str], reporter: Reporter, sentence: str) -> None:
    notes.append(sentence)
    reporter.say(sentence)


def trace_back(session: Session, store: CheckpointStore, identity: str, error: NotFiniteError, update_s: float) -> str:
    """Do the updates after the newest checkpoint again, in a fresh session, until the first that is not finite; the
    sentence to end with. All ranks call it.
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
    with contextlib.closing(session.batches(begin, error.by - begin)) as batches:
        for update, batch in enumerate(batches, begin):
            session.train_in(update)
            result = step(batch, update)
            if result.bad is not None:
                return f"{result.bad}: {ADVICE}{SKIP} ({error.saved})"
    return f"{error}; done again, all updates were finite"
