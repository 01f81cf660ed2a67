"""The training loop: updates, evaluations, checkpoints and metrics, and a clean end whenever it is asked to stop."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from typing import NoReturn

import torch

from convoy.checkpoint.files import Checkpoint, values_explained
from convoy.checkpoint.store import CheckpointStore
from convoy.comm.position import current
from convoy.errors import ConvoyError
from convoy.files import write_json, write_text
from convoy.launch.rank import HANDED_ON
from convoy.planner.comparison import Comparison
from convoy.progress import Reporter
from convoy.training.checkpoints import TIMEOUT_S, CheckpointTally, Saver, Timetable
from convoy.training.code import OtherCodeError, difference
from convoy.training.division import MEASURED, WARM_UP, divide_by_speed, text
from convoy.training.evaluate import Evaluation, StoppedError
from convoy.training.finite import ADVICE, NonFiniteUpdate, NotFiniteError
from convoy.training.interrupt import SIGNALS, Asking, Interrupt
from convoy.training.log import SHOW_EVERY_S, Log, Sums
from convoy.training.metrics import MetricsWriter
from convoy.training.recorder import REMEMBERED, Recorder, Subscriber, compare
from convoy.training.records import RunProgress
from convoy.training.resume import extended, identity, load_latest, moved_data, state_at_end
from convoy.training.run_directory import RunDirectory
from convoy.training.session import Session

GIVE_UP = 20  # updates left out in a row after which the run ends
TOLD = 5  # updates left out of which something is said
_DECIDED_ANEW = ("checkpoint every ", "data workers: ")


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
        subscribe: Callable[["Loop"], Subscriber] | None = None,
    ) -> None:
        self.handed_on = handed_on  # another process hands signals on to this rank
        self._accepts = accept_code_change
        self.session = session
        self.reporter = reporter
        self.store = CheckpointStore(run.checkpoints, session.recipe.checkpoint.keep)
        recipe, every = session.recipe, session.quantities.checkpoint_every
        # Local SGD averages the weights for a checkpoint: only when it does so anyway may clocks decide.
        self.saver = Saver(
            self.store,
            Timetable(every, session.ranks, recipe.checkpoint.mtbf_s, recipe.parallel.local_sgd or 1),
            session.ranks,
            self.tell,
            goes_on=recipe.checkpoint.on_error == "continue",
            on_processor=session.device.type == "cpu",
            timeout_s=timeout_s,
            check=run.check_there,
        )
        self.run = run
        self.identity = identity(session.recipe, len(session.data.train), len(session.data.test))
        self.progress = RunProgress()  # what is kept over a stop
        self._sums = Sums()  # of the line of metrics to come, as a checkpoint has them
        self.done = 0  # weight updates
        self.finished = False  # nothing was left to do when the run was gone on with: it stays as it is
        self.evaluation: Evaluation | None = None  # the latest one
        self.comparison: Comparison | None = None  # of prediction and measurement, once enough has been seen
        auto = session.recipe.parallel.shares == "auto" and session.ranks.num_sample_ranks > 1
        # Seconds of the first updates' microbatches, by whose speed the batch is then divided; None where it is not.
        self._microbatch_s: list[float] | None = [] if auto else None
        self.recorder = Recorder(session)
        self._subscriber = subscribe(self) if subscribe is not None else None
        self._left_out_in_a_row = 0
        self._extends = False

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
            again = self.progress.to_evaluate or self.done == self.session.quantities.total_updates
            self.run.forget_metrics_after(self.done, and_evaluation=again)

    def extend(self) -> None:
        """Begin with the state of the run that the recipe extends, or raise a ConvoyError; nothing is written. All
        ranks call it.
        """
        current.to("reading")
        checkpoint, sentences = state_at_end(self.session.recipe, self.session.data, self.session.ranks)
        with values_explained(f"the last checkpoint of {self.session.recipe.extends}"):
            self._take(checkpoint)
        self.progress.checkpoints = {}
        self.progress.to_evaluate = False
        self._extends = True
        for sentence in sentences:
            self.tell(sentence)

    def _take(self, checkpoint: Checkpoint) -> None:
        was, now = checkpoint.values["loop"].get("code"), self.session.code
        changed = self.session.ranks.first(lambda: difference(was, now) if was is not None else "")
        if changed and not self._accepts:
            raise OtherCodeError(
                f"the network's code is another than at update {checkpoint.step:,} ({changed}): put it back, or go on "
                "with the new code by --accept-code-change"
            )
        if changed:
            self.tell(f"from update {checkpoint.step + 1:,} on with other code: {changed}")
        values = self.session.state.unpack(checkpoint)
        self.progress, self._sums = RunProgress(**values["progress"]), Sums(**values["window"])
        self.done = checkpoint.step

    def take_metrics(self) -> None:
        """Let the curves begin with those of the run that is extended."""
        before = extended(self.session.recipe).metrics
        if self.session.ranks.rank == 0 and before.exists():
            write_text(self.run.metrics, before.read_text(encoding="utf-8", errors="replace"))
            self.run.forget_metrics_after(self.done)

    def _is_finished(self) -> bool:
        """Whether nothing is left to do, and all that the run was for is there."""
        run, recipe = self.run, self.session.recipe
        whole = run.weights.is_file() and run.evaluation.is_file()
        ended = self.done == self.session.quantities.total_updates and run.summary().get("status") == "finished"
        return whole and ended and moved_data(recipe, run) is None

    def run_to_end(self) -> str | None:
        """Do the remaining updates and evaluate. Gives the name of the signal that stopped the run, whose state is then
        saved; None at its end.
        """
        writer: AbstractContextManager[MetricsWriter | None] = nullcontext()
        if self.session.ranks.rank == 0:
            writer = MetricsWriter(self.run.metrics, self.run.tensorboard, self.done, self.tell, self.run.check_there)
        with (
            Interrupt(HANDED_ON if self.handed_on else SIGNALS, self._stopping) as interrupt,
            writer as metrics,
            self.saver.open(self.run.plan),
        ):
            self._log = Log(self.session, self.progress, self._sums, metrics, self.reporter, self.tell)
            total = self.session.quantities.total_updates
            self.reporter.begin(self.done, total)
            self._interrupt = interrupt
            self._asking = Asking(self.session.ranks, interrupt)
            self._line_at = self._next_line()
            try:
                if self._extends:  # from now on the other run is not needed
                    self._save()
                self._do_updates(total)
            finally:
                self.reporter.end()
            self._conclude()
            if self._interrupt.agreed is None:
                self._evaluate()
            self._save()
            self._finish_saving(or_raise=self._interrupt.agreed is not None)
            if self._subscriber is not None:
                self._subscriber.end()
        return self._interrupt.agreed

    def _do_updates(self, total: int) -> None:
        """Do the updates that are left, with all that is due in between, or as many as there is time for."""
        if self.progress.to_evaluate and self.done < total:
            self._evaluate()
        while self.done < total and self._interrupt.agreed is None:
            self._train_as_divided(total)

    def _train_as_divided(self, total: int) -> None:
        """Do updates until the end, a stop, or until the batches are to be divided otherwise."""
        step = self.session.step()
        step.timed = self._microbatch_s is not None
        if step.recorded is not None:
            step.recorded.tell = self.tell
        self.session.model.train()
        with closing(self.session.batches(self.done, total - self.done, self._more_workers)) as batches:
            self.recorder.ask(self.done, counts=self._microbatch_s is None)
            for batch in batches:
                step.records = self.recorder.has_watched
                update = self.recorder.update(step, batch, self.done)
                self._left_out_in_a_row = 0 if update.bad is None else self._left_out(update.bad)
                self.done += 1
                self._log.updates.append(update)
                self._after_update(total)
                self._asking.left -= 1
                stops = self._interrupt.agreed is not None or (self._asking.left <= 0 and self._asking.meet())
                if self._subscriber and (self.recorder.num % REMEMBERED == 0 or stops or self.done == total):
                    self._subscriber.look()
                if stops:
                    return
                if self._microbatch_s is not None:
                    self._microbatch_s.append(update.microbatch_s)
                    if len(self._microbatch_s) == WARM_UP + MEASURED:
                        self._divide_anew(self._microbatch_s)
                        return
                self.recorder.ask(self.done, counts=self._microbatch_s is None)

    def _stopping(self, name: str) -> None:
        self.reporter.say(f"{name}: finishing this update, then saving; again to stop now, without saving")

    def _left_out(self, bad: NonFiniteUpdate) -> int:
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
        self.comparison = compare(self.recorder, session.scored, session.profiles, self.run.trace)
        session.scored = None
        if session.ranks.rank == 0 and (self.comparison.timed or not self.run.prediction.exists()):
            try:
                write_json(self.run.prediction, self.comparison.to_document())
            except OSError as error:
                self.tell(f"{self.run.prediction} could not be written ({error.strerror})")

    def _after_update(self, total: int) -> None:
        """What is due now: a line of metrics, an evaluation, a checkpoint."""
        if self.done == self._line_at:
            self._end_window()
            self._line_at = self._next_line()
        elif time.perf_counter() > self._log.shown + SHOW_EVERY_S:
            self._log.show(self.done)
        if self.recorder.done:
            self._conclude()
        if self.done % self.session.quantities.evaluate_every == 0 and self.done < total:
            self._evaluate()
        if self.saver.due(self.done) and self.done < total:
            self._save()

    def _next_line(self) -> int:
        """The update after which the next line of metrics comes; 0 after the last."""
        quantities = self.session.quantities
        return next(filter(quantities.logged, range(self.done + 1, quantities.total_updates + 1)), 0)

    def _divide_anew(self, microbatch_s: list[float]) -> None:
        """Give every rank microbatches by its speed."""
        session = self.session
        session.division, times = divide_by_speed(microbatch_s, session.ranks, session.division)
        self._microbatch_s = None
        session.notes.append(
            f"shares {text(session.division.counts)} of {len(session.division.sizes)} microbatches from update "
            f"{self.done:,} on, by measured times of {', '.join(f'{ms:.3g}' for ms in times)} ms a microbatch"
        )
        self.reporter.say(session.notes[-1])

    def _more_workers(self, number: int) -> None:
        self.tell(f"data workers: {number} from update {self.done + 1:,} on, as batches were waited for")

    def tell(self, sentence: str) -> None:
        """Say something that stays with the run; of what is decided again and again, the last word alone stays."""
        notes = self.session.notes
        for subject in _DECIDED_ANEW:
            if sentence.startswith(subject):
                notes[:] = [note for note in notes if not note.startswith(subject)]
        notes.append(sentence)
        self.reporter.say(sentence)

    def _end_window(self) -> None:
        """Write the line of the updates since the last one."""
        self._log.collect()
        if self._log.sums.num_updates:
            self._check_loss(self._log.sums.mean_loss)
        self._log.train(self.done)

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            self._not_finite(f"the loss became {loss}")

    def _check_weights(self) -> None:
        """No checkpoint holds what the next loss will show to be lost. All ranks call it."""
        fine = all(bool(torch.isfinite(weight).all()) for weight in self.session.model.parameters())
        if self.session.ranks.any(not fine):
            self._not_finite("weights became infinite or no numbers")

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
        self.progress.to_evaluate = False
        for sample, reason in result.bad:
            self.progress.add_bad(self.session.data.test.name(sample), reason, "test")
        self._log.test(self.done, result)
        if self.progress.best_top1 is None or result.top1 > self.progress.best_top1:
            self.progress.best_top1, self.progress.best_step = result.top1, self.done
            self._save()

    def _save(self) -> None:
        if self.saver.has(self.done):
            return
        current.to("checkpoint")
        self._log.time()
        self._log.collect()
        window = asdict(self._log.sums)
        self._check_loss(window["loss"])
        self.session.network.synchronize()
        self._check_weights()
        self.progress.checkpoints = asdict(self.saver.tally)
        values = {"progress": vars(self.progress), "window": window, "code": self.session.code}
        tensors, rest = self.session.state.contents(values)
        self.saver.save(self.done, self.identity, tensors, rest, self.progress.best_step)

    def _finish_saving(self, or_raise: bool = False) -> None:
        """Wait for what is on its way, and say what all of them took."""
        self.saver.finish(or_raise)
        self.progress.checkpoints = asdict(self.saver.tally)
        self.reporter.say(str(self.saver.tally))
