"""Sentences beside the tables: devices and work, certainty, cost, distances between curves, and gaps."""

import math
import statistics
from collections.abc import Iterator, Sequence

from convoy import units
from convoy.bench.configuration import parts_of
from convoy.bench.curves import Convergence, ErrorCurve
from convoy.bench.records import CONVOY, StudyFacts
from convoy.bench.results import Results, StudyRow
from convoy.bench.store import Store
from convoy.bench.study import too_coarse
from convoy.bench.table import points

_RESTLESS = 0.25
"""Part of its time by which a configuration, measured again, may differ before nothing follows from a study."""


def remarks(store: Store, found: Results) -> list[str]:
    """Sentences on how the table came to be, the most important first."""
    said = [
        _devices(store),
        *_measuring(store.study, found),
        *_unequal(store.study, found),
        *_predictions(found),
        _over(found),
        _one_device(found),
        _above_ideal(found, store.study.weak),
    ]
    return [sentence for sentence in said if sentence]


def doubts(found: Results) -> list[str]:
    """A warning where the same configuration took very different times, because of a busy machine."""
    spreads = [row.spread / row.seconds for row in found.rows if row.spread is not None]
    if not spreads or statistics.median(spreads) < _RESTLESS:
        return []
    typical = statistics.median(spreads)
    by = f"by {units.percent(typical, 0)}" if typical < 1 else "by more than its own time"
    return [
        "The machine was busy with other work, or too few rounds were measured: the same configuration, measured "
        f"again, may differ {by}. Neither speed-ups nor predictions can be judged by this study: measure again when "
        "nothing else runs, or with more --rounds."
    ]


def missing(found: Results | Convergence) -> list[str]:
    """Sentences on rows that could not be measured or trained, or have not been."""
    done, yet = ("measured", "measured") if isinstance(found, Results) else ("trained", "trained to the end")
    said = [f"{label} was not {done}: {reason.rstrip('.')}." for label, reason in found.failed]
    if found.waiting:
        said.append(f"Not {yet} yet: {', '.join(found.waiting)}; the same command goes on.")
    return said


def _devices(store: Store) -> str:
    study, machine = store.study, store.machine
    if study.cluster:
        speeds = ", ".join(units.significant(speed, 2) for speed in study.speeds)
        return f"The devices are emulated, each with a share of a core of this machine: {speeds}."
    if study.device_type != "cpu":
        return f"A device is a {machine['machine']}."
    each = study.cores_per_device
    largest = max((row.devices for row in store.configurations), default=1)
    left = machine["cores"] - each * largest
    rest = f"; {units.plural(left, 'core')} stay idle" if left else ""
    return (
        f"A device is {units.plural(each, 'core')} of {machine['machine']}, also where it is alone: the machine has "
        f"{machine['cores']}, and {units.plural(largest, 'device')} at most{rest}."
    )


def _measuring(study: StudyFacts, found: Results) -> Iterator[str]:
    """The work, how it was timed, and at what cost."""
    batch = f"{units.count(study.batch)} images {'on each device' if study.weak else 'on all devices together'}"
    recipe, source = study.recipe, study.recipe["data"].get("path")
    if study.images is not None:
        source = f"made-up ones of {'×'.join(map(str, study.images.shape))} in memory"
    size = recipe["microbatch"] or -(-recipe["batch"] // recipe["microbatches"])
    yield f"An update is {batch}, in microbatches of {size} at most; the images are {source}."
    rounds = sorted({row.rounds for row in found.rows})
    if not rounds or rounds[-1] < 2:
        yield "± needs two rounds at least."
    else:
        number = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        yield (
            f"Times are medians over {number} rounds, each in fresh processes and of the slowest rank. ± is what the "
            "same configuration, measured again, differs by at most in 95 of 100 cases (repeatability limit, ISO "
            "5725-6)."
        )
    if found.wall > 0:
        overhead = max((row.overhead / row.seconds for row in found.rows), default=0.0)
        yield (
            f"The measuring took {units.duration(found.wall)}: {units.percent(found.timed / found.wall, 0)} were "
            f"updates that count, {units.percent(found.planning / found.wall, 0)} planning, the rest starting, "
            f"building and warming up. Taking the time of parts makes an update at most {units.percent(overhead, 2)} "
            "longer."
        )
    difference = found.loss_difference
    if difference is not None:
        by = f"differs by {units.significant(difference, 2)} of itself at most" if difference else "is the same number"
        yield f"The first update's loss {by} in all rows of Convoy: they do the same work."


def _unequal(study: StudyFacts, found: Results) -> list[str]:
    """The speed of unequal devices together, beside the sum of their speeds alone."""
    if not found.alone:
        return []
    speeds = found.alone
    rates = ", ".join(units.significant(speed) for speed in speeds)
    rows = [row for row in found.rows if row.kind == CONVOY and row.devices == len(speeds)]
    reached = ", ".join(f"{row.plan_label} {units.percent(row.images_per_s / sum(speeds), 0)}" for row in rows)
    said = [
        f"Alone the devices train {rates} images/s, {units.significant(sum(speeds))} together, which efficiency is "
        f"measured by{f': of that {reached}' if reached else ''}."
    ]
    even = {row.plan: row for row in rows if not row.uneven}
    for row in rows:
        if (
            row.plan in even
            and row is not even[row.plan]
            and even[row.plan].series == row.series.partition(", shares")[0]
        ):
            ratio = even[row.plan].seconds / row.seconds
            parts = f", with {', '.join(map(str, row.microbatches))} microbatches" if any(row.microbatches) else ""
            said.append(f"{row.plan_label} is {ratio:.2f} times as fast as even parts{parts}.")
    rows = [row for row in rows if row.plan is not None and parts_of(row.plan, row.devices) == row.devices]
    num = sum(next((row.microbatches for row in rows), ()))
    coarse = too_coarse(study.batch, num, speeds) if num and any(row.uneven for row in rows) else ""
    return [*said, coarse]


def _predictions(found: Results) -> Iterator[str]:
    """How good they were, and which rows of Convoy have none where others have."""
    errors = [abs(row.error) for row in found.rows if row.error is not None]
    if not errors:
        return
    mean, worst = units.percent(statistics.mean(errors)), units.percent(max(errors), 0)
    said = f"{units.plural(len(errors), 'prediction')} of an update were off by {mean} in the mean, by {worst} at most"
    doubt = ", as far as times so different can tell" if doubts(found) else ""
    yield f"The planner's {said}{doubt}; they were made before anything was measured, as if nothing else ran here."
    uneven = [row for row in found.rows if row.kind == CONVOY and row.uneven]
    without = [row for row in uneven if row.predicted is None]
    if without:
        but = ", that of auto of the planner's own" if len(without) < len(uneven) else ""
        yield f"Predictions are of even parts of the batch{but}; not predicted: {_names(without)}."


def _over(found: Results) -> str:
    reference = found.reference
    if reference is None or found.has_one_reference:
        return ""
    if reference.devices > 1:
        return (
            f"Nothing was measured on one device, so that speed-up is over {reference.plan_label} on "
            f"{reference.devices} devices and efficiency not known: a 1 in --devices adds it."
        )
    return f"Speed-up is over the fastest row on one device: {reference.plan_label}."


def _one_device(found: Results) -> str:
    if found.reference is None or found.reference.devices > 1:
        return ""
    several = [row for row in found.rows if row.devices > 1]
    slower = [row for row in several if row.speedup < 1 - (row.speedup_spread or 0)]
    alike = [row for row in several if row not in slower and abs(row.speedup - 1) <= (row.speedup_spread or 0)]
    said = [f"Slower than one device: {_names(slower)}."] if slower else []
    if alike:
        said.append(
            f"Not told apart from one device, by their ±: {_names(alike)}; more --rounds tell more, on a machine that "
            "does nothing else."
        )
    return " ".join(said)


def _above_ideal(found: Results, weak: bool) -> str:
    """The meaning of an efficiency above 100 %."""
    above = [row for row in found.rows if row.devices > 1 and round(100 * (row.efficiency or 0)) > 100]
    if not above:
        return ""
    caches = "" if weak else "a device's smaller part of the work may fit its caches better, or "
    return (
        f"Efficiency above {units.percent(1, 0)} ({_names(above)}): {caches}one device alone was slow when it was "
        "measured; where the speed-up is above the ideal one by less than its ±, it may be chance."
    )


def _names(rows: Sequence[StudyRow]) -> str:
    return ", ".join(f"{row.plan_label} on {row.devices}" for row in rows)


def convergence_remarks(found: Convergence) -> list[str]:
    """Sentences on how far the curves are from each other, the most important first."""
    if not found.curves:
        return []
    return [one for one in (_distance(found), _bits(found), _scale(found), _how(found)) if one]


def _distance(found: Convergence) -> str:
    reference, compared = found.reference, found.compared
    if reference is None or not compared:
        return ""
    curve, error = max(compared, key=lambda one: one[1].error)
    other, loss = max(compared, key=lambda one: one[1].loss)
    numbers = sorted({distance.evaluations for _, distance in compared})
    number = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    names = [_where(one) for one in found.curves if one.distance is None and one is not reference]
    apart = f" Not compared, as no evaluation was after as many updates: {', '.join(names)}." if names else ""
    base = "the serial run's" if reference.devices == 1 else f"those of {_where(reference)}"
    if not error.error and not loss.loss:
        return (
            f"Over updates the curves are one: in all {number} evaluations of {_configurations(found, len(compared))} "
            f"test error and test loss are {base} to the last bit, distance 0.{apart}"
        )
    return (
        f"Over updates the test error is never farther from {base} than {points(error.error)} "
        f"({_where(curve)}, after {units.count(error.error_at)} updates), the test loss never farther than "
        f"{units.significant(loss.loss, 2)} ({_where(other)}, after {units.count(loss.loss_at)}), over {number} "
        f"evaluations of {units.plural(len(compared), 'other configuration')}.{apart}"
    )


def _configurations(found: Convergence, others: int) -> str:
    everything = others + 1 == len(found.curves) and not found.failed and not found.waiting
    return f"{'all ' if everything else ''}{others + 1} configurations"


def _where(curve: ErrorCurve) -> str:
    devices = "" if curve.devices == 1 or "=" in curve.label else f" on {curve.devices}"
    return f"{curve.name}{devices}"


def _bits(found: Convergence) -> str:
    done = [curve for curve in found.curves if curve.finished and curve is not found.reference]
    if found.reference is None or not found.reference.sha256 or not done:
        return ""
    same = [curve for curve in done if found.same_weights(curve)]
    other = [_where(curve) for curve in done if curve not in same]
    if not same:
        return (
            "No final weights are the reference's bit for bit; reproducible=true makes them so under plans by sample."
        )
    checksum = f"SHA-256 {found.reference.sha256}"
    if not other:
        return f"The final weights of {_configurations(found, len(done))} are the same bit for bit: {checksum}."
    exact = ", the reproducible mode's promise being for plans by sample" if found.reproducible else ""
    return (
        f"The final weights of {', '.join(_where(curve) for curve in same)} are the reference's bit for bit, "
        f"{checksum}; those of {', '.join(other)} are not{exact}."
    )


def _scale(found: Convergence) -> str:
    """A scale for distances: the uncertainty of a test error."""
    if found.reference is None or not found.images or not any(distance.error for _, distance in found.compared):
        return ""
    share = found.reference.errors[-1]
    deviation = math.sqrt(share * (1 - share) / found.images)
    return (
        f"To compare: {units.percent(share, units.percent_places(found.images))} of {units.count(found.images)} "
        f"test images is known to ± {points(deviation)} (one standard deviation), and one image is "
        f"{points(1 / found.images)}."
    )


def _how(found: Convergence) -> str:
    return (
        f"Each configuration was trained once, for {units.value(found.epochs)} epochs from the same seed, by the "
        "trainer itself; its run is in the folder training. Time is that of the updates; evaluations and checkpoints "
        "are left out."
    )
