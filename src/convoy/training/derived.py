"""What follows from a recipe and the size of the data, each with its formula and where the formula comes from."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.training.config import Duration
from convoy.training.environment import num_cores
from convoy.training.optimizers import REFERENCE_BATCH, learning_rate
from convoy.training.recipe import Recipe
from convoy.training.schedules import Schedule, StepConfig, create_schedule

LOG_UPDATES, LOG_LINES = 20, 50
"""With `log_every=auto` a line of metrics comes every 20 updates; of a run that would then have fewer than 50 lines, so
often that it has 50. More often than that is not needed: what lines cost is bounded for every run."""
_GOYAL = "Goyal et al., 2017"


@dataclass(frozen=True)
class Derived:
    """One quantity that nobody typed in.

    Attributes:
        formula: how it follows, with the numbers put in.
        source: the paper or the rule behind the formula.
    """

    name: str
    value: int | float | str
    formula: str
    source: str


@dataclass(frozen=True)
class Quantities:
    """The numbers that the loop runs by.

    Attributes:
        sizes: samples of each microbatch of a global batch.
        evaluate_every, log_every: in weight updates.
        checkpoint_every: the same; None where it is measured.
    """

    updates_per_epoch: int
    total_updates: int
    sizes: tuple[int, ...]
    lr: float
    schedule: Schedule
    evaluate_every: int
    checkpoint_every: int | None
    log_every: int
    threads: int

    def logged(self, done: int) -> bool:
        """Whether a line of metrics comes after so many updates.

        The first update has one, so that the curves begin at their beginning. The last line is never of fewer updates
        than half of what the others are of, whose mean would stand out: the one before it is left out instead.
        """
        left = self.total_updates - done
        return left == 0 or done == 1 or (done % self.log_every == 0 and 2 * left >= self.log_every)


def num_microbatches(recipe: Recipe) -> int:
    """Microbatches of one global batch."""
    if recipe.microbatches is not None:
        return recipe.microbatches
    assert recipe.microbatch is not None
    return -(-recipe.batch // recipe.microbatch)


def num_threads(recipe: Recipe) -> int:
    """Threads of a process on CPU: as the recipe says, else one if reproducible and all cores if not."""
    return recipe.threads or (1 if recipe.reproducible else num_cores())


def resolve(recipe: Recipe, num_train_samples: int) -> Quantities:
    """The numbers that the loop runs by.

    Raises:
        ConvoyError: the batch is larger than the data, or the schedule does not fit into the run.
    """
    updates_per_epoch = num_train_samples // recipe.batch
    if updates_per_epoch == 0:
        raise ConvoyError(
            f"the batch of {recipe.batch} is larger than the {num_train_samples} training samples: lower --batch"
        )
    total = recipe.epochs.updates(updates_per_epoch)
    lr = learning_rate(recipe.optimizer, recipe.batch)
    schedule = create_schedule(
        recipe.schedule,
        lr=lr,
        base_lr=recipe.optimizer.base_lr,
        total_updates=total,
        updates_per_epoch=updates_per_epoch,
    )

    def updates(duration: Duration) -> int:
        return max(1, duration.updates(updates_per_epoch, total))

    save_every = recipe.checkpoint.every
    return Quantities(
        updates_per_epoch=updates_per_epoch,
        total_updates=total,
        sizes=microbatch_sizes(recipe.batch, num_microbatches(recipe)),
        lr=lr,
        schedule=schedule,
        evaluate_every=updates(recipe.evaluate_every),
        checkpoint_every=None if save_every == "auto" else updates(save_every),
        log_every=_log_every(total) if recipe.log_every == "auto" else updates(recipe.log_every),
        threads=num_threads(recipe),
    )


def derive(
    recipe: Recipe,
    num_train_samples: int,
    *,
    samples: Sequence[int] | None = None,
    workers: tuple[int, str] | None = None,
) -> list[Derived]:
    """The derived quantities of a run, in the order in which they follow from each other.

    Args:
        recipe: what is trained, and how.
        num_train_samples: samples of the training split.
        samples: of each part of a global batch; None where one device computes all of it.
        workers: processes that load data, and why, if that is known (`convoy.data.num_workers`).

    Raises:
        ConvoyError: see `resolve`.
    """
    q = resolve(recipe, num_train_samples)
    samples = (recipe.batch,) if samples is None else samples
    return [
        Derived(
            "weight updates per epoch",
            q.updates_per_epoch,
            f"⌊{num_train_samples} samples / batch {recipe.batch}⌋",
            "the last incomplete batch of an epoch is left out, so every update has the same batch",
        ),
        Derived("weight updates", q.total_updates, _total(recipe, q.updates_per_epoch), "the recipe's epochs"),
        Derived(
            "microbatches", len(q.sizes), _microbatches(recipe), f"virtual nodes of VirtualFlow; {_GOYAL}, section 3"
        ),
        Derived(
            "samples per microbatch", _counts(q.sizes), f"{recipe.batch} / {len(q.sizes)}, as even as can be", "Convoy"
        ),
        Derived(
            "samples per device",
            _counts(samples),
            f"batch {recipe.batch} / {len(samples)} part{'s' if len(samples) > 1 else ''}",
            "the batch is that of all devices together; the plan divides it into so many parts",
        ),
        _rate(recipe, q.lr),
        *_schedule(recipe, q),
        *_ema(recipe),
        Derived("evaluation every", q.evaluate_every, f"{recipe.evaluate_every} in weight updates", "the recipe"),
        _checkpoints(recipe, q.checkpoint_every),
        _threads(recipe, q.threads),
        *([Derived("data workers", *workers, "one core each")] if workers is not None else []),
    ]


def _log_every(total: int) -> int:
    return max(1, min(LOG_UPDATES, total // LOG_LINES))


def _total(recipe: Recipe, updates_per_epoch: int) -> str:
    if recipe.epochs.unit == "ba":
        return f"{recipe.epochs} as said"
    return f"{recipe.epochs.value:g} epochs · {updates_per_epoch}"


def _microbatches(recipe: Recipe) -> str:
    if recipe.microbatches is not None:
        return f"{recipe.microbatches} as said"
    return f"⌈batch {recipe.batch} / microbatch {recipe.microbatch}⌉"


def _counts(sizes: Sequence[int]) -> int | str:
    """`32`, or `3 of 43, 1 of 42` where they differ."""
    if len(set(sizes)) == 1:
        return sizes[0]
    return ", ".join(f"{sizes.count(size)} of {size}" for size in sorted(set(sizes), reverse=True))


def _rate(recipe: Recipe, lr: float) -> Derived:
    optimizer = recipe.optimizer
    if optimizer.lr is not None:
        return Derived("peak learning rate", lr, "optimizer.lr as said", "the recipe; not scaled by the batch")
    ratio = f"{recipe.batch} / {REFERENCE_BATCH}"
    if optimizer.scaling == "linear":
        return Derived(
            "peak learning rate", lr, f"{optimizer.base_lr:g} · {ratio}", f"linear scaling: {_GOYAL}, section 2.1"
        )
    return Derived(
        "peak learning rate",
        lr,
        f"{optimizer.base_lr:g} · √({ratio})",
        f"square-root scaling: timm, for {optimizer.name}",
    )


def _schedule(recipe: Recipe, q: Quantities) -> list[Derived]:
    rows = []
    if q.schedule.warmup:
        rows.append(
            Derived(
                "weight updates of warm-up",
                q.schedule.warmup,
                f"{recipe.schedule.warmup}, learning rate {q.schedule.start:g} to {q.lr:g} in a line",
                f"gradual warm-up: {_GOYAL}, section 2.2",
            )
        )
    if q.schedule.milestones:
        rows.append(
            Derived(
                "learning rate drops at updates",
                ", ".join(map(str, q.schedule.milestones)),
                f"{_milestones(recipe)}, in weight updates",
                "the recipe",
            )
        )
    return rows


def _milestones(recipe: Recipe) -> str:
    assert isinstance(recipe.schedule, StepConfig)
    return ", ".join(map(str, recipe.schedule.milestones))


def _ema(recipe: Recipe) -> list[Derived]:
    if recipe.ema is None:
        return []
    decay = recipe.ema.decay
    return [
        Derived(
            "updates in the averaged weights",
            round(1 / (1 - decay)),
            f"1 / (1 - {decay:g})",
            "mean age of an exponential average",
        )
    ]


def _checkpoints(recipe: Recipe, every: int | None) -> Derived:
    if every is None:
        return Derived(
            "checkpoint every",
            "auto",
            f"sqrt(2 · cost · {recipe.checkpoint.mtbf}) when the cost is known",
            "Young 1974",
        )
    return Derived("checkpoint every", every, f"{recipe.checkpoint.every} in weight updates", "the recipe")


def _threads(recipe: Recipe, threads: int) -> Derived:
    if recipe.threads is not None:
        return Derived("threads", threads, "as said", "the recipe")
    if recipe.reproducible:
        return Derived("threads", threads, "1 because of reproducible", "the order of sums depends on the threads")
    return Derived("threads", threads, "cores that this process may use", "the machine")
