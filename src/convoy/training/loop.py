"""The training loop: updates, evaluations, checkpoints and metrics; its end, or where a signal asks it to stop."""

import math
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict
from typing import NoReturn

import torch

from convoy.checkpoint.files import Checkpoint, DamagedCheckpointError, values_explained
from convoy.checkpoint.store import CheckpointStore
from convoy.comm.position import current
from convoy.errors import ConvoyError
from convoy.files import write_json, write_text
from convoy.planner.comparison import Comparison
from convoy.progress import Reporter
from convoy.run.directory import RunDirectory
from convoy.run.records import RunProgress
from convoy.tasks.metric import metric_in_words, metric_name
from convoy.tasks.task import Evaluation
from convoy.training.checkpoints import TIMEOUT_S, CheckpointTally, Saver, Timetable
from convoy.training.evaluation import StoppedError
from convoy.training.finite import ADVICE, NotFiniteError
from convoy.training.gradients import GradientNoise
from convoy.training.log import SHOW_EVERY_S, Log, MetricsWriter, Sums
from convoy.training.recorder import REMEMBERED, Look, Recorder, compare
from convoy.training.resume import (
    OtherCodeError,
    code_difference,
    extended,
    identity,
    load_latest,
    moved_data,
    state_at_end,
)
from convoy.training.session import Session
from convoy.training.stop import Asking, Interrupt

GIVE_UP = 20  # updates left out in a row after which the run ends
TOLD = 5  # updates left out of which something is said
_DECIDED_ANEW = ("checkpoint every ", "shares ", "target of ")
_RENAMED = {"best_top1": "best", "num_correct": "score"}  # what checkpoints of before call otherwise


class Loop:
    """Takes a session from wherever it stands to its end, or until a signal asks it to stop.

    Every rank runs the same loop; files are written, and things said, by rank 0.
    """

    def __init__(
        self,
        session: Session,
        run: RunDirectory,
        reporter: Reporter,
        handed_on: bool = False,
        timeout_s: float = TIMEOUT_S,
        accept_code_change: bool = False,
        subscribe: Callable[["Loop"], Look] | None = None,
    ) -> None:
        self.handed_on = handed_on  # another process hands signals on to this rank
        self.session, self.run, self.reporter = session, run, reporter
        self._accepts_code_change = accept_code_change
        recipe, self.total = session.recipe, session.quantities.total_updates
        self.store = CheckpointStore(run.checkpoints, recipe.checkpoint.keep)
        every, mtbf_s = session.quantities.checkpoint_every, recipe.checkpoint.mtbf_s
        self.saver = Saver(
            self.store,
            Timetable(every, session.ranks, mtbf_s),
            session.ranks,
            self.tell,
            goes_on=recipe.checkpoint.on_error == "continue",
            on_processor=session.device.type == "cpu",
            timeout_s=timeout_s,
            check=run.check_there,
        )
        self.identity = identity(recipe, len(session.data.train), len(session.data.test))
        self.progress = RunProgress()  # what is kept over a stop
        self._sums = Sums()  # of the line of metrics to come, as a checkpoint has them
        self.done = 0  # weight updates
        self.finished = False  # nothing was left to do when the run was gone on with: it stays as it is
        self.evaluation: Evaluation | None = None  # the latest one
        self.comparison: Comparison | None = None  # of prediction and measurement, once enough has been seen
        self.recorder = Recorder(session)
        self._look: Look = subscribe(self) if subscribe is not None else lambda is_saved: None
        self._evaluated = -1  # updates before the latest evaluation
        patience = recipe.stop_after
        per_epoch = session.quantities.updates_per_epoch
        self._patience = math.inf if patience is None else patience.updates(per_epoch, self.total)
        self._left_out_in_a_row = 0
        self._extends = False

    @property
    def is_over(self) -> bool:
        """Whether no update is left to be done."""
        return self.done == self.total or self.progress.is_over

    def resume(self) -> None:
        """Go back to the newest checkpoint that is whole; without any, begin at the beginning, or with another run. A
        ConvoyError where there are checkpoints, but none of them can be used.
        """
        current.to("reading")
        checkpoint, refused = load_latest(self.store, self.identity, self.session.ranks)
        for sentence in refused:
            self.tell(f"{sentence}; the one before it was used")
        if checkpoint is not None:
            with values_explained(f"the checkpoint of update {checkpoint.step:,}"):
                self._take(checkpoint)
                self.saver.newest = checkpoint.step
                self.saver.tally = CheckpointTally(**self.progress.checkpoints)
        elif self.session.recipe.extends is not None:
            self.extend()
            self.take_metrics()
        self.finished = self.session.ranks.first(self._is_finished)
        if self.session.ranks.rank == 0 and not self.finished:
            again = self.progress.to_evaluate or self.is_over
            self.run.forget_metrics_after(self.done, and_evaluation=again)

    def extend(self) -> None:
        """Begin with the state of the run that the recipe extends, or raise a ConvoyError; nothing is written. All
        ranks call it.
        """
        current.to("reading")
        checkpoint, sentences = state_at_end(self.session.recipe, self.session.data, self.session.ranks)
        with values_explained(f"the last checkpoint of {self.session.recipe.extends}"):
            self._take(checkpoint)
        # The old run's best weights are not in this one's folder, but its last stand for election.
        self.progress.best = self.progress.best_step = None
        self.progress.checkpoints, self.progress.to_evaluate = {}, self.session.recipe.selects
        self.progress.is_over = self.progress.reached = False
        if self.session.recipe.extends_at is not None:
            self.progress, self._sums = RunProgress(), Sums()
        self._extends = True
        for sentence in sentences:
            self.tell(sentence)

    def _take(self, checkpoint: Checkpoint) -> None:
        was, now = checkpoint.values["loop"].get("code"), self.session.code
        changed = self.session.ranks.first(lambda: code_difference(was, now) if was is not None else "")
        if changed and not self._accepts_code_change:
            raise OtherCodeError(
                f"the network's code is another than at update {checkpoint.step:,} ({changed}): put it back, or go on "
                "with the new code by --accept-code-change"
            )
        if changed:
            self.tell(f"from update {checkpoint.step + 1:,} on with other code: {changed}")
        values = self.session.state.unpack(checkpoint, self.tell)
        progress, window = (
            {_RENAMED.get(key, key): value for key, value in values[part].items()} for part in ("progress", "window")
        )
        self.progress, self._sums = RunProgress(**progress), Sums(**window)
        self.done = checkpoint.step

    def take_metrics(self) -> None:
        """Let the curves begin with those of the run that is extended."""
        if self.session.recipe.extends_at is not None:
            return  # its updates are others
        before = extended(self.session.recipe).metrics
        if self.session.ranks.rank == 0 and before.exists():
            write_text(self.run.metrics, before.read_text(encoding="utf-8", errors="replace"))
            self.run.forget_metrics_after(self.done, and_evaluation=self.progress.to_evaluate)

    def _is_finished(self) -> bool:
        """Whether nothing is left to do, and all that the run was for is there."""
        run = self.run
        whole = run.weights.is_file() and run.evaluation.is_file()
        ended = self.is_over and run.summary().get("status") == "finished"
        return whole and ended and moved_data(self.session.recipe, run) is None

    def run_to_end(self) -> str | None:
        """Do the remaining updates and evaluate. Gives the name of the signal that stopped the run, whose state is then
        saved; None at its end.
        """
        run, ranks = self.run, self.session.ranks
        with (
            Interrupt(self.handed_on, self._stopping) as interrupt,
            MetricsWriter(run.metrics, self.tell, run.check_there) if ranks.rank == 0 else nullcontext() as metrics,
            self.saver.open(run.plan),
        ):
            self._log = Log(self.session, self.progress, self._sums, metrics, self.reporter, self.tell)
            self.reporter.begin(self.done, self.total)
            self._interrupt, self._asking = interrupt, Asking(ranks, interrupt)
            self._line_at = self._next_line()
            try:
                if self.progress.to_evaluate and not self.is_over:
                    self._evaluate()
                if self._extends:  # from now on the other run is not needed
                    self._save()
                if not self.is_over and interrupt.agreed is None:
                    self._do_updates()
            finally:
                self.reporter.end()
            self._conclude()
            if interrupt.agreed is None and self._evaluated < self.done:
                self._evaluate()
            if interrupt.agreed is None:
                self._tell_of_target()
            self._save()
            self.saver.finish(or_raise=interrupt.agreed is not None)
            if interrupt.agreed is None:
                self._deliver_best()
            self.progress.checkpoints = asdict(self.saver.tally)
            if self.saver.tally.written:
                self.reporter.say(str(self.saver.tally))
            self._look(True)
        return interrupt.agreed

    def _do_updates(self) -> None:
        """Do the updates that are left, with all that is due in between, or as many as there is time for."""
        session, recorder, asking = self.session, self.recorder, self._asking
        session.model.train()
        session.train_in(self.done)
        for sentence in filter(None, (session.divide_by_speed(), session.choose_interval())):
            self.tell(sentence)
        step, asking.lag = session.step(), session.state.exchange.lag
        if step.recorded is not None:
            step.recorded.tell = self.tell
        step.noise = GradientNoise(session.noise_every, session.division, self.progress.noise)
        with closing(session.batches(self.done, self.total - self.done)) as batches:
            stops = False
            while not stops:
                recorder.ask(self.done, step.noise.due(self.done))
                batch = next(batches)
                session.train_in(self.done, step.recorded)
                step.records = recorder.has_watched
                update = recorder.update(step, batch, self.done)
                self._left_out_in_a_row = 0 if update.bad is None else self._left_out(update.bad)
                self.done += 1
                self._log.updates.append(update)
                self._after_update()
                stops = asking() or self.is_over
                if recorder.num % REMEMBERED == 0 or stops:
                    self._look(False)
        asking.hear()

    def _stopping(self, name: str) -> None:
        self.reporter.say(f"{name}: finishing this update, then saving; again to stop now, without saving")

    def _left_out(self, bad: str) -> int:
        """Count an update that was not made: how many in a row; a ConvoyError after too many."""
        self.progress.left_out += 1
        if self._left_out_in_a_row + 1 == GIVE_UP:
            raise ConvoyError(f"{bad}: the {GIVE_UP}th in a row to be left out: {ADVICE}")
        number = self.progress.left_out
        if number <= TOLD:
            self.tell(f"{bad}: left out, with {number} so far{'; others are only counted' if number == TOLD else ''}")
        return self._left_out_in_a_row + 1

    def _conclude(self) -> None:
        """Say what was seen of the first updates, and keep it. All ranks call it."""
        if self.comparison is not None:
            return
        session = self.session
        scored = None if session.thaws else session.chosen.scored  # which is of an update that trains all layers
        self.comparison = compare(self.recorder, scored, session.profiles, self.run.trace)
        if session.ranks.rank == 0 and (self.comparison.timed or not self.run.prediction.exists()):
            try:
                write_json(self.run.prediction, self.comparison.to_document())
            except OSError as error:
                self.tell(f"{self.run.prediction} could not be written ({error.strerror})")

    def _after_update(self) -> None:
        """What is due now: a line of metrics, an evaluation, a checkpoint."""
        if self.done == self._line_at:
            self._write_line()
            self._line_at = self._next_line()
        elif time.perf_counter() > self._log.shown + SHOW_EVERY_S:
            self._log.show(self.done)
        if self.recorder.done:
            self._conclude()
        if self.done % self.session.quantities.evaluate_every == 0 and self.done < self.total:
            self._evaluate()
        if self.saver.when.due(self.done) and self.done < self.total:
            self._save()

    def _write_line(self) -> None:
        """A line of metrics on the updates since the last one, if there are any. All ranks call it."""
        self._log.collect()
        self.saver.look()
        if self._log.sums.num_updates:
            self._check_loss(self._log.sums.mean_loss)
        if self._log.sums.num_updates or self._log.sums.left_out:
            self._log.train(self.done)

    def _next_line(self) -> int:
        """The update after which the next line of metrics comes; 0 after the last."""
        return next(filter(self.session.quantities.logged, range(self.done + 1, self.total + 1)), 0)

    def tell(self, sentence: str) -> None:
        """Say something that stays with the run; of what is decided again and again, the last word alone stays."""
        notes = self.session.notes
        for subject in filter(sentence.startswith, _DECIDED_ANEW):
            notes[:] = [note for note in notes if not note.startswith(subject)]
        notes.append(sentence)
        self.reporter.say(sentence)

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            self._not_finite(f"the loss became {loss}")

    def _not_finite(self, what: str) -> NoReturn:
        self.saver.finish()
        newest = self.saver.newest
        saved = f"the newest checkpoint is of update {newest}" if newest else "there is no checkpoint yet"
        raise NotFiniteError(what, self.done, saved)

    def _evaluate(self) -> None:
        try:
            result = self.evaluation = self.session.evaluate(Asking(self.session.ranks, self._interrupt))
        except StoppedError:
            self.progress.to_evaluate = True
            return
        recipe, progress, metric = self.session.recipe, self.progress, self.session.metric
        repeated, progress.to_evaluate, self._evaluated = progress.to_evaluate, False, self.done
        metrics = result.metrics()  # the same on all ranks
        value = metrics.get(metric.name, math.nan)
        improves = metric.improves(value, progress.best)
        reached = metrics.get("top1", 0.0) >= (recipe.target or math.inf)
        waited = self.done - (self.done if progress.best_step is None else progress.best_step)
        gives_up = waited >= self._patience and not (improves or reached or self.is_over)
        if reached or gives_up:
            progress.is_over, progress.reached = True, progress.reached or reached
            self._write_line()
        self._log.evaluation(self.done, result, self.session.data)
        if improves:
            progress.best, progress.best_step = value, self.done
        elif gives_up:
            than = f"{self._best_in_words()} of update {progress.best_step}"
            self.tell(f"ends after {self.done:,} updates: nothing better than {than} in {recipe.stop_after}")
        if improves or repeated:
            self._save(again=repeated)

    def _best_in_words(self) -> str:
        value = math.nan if self.progress.best is None else self.progress.best
        return f"{metric_in_words(self.session.metric.name, value)} on the {self.session.data.split} split"

    def _deliver_best(self) -> None:
        """Go back to the best weights, where the recipe asks for them, and look at the test split, where there is one
        beside that for validation. All ranks call it."""
        session, best = self.session, self.progress.best_step
        which, checkpoint = "last", None
        if session.recipe.selects and best is None:
            name = metric_name(session.metric.name)
            self.tell(f"{name} had no value in any evaluation: the last weights are delivered")
        elif session.recipe.selects and best is not None:
            which = f"best ({self._best_in_words()})"
            try:
                if best != self.done:
                    checkpoint, _ = load_latest(self.store, self.identity, session.ranks, best)
            except DamagedCheckpointError:
                place = self.store.place(best)
                self.tell(f"{place}, the best, is missing or damaged: the last weights are delivered")
                which = "last"
            if checkpoint is not None:
                session.state.unpack(checkpoint, self.tell)
        if checkpoint is None and session.data.final is None:
            return
        try:
            result = session.evaluate(Asking(session.ranks, self._interrupt), at_end=True)
        except StoppedError:  # all is saved, and it is done again
            return
        self.evaluation = result
        if session.data.final is not None:
            self._log.evaluation(self.done, result, session.data.at_end())
        of = f"the weights of update {self.done if which == 'last' else best:,}, the {which}"
        once = "the test split was looked at once, at the end, with " if session.data.final is not None else "delivers "
        self.tell(f"{once}{of}")

    def _tell_of_target(self) -> None:
        """Say after how much training the target was reached, or what was reached instead."""
        target, progress = self.session.recipe.target, self.progress
        if target is None:
            return
        epochs = self.done / self.session.quantities.updates_per_epoch
        how = f"reached after {self.done:,} updates, {epochs:.3g} epochs and {progress.train_s:.3g} s of training"
        if not progress.reached:
            best = f": the best was {self._best_in_words()}, after {progress.best_step:,} updates"
            how = f"not reached{best if progress.best_step is not None else ''}"
        self.tell(f"target of {target:.2%} {how}")

    def _save(self, again: bool = False) -> None:
        """Save the state, if it is not saved yet, or `again`, and if no checkpoint would hold what the next loss shows
        to be lost. All ranks call it."""
        if self.saver.has(self.done) and not again:
            return
        current.to("checkpoint")
        self._log.time()
        self._log.collect()
        window = asdict(self._log.sums)
        self._check_loss(window["loss"])
        fine = all(bool(torch.isfinite(weight).all()) for weight in self.session.model.parameters())
        if self.session.ranks.any(not fine):
            self._not_finite("weights became infinite or no numbers")
        self.progress.checkpoints = asdict(self.saver.tally)
        values = {"progress": vars(self.progress), "window": window, "code": self.session.code}
        tensors, rest = self.session.state.contents(values)
        self.saver.save(self.done, self.identity, tensors, rest, self.progress.best_step)
