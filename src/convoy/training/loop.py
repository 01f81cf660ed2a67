"""The training loop: updates, evaluations, checkpoints and metrics, and a clean end whenever it is asked to stop."""

import math
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict, replace
from typing import NoReturn

import torch

from convoy.checkpoint.files import Checkpoint, values_explained
from convoy.checkpoint.store import CheckpointStore
from convoy.comm.position import current
from convoy.doctor.diagnosis import WORTH_SAYING, Diagnosis
from convoy.doctor.facts import Facts
from convoy.errors import ConvoyError
from convoy.files import write_json, write_text
from convoy.launch.rank import HANDED_ON
from convoy.planner.comparison import Comparison
from convoy.progress import Reporter
from convoy.training.checkpoints import TIMEOUT_S, CheckpointTally, Saver, Timetable
from convoy.training.code import OtherCodeError, difference
from convoy.training.division import SpeedTest, text
from convoy.training.evaluate import Evaluation, StoppedError
from convoy.training.finite import ADVICE, NonFiniteUpdate, NotFiniteError
from convoy.training.interrupt import SIGNALS, Interrupt, Stop
from convoy.training.log import Log, MetricsWindow
from convoy.training.metrics import MetricsWriter
from convoy.training.observation import LEAST, UPDATES, Observation
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
            Timetable(every, session.ranks, recipe.checkpoint.mtbf.seconds, recipe.parallel.local_sgd or 1),
            session.ranks,
            self._tell,
            goes_on=recipe.checkpoint.on_error == "continue",
            on_processor=session.device.type == "cpu",
            timeout_s=timeout_s,
            check=run.check_there,
        )
        self.run = run
        self.identity = identity(session.recipe, len(session.data.train), len(session.data.test))
        self.progress = RunProgress()  # what is kept over a stop
        self.window = MetricsWindow()
        self.done = 0  # weight updates
        self.finished = False  # nothing was left to do when the run was gone on with: it stays as it is
        self.evaluation: Evaluation | None = None  # the latest one
        self.comparison: Comparison | None = None  # of prediction and measurement, once enough has been seen
        auto = session.recipe.parallel.shares == "auto" and session.ranks.num_sample_ranks > 1
        self._speed = SpeedTest() if auto else None
        self._observation = Observation(session)
        self._skipped_in_a_row = 0
        self._extends = False

    def resume(self) -> None:
        """Go back to the newest checkpoint that is whole; without any, begin at the beginning, or with another run. A
        ConvoyError where there are checkpoints, but none of them can be used.
        """
        current.to("reading")
        checkpoint, refused = load_latest(self.store, self.identity, self.session.ranks)
        for sentence in refused:
            self._tell(f"{sentence}; the one before it was used")
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
            self._tell(sentence)

    def _take(self, checkpoint: Checkpoint) -> None:
        was, now = checkpoint.values["loop"].get("code"), self.session.code
        changed = self.session.ranks.first(lambda: difference(was, now) if was is not None else "")
        if changed and not self._accepts:
            raise OtherCodeError(
                f"the network's code is another than at update {checkpoint.step:,} ({changed}): put it back, or go on "
                "with the new code by --accept-code-change"
            )
        if changed:
            self._tell(f"from update {checkpoint.step + 1:,} on with other code: {changed}")
        values = self.session.state.unpack(checkpoint)
        self.progress, self.window = RunProgress(**values["progress"]), MetricsWindow(**values["window"])
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
            writer = MetricsWriter(self.run.metrics, self.run.tensorboard, self.done, self._tell, self.run.check_there)
        with (
            Interrupt(HANDED_ON if self.handed_on else SIGNALS, self._stopping) as interrupt,
            writer as metrics,
            self.saver.open(self.run.plan),
        ):
            self._log = Log(self.session, self.progress, metrics, self.reporter, self._tell)
            total = self.session.quantities.total_updates
            self.reporter.begin(self.done, total)
            self.window.started = time.perf_counter()
            self._stop = Stop(self.session.ranks, interrupt)
            self._line_at = self._next_line()
            try:
                if self._extends:  # from now on the other run is not needed
                    self._save()
                self._do_updates(total)
            finally:
                self.reporter.end()
            self._conclude()
            if self._stop.signal is None:
                self._evaluate()
            self._save()
            self._finish_saving(or_raise=self._stop.signal is not None)
            self._diagnose(at_end=True)
        return self._stop.signal

    def _do_updates(self, total: int) -> None:
        """Do the updates that are left, with all that is due in between, or as many as there is time for."""
        if self.progress.to_evaluate and self.done < total:
            self.window.pause()
            self._evaluate()
            self.window.go_on()
        while self.done < total and self._stop.signal is None:
            with closing(self._updates()) as updates:
                for _ in updates:
                    if self._stop.after_update():
                        self._observation.look()
                        return

    def _updates(self) -> Generator[None, None, None]:
        """Do one update after the other; yields after each, when everything that is due after it has been done.

        Ends before the last one where the batches are to be divided otherwise from then on.
        """
        step = self.session.step()
        step.timed = self._speed is not None
        if step.recorded is not None:
            step.recorded.tell = self._tell
        averaged = self.session.state.averaged
        self.session.model.train()
        left = self.session.quantities.total_updates - self.done
        with closing(self.session.batches(self.done, left, self._more_workers)) as batches:
            self._ask()
            for batch in batches:
                self.window.wait_s += self._observation.got()
                self.window.bad += [(self.done, sample, reason) for sample, reason in batch.bad]
                with self._observation.update(step):
                    step.records = self._observation.has_watched
                    result = step(batch, self.done)
                    if result.bad is not None:
                        self._skipped(result.bad)
                    else:
                        self._skipped_in_a_row = 0
                        if averaged is not None:
                            averaged.update(self.session.model)
                self.done += 1
                self._observation.add(result)
                self.window.add(result, step.num_samples)
                self._after_update()
                yield
                self.window.go_on()
                if self._speed is not None:
                    self._speed.add(result.seconds)
                    if self._speed.done:
                        self._divide_anew(self._speed)
                        return
                self._ask()

    def _stopping(self, name: str) -> None:
        self.reporter.say(f"{name}: finishing this update, then saving; again to stop now, without saving")

    def _skipped(self, bad: NonFiniteUpdate) -> None:
        """Count an update that was not made; a ConvoyError after too many in a row."""
        self.progress.left_out += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == GIVE_UP:
            raise ConvoyError(f"{bad}: the {GIVE_UP}th in a row to be left out: {ADVICE}")
        number = self.progress.left_out
        if number <= TOLD:
            self._tell(f"{bad}: left out, with {number} so far{'; others are only counted' if number == TOLD else ''}")

    def _ask(self) -> None:
        """The next batch is asked for."""
        current.update = self.done
        current.to("data")
        self._observation.ask(counts=self._speed is None)

    def _conclude(self) -> None:
        """Say what was seen of the first updates, and keep it. All ranks call it."""
        if self.comparison is not None:
            return
        session = self.session
        self.comparison = self._observation.conclude(session.scored, session.profiles, self.run.trace)
        session.scored = None
        if session.ranks.rank == 0 and (self.comparison.timed or not self.run.prediction.exists()):
            try:
                write_json(self.run.prediction, self.comparison.to_document())
            except OSError as error:
                self._tell(f"{self.run.prediction} could not be written ({error.strerror})")

    def _diagnose(self, at_end: bool = False) -> None:
        """See what holds the run back, keep it, and say it once if that is much. All ranks call it."""
        if self.comparison is None or self._observation.num < LEAST:
            return
        facts = self._with_pauses(self._observation.facts(self.comparison, since=LEAST // 2))
        if self.session.ranks.rank > 0:
            return
        try:
            counted = min(self._observation.num, UPDATES) - LEAST // 2
            diagnosis = Diagnosis.of(facts, (self.done - counted + 1, self.done))
        except Exception as error:  # no reason to stop a training
            self._tell(f"what holds the run back is not known ({type(error).__name__}: {error})")
            return
        with suppress(OSError):  # neither is a full disk
            write_json(self.run.diagnosis, diagnosis.to_document())
        if not at_end and diagnosis.advice and diagnosis.advice[0].gain > WORTH_SAYING:
            self._tell(f"{diagnosis.brief} convoy doctor {self.run.path} looks closer")

    def _with_pauses(self, facts: Facts) -> Facts:
        """With what evaluations and checkpoints have taken."""
        tally, evaluation = self.saver.tally, self.evaluation
        if evaluation is not None:
            facts = replace(facts, evaluation_s=evaluation.seconds)
        return replace(facts, checkpoint_s=tally.waited_s / tally.written) if tally.written else facts

    def _after_update(self) -> None:
        """What is due now: a line of metrics, an evaluation, a checkpoint."""
        quantities = self.session.quantities
        total = quantities.total_updates
        if self.done == self._line_at:
            self._end_window()
            self._line_at = self._next_line()
        else:
            self._log.show(self.done)
        self.window.pause()
        if self._observation.done:
            self._conclude()
        if self._observation.num % UPDATES == 0 or self.done == total:
            self._observation.look()
        if self._observation.num == UPDATES:
            self._diagnose()
        if self.done % quantities.evaluate_every == 0 and self.done < total:
            self._evaluate()
        if self.saver.due(self.done) and self.done < total:
            self._save()

    def _next_line(self) -> int:
        """The update after which the next line of metrics comes; 0 after the last."""
        quantities = self.session.quantities
        return next(filter(quantities.logged, range(self.done + 1, quantities.total_updates + 1)), 0)

    def _divide_anew(self, speed: SpeedTest) -> None:
        """Give every rank microbatches by its speed."""
        session = self.session
        session.division, times = speed.shares(session.ranks, session.division)
        self._speed = None
        session.notes.append(
            f"shares {text(session.division.counts)} of {len(session.division.sizes)} microbatches from update "
            f"{self.done:,} on, by measured times of {', '.join(f'{ms:.3g}' for ms in times)} ms a microbatch"
        )
        self.reporter.say(session.notes[-1])

    def _more_workers(self, number: int) -> None:
        self._observation.workers = number
        self._tell(f"data workers: {number} from update {self.done + 1:,} on, as batches were waited for")

    def _tell(self, sentence: str) -> None:
        """Say something that stays with the run; of what is decided again and again, the last word alone stays."""
        notes = self.session.notes
        for subject in _DECIDED_ANEW:
            if sentence.startswith(subject):
                notes[:] = [note for note in notes if not note.startswith(subject)]
        notes.append(sentence)
        self.reporter.say(sentence)

    def _collect(self) -> None:
        """Add up what the ranks have; the loss becomes the same number on all of them."""
        data = self.session.data
        for _, sample, reason in self.window.collect(self.session.ranks):
            self.progress.add_bad(data.train.name(sample), reason, "train")

    def _end_window(self) -> None:
        """Write the line of the updates since the last one."""
        self._collect()
        window, self.window = self.window, MetricsWindow()
        if window.num_updates:
            self._check_loss(window.averages()["loss"])
        self._log.train(self.done, window)

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
            result = self.evaluation = self.session.evaluate(self._stop.asking())
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
        self._collect()
        window = self.window.pack()
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
