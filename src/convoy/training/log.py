"""What is written and said of a run while it goes on: `metrics.jsonl`, the latest figures, ranks that are slow; and how
it stands, in `summary.json`.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from convoy.data.dataset import DataSet
from convoy.files import to_json, write_json, writing
from convoy.progress import Reporter
from convoy.recipe.schema import in_words
from convoy.run.directory import RunDirectory
from convoy.run.records import RunProgress, RunSummary, SkippedImage, Status
from convoy.tasks.metric import metric_in_words
from convoy.tasks.task import Evaluation
from convoy.terminal import losses
from convoy.training.gradients import noise_scale
from convoy.training.session import Session
from convoy.training.step import Update
from convoy.training.watchdog import SlowRanks


class MetricsWriter:
    """Appends lines to the metrics of a run, each at once on disk's side of the process.

    A line that cannot be written, because the disk is full, does not end the run: it is kept, and written with a later
    one. That is said once, and again when all is written. `check` refuses a line after so many updates where the run
    directory has gone, which open files do not notice.
    """

    def __init__(self, path: Path, tell: Callable[[str], None], check: Callable[[int], None]) -> None:
        self._path, self._tell, self._check = path, tell, check
        with writing(path, "free what is in its way"):
            self._file = path.open("ab", buffering=0)
        self._kept = b""  # what waits for room
        self._failed = False

    def write(self, split: str, step: int, epoch: float, time_s: float, /, **values: float | int | None) -> None:
        self._check(step)
        line = {"split": split, "step": step, "epoch": round(epoch, 6), "time_s": round(time_s, 4), **values}
        self._kept += f"{to_json(line)}\n".encode()
        reason = self._flush()
        if reason is not None and not self._failed:
            self._tell(f"{self._path} cannot be written ({reason}): the metrics are kept until it can")
        elif reason is None and self._failed:
            self._tell("the metrics are written again, those that were kept too")
        self._failed = reason is not None

    def _flush(self) -> str | None:
        """Write what is kept, or say why not."""
        try:
            while self._kept:
                self._kept = self._kept[self._file.write(self._kept) :]
        except OSError as error:
            return str(error.strerror)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ending: object) -> None:
        reason = self._flush()
        self._file.close()
        if reason is not None:
            self._tell(f"the last metrics could not be written to {self._path} ({reason})")


SHOW_EVERY_S = 0.2  # so often it is said how many updates are done


@dataclass
class Sums:
    """Of the updates since the last line of metrics, over all ranks, the same on each; a checkpoint keeps them."""

    num_updates: int = 0
    num_images: int = 0
    score: float = 0.0  # the task's, summed over the images
    loss: float = 0.0
    data_wait_s: float = 0.0  # of the rank that waited longest
    before_s: float = 0.0  # of work on this rank before now: updates, and what it takes to collect them
    left_out: int = 0  # updates not made, as loss or gradient were not finite

    @property
    def mean_loss(self) -> float:
        return self.loss / self.num_updates if self.num_updates else math.nan

    @property
    def mean_score(self) -> float:
        return self.score / self.num_images if self.num_images else math.nan


class Log:
    """Collects records of updates, and writes a line of them. All ranks make it; rank 0 writes, and says things.
    `progress` and `sums` are kept over a stop, and added to; `metrics` takes the lines (None on ranks other than 0),
    `tell` a sentence that stays with the run.
    """

    def __init__(
        self,
        session: Session,
        progress: RunProgress,
        sums: Sums,
        metrics: MetricsWriter | None,
        reporter: Reporter,
        tell: Callable[[str], None],
    ) -> None:
        self._clock = time.perf_counter() - progress.time_s
        self._session, self._progress = session, progress
        self.sums = sums
        self.updates: list[Update] = []  # that are to be collected
        # Since the last line every rank's own work, without waits for the others, and all of the slowest one's updates.
        self._ranks_s, self._slowest_s = [0.0] * session.ranks.num, 0.0
        self._metrics, self._reporter, self._tell = metrics, reporter, tell
        self._slow = SlowRanks(session.ranks)
        self.shown = 0.0

    def time(self) -> float:
        """Seconds since the run began, stops apart; the progress has them then."""
        self._progress.time_s = time.perf_counter() - self._clock
        return self._progress.time_s

    def show(self, done: int, text: str | None = None) -> None:
        """So many updates are done; `text` has the newest figures."""
        self.shown = time.perf_counter()
        self._reporter.advance(done, text)

    def collect(self) -> None:
        """Add up what the ranks have since the last time: one after the other and in double precision, so that neither
        a stop in between nor the number of devices changes anything. Only for a line or a checkpoint the device is
        read, and the other ranks are asked. All ranks call it.
        """
        began, sums, ranks = time.perf_counter(), self.sums, self._session.ranks
        updates, self.updates = self.updates, []
        finite_updates = [update for update in updates if update.bad is None]
        sums.num_updates += len(finite_updates)
        sums.left_out += len(updates) - len(finite_updates)
        sums.num_images += sum(update.images for update in finite_updates)
        losses_of_updates = _read([update.losses for update in finite_updates])
        scores_of_updates = _read([update.scores for update in finite_updates])
        wait_s, own_s = sum(update.wait_s for update in updates), sum(update.own_s for update in updates)
        pictures = [picture for update in updates for picture in update.unreadable]
        update_s = sum(update.seconds for update in updates)
        everyone = ranks.gather((losses_of_updates, scores_of_updates, wait_s, pictures, own_s + wait_s, update_s))
        parts = ranks.of_parts(everyone)
        for loss in _in_order([part[0] for part in parts]):
            sums.loss += loss
        for score in _in_order([part[1] for part in parts]):
            sums.score += score
        self._ranks_s = [seconds + rank[4] for seconds, rank in zip(self._ranks_s, everyone, strict=True)]
        self._slowest_s += max(rank[5] for rank in everyone)
        sums.data_wait_s += max(part[2] for part in parts)
        sums.before_s += update_s + time.perf_counter() - began
        train = self._session.data.train
        for _, sample, reason in sorted((bad for part in parts for bad in part[3]), key=lambda picture: picture[0]):
            self._progress.add_bad(train.name(sample), reason, "train")

    def train(self, done: int) -> None:
        """A line on the updates since the last one, as collected."""
        sums, self.sums = self.sums, Sums()
        ranks_s, self._ranks_s = self._ranks_s, [0.0] * len(self._ranks_s)
        slowest_s, self._slowest_s = self._slowest_s, 0.0
        seconds, progress, session = sums.before_s, self._progress, self._session
        left_out = {"left_out": sums.left_out} if sums.left_out else {}
        progress.train_s += seconds
        if done == 1:  # in which the processes that load data start
            progress.start_s += seconds
            if seconds > 5:  # far longer than others
                self._tell(
                    f"the first update took {in_words(seconds)}, {in_words(sums.data_wait_s)} of it for its data"
                )
        else:
            progress.data_wait_s += sums.data_wait_s
        progress.num_images += sums.num_images
        loss, score_name = sums.mean_loss, session.task.score_name
        score = {} if score_name is None else {score_name: sums.mean_score}
        speed, rate = sums.num_images / max(seconds, 1e-9), session.quantities.schedule.lr(done - 1)
        numbers = {"loss": loss, **score, "images_per_s": speed, "data_wait_s": sums.data_wait_s}
        noise = {"noise_scale": noise_scale(progress.noise), **progress.noise} if progress.noise else {}
        self._write("train", done, **numbers, **left_out, lr=rate, **noise)
        if session.device.type == "cpu":
            slow = self._slow.look(ranks_s, sums.num_updates, slowest_s, session.division)
            if slow is not None:
                self._tell(slow)
        wait = sums.data_wait_s / max(seconds, 1e-9)
        scores = "".join(f"{metric_in_words(name, value, 1)}  " for name, value in score.items())
        line = f"loss {loss:.3f}  {scores}{speed:,.0f} images/s  data wait {wait:.0%}"
        # The first update takes longer than all that follow: its speed says nothing.
        self.show(done, None if done == 1 else f"{self._place(done, '.2f')}  {line}")

    def evaluation(self, done: int, result: Evaluation, data: DataSet) -> None:
        """A line on an evaluation, of the split that data are evaluated on."""
        for sample, reason in result.bad:
            self._progress.add_bad(data.test.name(sample), reason, data.split)
        speed = result.num_images / max(result.seconds, 1e-9)
        metrics, best = result.metrics(), self._session.metric.name
        self._write(data.split, done, **metrics, images=result.num_images, images_per_s=speed)
        end = self._place(self._session.quantities.total_updates).partition(" ")[2]
        self._reporter.say(
            f"{self._place(done)} of {end}: {data.split} {metric_in_words(best, metrics.get(best, math.nan))}, "
            f"loss {result.loss:.4f} over {result.num_images:,} images"
        )

    def _write(self, split: str, done: int, /, **values: float | int | None) -> None:
        time_s = self.time()
        if self._metrics is not None:
            self._metrics.write(split, done, self._epoch(done), time_s, **values)

    def _place(self, done: int, form: str = "") -> str:
        """Where the run is, in the unit of its length; epochs with three digits, or in another form."""
        if self._session.recipe.epochs.unit == "ba":
            return f"update {done:,}"
        epoch = self._epoch(done)
        return f"epoch {format(epoch, form or ('.3g' if epoch < 100 else ',.0f'))}"

    def _epoch(self, done: int) -> float:
        return done / self._session.quantities.updates_per_epoch


def _read(of_updates: list[list[Tensor]]) -> list[list[float]]:
    """Scalars of some updates, at once."""
    scalars = list(itertools.chain.from_iterable(of_updates))
    values = iter(torch.stack(scalars).tolist() if scalars else [])
    return [[next(values) for _ in of_update] for of_update in of_updates]


def _in_order(parts: list[list[list[float]]]) -> Iterator[float]:
    """What each part of the batch has of each update: update for update."""
    for of_update in zip(*parts, strict=True):
        yield from itertools.chain.from_iterable(of_update)


def write_summary(
    run: RunDirectory,
    session: Session,
    progress: RunProgress,
    status: Status,
    steps: int,
    evaluation: Evaluation | None,
    error: str | None = None,
) -> None:
    """Write `summary.json` after `steps` updates; `evaluation` is the latest one, if any, `error` why it failed."""
    run.check_there(steps)
    recipe, data, counts, quantities = session.recipe, session.data, session.counts, session.quantities
    best, split = session.metric.name, data.at_end().split if status == "finished" else data.split
    before = run.summary()  # from which a run that goes on has its metrics until it is evaluated
    is_known = before.get("split") == split and before.get("steps", math.inf) <= steps
    metrics: dict[str, float | None] = before.get("metrics") or {} if is_known else {}
    metrics = metrics if evaluation is None else {**evaluation.metrics()}
    of_evaluation: dict[str, Any] = {name: metrics.get(name) for name in ("top1", "top5", "loss")}
    of_progress = ("best", "best_step", "time_s", "train_s", "start_s", "checkpoints", "left_out")
    waiting_s = progress.train_s - progress.start_s  # in which batches may have been waited for
    summary = RunSummary.model_construct(  # nothing in it may end a run
        status=status,
        error=error,
        model=recipe.model.name,
        data=data.name,
        devices=session.ranks.num,
        plan=str(session.plan),
        approximate=recipe.parallel.approximation(session.plan),
        parameters=counts.parameters,
        flops=counts.flops,
        num_train=len(data.train),
        num_test=len(data.test),
        steps=steps,
        total_steps=quantities.total_updates,
        target=recipe.target,
        noise_scale=noise_scale(progress.noise),
        reached=None if recipe.target is None else progress.reached,
        epochs=steps / quantities.updates_per_epoch,
        **of_evaluation,
        metrics=metrics,
        split=split,
        best_metric=best,
        best_top1=progress.best if best == "top1" else None,
        **{name: getattr(progress, name) for name in of_progress},
        images_per_s=progress.num_images / progress.train_s if progress.train_s else None,
        later_images_per_s=max(0, progress.num_images - recipe.batch) / waiting_s if waiting_s > 0 else None,
        data_wait_share=progress.data_wait_s / waiting_s if waiting_s > 0 else 0.0,
        bad_images=[SkippedImage(**entry) for entry in progress.bad_images],
        derived=session.derived,
        stages=session.stages,
        notes=[*session.notes, *losses()],
    )
    write_json(run.summary_file, summary.model_dump())
