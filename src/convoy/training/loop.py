"""The training loop: updates, evaluations, checkpoints and metrics, and a clean end whenever it is asked to stop."""

import math
import time
from collections.abc import Generator, Iterator
from contextlib import closing

from convoy.data import Batch, training_batches
from convoy.errors import ConvoyError
from convoy.training.checkpoint import CheckpointStore
from convoy.training.evaluate import Evaluation
from convoy.training.interrupt import Interrupt
from convoy.training.metrics import MetricsWriter
from convoy.training.progress import Reporter
from convoy.training.resume import identity
from convoy.training.run_directory import RunDirectory
from convoy.training.session import Session
from convoy.training.summary import Progress
from convoy.training.window import Window

SHOW_EVERY_S = 0.2


class Loop:
    """Takes a session from wherever it stands to its end, or until a signal asks it to stop.

    Attributes:
        done: weight updates done.
        progress: what is kept over a stop.
        evaluation: the latest evaluation.
    """

    def __init__(self, session: Session, run: RunDirectory, reporter: Reporter) -> None:
        self.session = session
        self.reporter = reporter
        self.store = CheckpointStore(run.checkpoints, session.recipe.checkpoint.keep)
        self.run = run
        self.identity = identity(session.recipe, len(session.data.train), len(session.data.test))
        self.progress = Progress()
        self.window = Window()
        self.done = 0
        self.evaluation: Evaluation | None = None
        self._shown = 0.0
        self._saved: int | None = None

    def resume(self) -> None:
        """Go back to the newest checkpoint that is whole; without any, begin at the beginning.

        Raises:
            ConvoyError: there are checkpoints, but none of them can be used.
        """
        checkpoint, refused = self.store.load_latest(self.identity)
        for sentence in refused:
            self.session.notes.append(f"{sentence}; the one before it was used")
            self.reporter.say(self.session.notes[-1])
        if checkpoint is not None:
            values = self.session.state.unpack(checkpoint)
            self.progress, self.window = Progress(**values["progress"]), Window(**values["window"])
            self.done = self._saved = checkpoint.step
        self.run.forget_metrics_after(self.done, final=self.done == self.session.quantities.total_updates)

    def run_to_end(self) -> str | None:
        """Do the remaining updates and evaluate.

        Returns:
            None at the end of the run, or the name of the signal that stopped it; its state is then saved.
        """
        self._clock = time.perf_counter() - self.progress.time_s
        with (
            Interrupt() as interrupt,
            MetricsWriter(self.run.metrics, self.run.tensorboard, self.done) as self._metrics,
        ):
            self.reporter.begin(self.done, self.session.quantities.total_updates)
            try:
                with closing(self._batches()) as batches:
                    for _ in self._updates(batches):
                        if interrupt.signal is not None:
                            self._save()
                            return interrupt.signal
            finally:
                self.reporter.end()
            self._evaluate()
            self._save()
        return None

    def _batches(self) -> Generator[Batch, None, None]:
        recipe = self.session.recipe
        return training_batches(
            self.session.data,
            recipe.data,
            self.session.order,
            first_update=self.done,
            num_updates=self.session.quantities.total_updates - self.done,
            seed=recipe.seed,
            pin_memory=self.session.device.type == "cuda",
        )

    def _updates(self, batches: Iterator[Batch]) -> Iterator[None]:
        """Do one update after the other; yields after each, when everything that is due after it has been done."""
        quantities = self.session.quantities
        total = quantities.total_updates
        step = self.session.step()
        averaged = self.session.state.averaged
        self.session.model.train()
        asked = self.window.started = time.perf_counter()
        for batch in batches:
            self.window.data_wait_s += time.perf_counter() - asked
            for sample, reason in batch.bad:
                self.progress.add_bad(self.session.data.train.name(sample), reason, "train")
            result = step(batch, self.done)
            if averaged is not None:
                averaged.update_parameters(self.session.model)
            self.done += 1
            self.window.add(result, len(batch.labels))
            if self.done % quantities.log_every == 0 or self.done == total:
                self._log()
            elif time.perf_counter() - self._shown > SHOW_EVERY_S:
                self._shown = time.perf_counter()
                self.reporter.advance(self.done)
            self.window.pause()
            if self.done % quantities.evaluate_every == 0 and self.done < total:
                self._evaluate()
            if self.done % quantities.checkpoint_every == 0 and self.done < total:
                self._save()
            yield
            self.window.go_on()
            asked = time.perf_counter()

    def _log(self) -> None:
        window, self.window = self.window, Window()
        seconds, values = window.seconds, window.averages()
        self._check_loss(values["loss"])
        self.progress.train_s += seconds
        self.progress.data_wait_s += window.data_wait_s
        self.progress.num_images += window.num_images
        rate = self.session.quantities.schedule.lr(self.done - 1)
        self._metrics.write("train", self.done, self._epoch(), self._time(), **values, lr=rate)
        self._shown = time.perf_counter()
        wait = window.data_wait_s / max(seconds, 1e-9)
        self.reporter.advance(
            self.done,
            f"epoch {self._epoch():.2f}  loss {values['loss']:.3f}  top-1 {values['top1']:.1%}  "
            f"{values['images_per_s']:,.0f} images/s  data wait {wait:.0%}",
        )

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            saved = f"the newest checkpoint is of update {self._saved}" if self._saved else "there is no checkpoint yet"
            raise ConvoyError(
                f"the loss became {loss} by update {self.done}: lower optimizer.lr, lengthen schedule.warmup or set "
                f"clip_norm ({saved})"
            )

    def _evaluate(self) -> None:
        result = self.evaluation = self.session.evaluate()
        for sample, reason in result.bad:
            self.progress.add_bad(self.session.data.test.name(sample), reason, "test")
        self._metrics.write(
            "test",
            self.done,
            self._epoch(),
            self._time(),
            loss=result.loss,
            top1=result.top1,
            top5=result.top5,
            images=result.num_images,
            images_per_s=result.num_images / max(result.seconds, 1e-9),
        )
        quantities = self.session.quantities
        epochs = quantities.total_updates / quantities.updates_per_epoch
        self.reporter.say(
            f"epoch {self._epoch():.3g} of {epochs:.3g}: test top-1 {result.top1:.2%}, loss {result.loss:.4f}"
            f" over {result.num_images:,} images"
        )
        if self.progress.best_top1 is None or result.top1 > self.progress.best_top1:
            self.progress.best_top1, self.progress.best_step = result.top1, self.done
            self._save()

    def _save(self) -> None:
        if self._saved == self.done:
            return
        self._time()
        window = self.window.pack()
        self._check_loss(window["loss"])
        values = {"progress": vars(self.progress), "window": window}
        self.store.save(self.session.state.pack(self.done, self.identity, values), self.progress.best_step)
        self._saved = self.done

    def _epoch(self) -> float:
        return self.done / self.session.quantities.updates_per_epoch

    def _time(self) -> float:
        self.progress.time_s = time.perf_counter() - self._clock
        return self.progress.time_s
