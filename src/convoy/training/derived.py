"""What follows from a recipe and the size of the data, each with its formula and where the formula comes from."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.recipe.optim import REFERENCE_BATCH, Schedule, StepConfig, create_schedule, learning_rate
from convoy.recipe.recipe import Recipe
from convoy.recipe.schema import Duration
from convoy.resources import own_cores
from convoy.run.records import Derived
from convoy.units import plural

# With `log_every=auto` a line of metrics comes every 20 updates; of a run that would then have fewer than 50 lines, so
# often that it has 50. More often than that is not needed: what lines cost is bounded for every run.
LOG_UPDATES, LOG_LINES = 20, 50
_DROPPED = 10  # samples that the last batch lacks are mentioned where they are more than a tenth of an epoch
_GOYAL = "Goyal et al., 2017"


@dataclass(frozen=True)
class Quantities:
    """The numbers that the loop runs by."""

    updates_per_epoch: int
    total_updates: int
    sizes: tuple[int, ...]  # samples of each microbatch of a global batch
    lr: float
    schedule: Schedule
    evaluate_every: int  # in updates, as the two that follow
    checkpoint_every: int | None  # None: measured
    log_every: int
    average_from: int = 0  # the first update after which local SGD may average weights
    group_ends: tuple[int, ...] = ()  # updates from which on those of optimizer.groups are not trained any more

    def updates(self, duration: Duration) -> int:
        """A length or point of the run in weight updates, at least one."""
        return max(1, duration.updates(self.updates_per_epoch, self.total_updates))

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
    return recipe.threads or (1 if recipe.reproducible else len(own_cores()))


def resolve(recipe: Recipe, num_train_samples: int) -> Quantities:
    """The numbers that the loop runs by; a ConvoyError where the batch is larger than the data, or the schedule does
    not fit into the run.
    """
    updates_per_epoch = num_train_samples // recipe.batch
    check_batch(recipe.batch, num_train_samples, "training sample")
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

    often = max(1, min(LOG_UPDATES, total // LOG_LINES))
    if recipe.lookahead is not None and recipe.lookahead.every > total:
        raise ConvoyError(
            f"lookahead.every={recipe.lookahead.every} is more than the run's {total} weight updates, so its first "
            "weights would be delivered: lower it or train longer"
        )
    averaging, evaluate_every = recipe.parallel.averaging, updates(recipe.evaluate_every)
    if averaging.staleness:  # a line is a meeting of all ranks, as an evaluation is
        often = evaluate_every
    start = averaging.start
    if start == "decay":
        rates = [schedule.lr(update) for update in range(total)]
        peak = max(rates)
        average_from = next((u for u in range(rates.index(peak), total) if rates[u] <= peak / 2), total)
    else:
        average_from = start.updates(updates_per_epoch, total)
    save_every = recipe.checkpoint.every
    return Quantities(
        updates_per_epoch=updates_per_epoch,
        total_updates=total,
        sizes=microbatch_sizes(recipe.batch, num_microbatches(recipe)),
        lr=lr,
        schedule=schedule,
        evaluate_every=evaluate_every,
        checkpoint_every=None if save_every == "auto" else updates(save_every),
        log_every=updates(recipe.log_every) if recipe.log_every != "auto" else often,
        average_from=average_from,
        group_ends=tuple(updates(g.until) if g.until is not None else total for g in recipe.optimizer.groups),
    )


def check_batch(batch: int, most: int, what: str) -> None:
    """Refuse a batch of more samples than there are."""
    if batch > most:
        raise ConvoyError(f"the batch of {batch} is larger than the {plural(most, what)}: lower --batch to {most}")


def fitting_batch(recipe: Recipe, num_samples: int, explicit_keys: Collection[str]) -> Recipe:
    """The recipe; where nobody has said a batch, and the default has more samples than there are, with the largest
    power of two that they make."""
    batch, default = 1 << num_samples.bit_length() >> 1, Recipe.model_fields["batch"].default
    least = max(recipe.microbatches or 1, recipe.data.repeats)
    is_set = "batch" in explicit_keys or recipe.batch != default
    return recipe if is_set or not least <= batch < default else recipe.model_copy(update={"batch": batch})


def left_out_of_epochs(batch: int, num_train_samples: int) -> list[str]:
    """A sentence where more than a tenth of the samples has no place in an epoch of whole batches."""
    num, most = num_train_samples, num_train_samples // _DROPPED
    if num % batch <= most:
        return []
    better = next(size for size in range(batch, 0, -1) if num % size <= most)
    return [
        f"{num % batch:,} of the {num:,} training images are left out of every epoch, others each time, as a batch has "
        f"{batch:,}: --batch {better} leaves out {num % better:,}"
    ]


def derive(
    recipe: Recipe, q: Quantities, num_train_samples: int, *, samples: Sequence[int], workers: tuple[int, str]
) -> Iterator[Derived]:
    """The derived quantities of a run, in the order in which they follow from each other; microbatches may be smaller
    than the recipe says.

    `samples` are those of each part of a global batch, `workers` the processes that load data, and why
    (`convoy.data.loader.num_workers`).
    """
    batch, epochs, number = recipe.batch, recipe.epochs, len(q.sizes)
    per_epoch = f"⌊{num_train_samples} samples / batch {batch}⌋"
    incomplete = "the last incomplete batch of an epoch is left out, so every update has the same batch"
    yield Derived("weight updates per epoch", q.updates_per_epoch, per_epoch, incomplete)
    length = f"{epochs} as said" if epochs.unit == "ba" else f"{epochs.value:g} epochs · {q.updates_per_epoch}"
    yield Derived("weight updates", q.total_updates, length, "the recipe's epochs")
    cut = f"⌈batch {batch} / microbatch {recipe.microbatch}⌉" if recipe.microbatch else f"{number} as said"
    if number > num_microbatches(recipe):
        cut = f"one for each of {number} parts, more than {cut}"
    yield Derived("microbatches", number, cut, f"virtual nodes of VirtualFlow; {_GOYAL}, section 3")
    yield Derived("samples per microbatch", _counts(q.sizes), f"{batch} / {number}, as even as can be", "Convoy")
    parts = f"batch {batch} / {len(samples)} part{'s' if len(samples) > 1 else ''}"
    of_all = "the batch is that of all devices together; the plan divides it into so many parts"
    yield Derived("samples per device", _counts(samples), parts, of_all)
    yield Derived("peak learning rate", q.lr, *_rate(recipe))
    if q.schedule.warmup:
        rise = f"{recipe.schedule.warmup}, learning rate {q.schedule.start:g} to {q.lr:g} in a line"
        source = f"gradual warm-up: {_GOYAL}, section 2.2"
        yield Derived("weight updates of warm-up", q.schedule.warmup, rise, source)
    if isinstance(recipe.schedule, StepConfig):
        places = q.schedule.milestones, recipe.schedule.milestones
        drops, written = (", ".join(map(str, milestones)) for milestones in places)
        yield Derived("learning rate drops at updates", drops, f"{written}, in weight updates", "the recipe")
    if recipe.ema is not None:
        decay, age = recipe.ema.decay, "mean age of an exponential average"
        yield Derived("updates in the averaged weights", round(1 / (1 - decay)), f"1 / (1 - {decay:g})", age)
    every = f"{recipe.evaluate_every} in weight updates"
    yield Derived("evaluation every", q.evaluate_every, every, "the recipe")
    if q.checkpoint_every is None:
        young = f"sqrt(2 · cost · {recipe.checkpoint.mtbf}) when the cost is known"
        yield Derived("checkpoint every", "auto", young, "Young 1974")
    else:
        every = f"{recipe.checkpoint.every} in weight updates"
        yield Derived("checkpoint every", q.checkpoint_every, every, "the recipe")
    why = "cores that this process may use", "the machine"
    if recipe.threads is not None:
        why = "as said", "the recipe"
    elif recipe.reproducible:
        why = "1 because of reproducible", "the order of sums depends on the threads"
    yield Derived("threads", num_threads(recipe), *why)
    yield Derived("data workers", *workers, "one core each at most: docs/data.md")


def _counts(sizes: Sequence[int]) -> int | str:
    """`32`, or `3 of 43, 1 of 42` where they differ."""
    if len(set(sizes)) == 1:
        return sizes[0]
    return ", ".join(f"{sizes.count(size)} of {size}" for size in sorted(set(sizes), reverse=True))


def _rate(recipe: Recipe) -> tuple[str, str]:
    optimizer, ratio = recipe.optimizer, f"{recipe.batch} / {REFERENCE_BATCH}"
    if optimizer.lr is not None:
        return "optimizer.lr as said", "the recipe; not scaled by the batch"
    if optimizer.scaling == "linear":
        return f"{optimizer.base_lr:g} · {ratio}", f"linear scaling: {_GOYAL}, section 2.1"
    return f"{optimizer.base_lr:g} · √({ratio})", f"square-root scaling: timm, for {optimizer.name}"
