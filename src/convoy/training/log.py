"""What is written and said of a run while it goes on: lines of metrics, the latest figures, ranks that are slow."""

import time
from collections.abc import Callable

from convoy.training.evaluate import Evaluation
from convoy.training.progress import Reporter
from convoy.training.ranks.slow import SlowRanks
from convoy.training.session import Session
from convoy.training.storage.metrics import MetricsWriter
from convoy.training.summary import Progress
from convoy.training.window import Window

SHOW_EVERY_S = 0.2


class Log:
    """All ranks make it; rank 0 writes, and says things.

    Args:
        session: that is trained.
        progress: what is kept over a stop; the time goes on from there, and is added to.
        metrics: takes the lines.
        reporter: whom to tell how it goes.
        tell: takes a sentence that stays with the run.
    """

    def __init__(
        self,
        session: Session,
        progress: Progress,
        metrics: MetricsWriter,
        reporter: Reporter,
        tell: Callable[[str], None],
    ) -> None:
        self._clock = time.perf_counter() - progress.time_s
        self._session = session
        self._progress = progress
        self._metrics = metrics
        self._reporter = reporter
        self._tell = tell
        self._slow = SlowRanks(session.devices)
        self._shown = 0.0

    def time(self) -> float:
        """Seconds since the run began, stops apart; the progress has them then."""
        self._progress.time_s = time.perf_counter() - self._clock
        return self._progress.time_s

    def show(self, done: int) -> None:
        """So many updates are done: say so now and then."""
        if time.perf_counter() - self._shown > SHOW_EVERY_S:
            self._shown = time.perf_counter()
            self._reporter.advance(done)

    def train(self, done: int, window: Window) -> None:
        """A line on the updates of a window, as collected."""
        seconds, values, progress = window.seconds, window.averages(), self._progress
        left_out = {"left_out": window.left_out} if window.left_out else {}
        progress.train_s += seconds
        progress.data_wait_s += window.data_wait_s
        progress.num_images += window.num_images
        rate = self._session.quantities.schedule.lr(done - 1)
        self._metrics.write("train", done, self._epoch(done), self.time(), **values, **left_out, lr=rate)
        on_cpu = self._session.device.type == "cpu"
        slow = self._slow.look(window.ranks_s if on_cpu else (), window.num_updates, seconds, self._session.division)
        if slow is not None:
            self._tell(slow)
        self._shown = time.perf_counter()
        if done == 1:  # which takes longer than all that follow: its speed says nothing
            self._reporter.advance(done)
            return
        wait = window.data_wait_s / max(seconds, 1e-9)
        self._reporter.advance(
            done,
            f"{self._place(done, '.2f')}  loss {values['loss']:.3f}  top-1 {values['top1']:.1%}  "
            f"{values['images_per_s']:,.0f} images/s  data wait {wait:.0%}",
        )

    def test(self, done: int, result: Evaluation) -> None:
        """A line on an evaluation."""
        self._metrics.write(
            "test",
            done,
            self._epoch(done),
            self.time(),
            loss=result.loss,
            top1=result.top1,
            top5=result.top5,
            images=result.num_images,
            images_per_s=result.num_images / max(result.seconds, 1e-9),
        )
        total = self._session.quantities.total_updates
        end = f"{total:,}" if self._counts_updates else _number(self._epoch(total))
        self._reporter.say(
            f"{self._place(done)} of {end}: test top-1 {result.top1:.2%}, "
            f"loss {result.loss:.4f} over {result.num_images:,} images"
        )

    @property
    def _counts_updates(self) -> bool:
        """Whether the length of the run was given in updates."""
        return self._session.recipe.epochs.unit == "ba"

    def _place(self, done: int, form: str = "") -> str:
        """Where the run is, in the unit of its length; epochs with three digits, or in another form."""
        if self._counts_updates:
            return f"update {done:,}"
        epoch = self._epoch(done)
        return f"epoch {format(epoch, form) if form else _number(epoch)}"

    def _epoch(self, done: int) -> float:
        return done / self._session.quantities.updates_per_epoch


def _number(epochs: float) -> str:
    """With three digits, or as many as the whole number has."""
    return f"{epochs:.3g}" if epochs < 100 else f"{epochs:,.0f}"
