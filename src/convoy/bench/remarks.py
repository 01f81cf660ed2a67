"""What has to be said of a table: on what, how sure, what the measuring cost, and what is missing."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from convoy import units
from convoy.bench.configuration import CONVOY, parts_of
from convoy.bench.results import Results, StudyRow
from convoy.bench.study import too_coarse
from convoy.bench.table import plan_label

_RESTLESS = 0.25
"""Part of its time by which a configuration, measured again, may differ before nothing follows from a study."""


def remarks(document: Mapping[str, Any], found: Results) -> list[str]:
    """Sentences on how the table came to be, the most important first."""
    said = [
        _devices(document),
        _work(document),
        _spread(found),
        _cost(found),
        _same(found),
        *_unequal(document, found),
        _predictions(found),
        _not_predicted(found),
        _over(found),
        _one_device(found),
        _above_ideal(found, document["study"]["weak"]),
    ]
    return [sentence for sentence in said if sentence]


def doubts(found: Results) -> list[str]:
    """What to say where the same configuration took very different times, which is the machine's doing."""
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


def missing(found: Results) -> list[str]:
    """Sentences on rows that could not be measured, or have not been."""
    said = [f"{label} was not measured: {reason.rstrip('.')}." for label, reason in found.failed]
    if found.waiting:
        said.append(f"Not measured yet: {', '.join(found.waiting)}; the same command goes on.")
    return said


def _devices(document: Mapping[str, Any]) -> str:
    study, machine = document["study"], document["machine"]
    if study["cluster"]:
        speeds = ", ".join(units.significant(speed, 2) for speed in study["speeds"])
        return f"The devices are emulated, each with a share of a core of this machine: {speeds}."
    if study["device_type"] != "cpu":
        return f"A device is a {machine['machine']}."
    each = study["cores_per_device"]
    largest = max((row["devices"] for row in document["configurations"]), default=1)
    left = machine["cores"] - each * largest
    rest = f"; {units.plural(left, 'core')} stay idle" if left else ""
    return (
        f"A device is {units.plural(each, 'core')} of {machine['machine']}, also where it is alone: the machine has "
        f"{machine['cores']}, and {units.plural(largest, 'device')} at most{rest}."
    )


def _work(document: Mapping[str, Any]) -> str:
    study = document["study"]
    batch = f"{units.count(study['batch'])} images {'on each device' if study['weak'] else 'on all devices together'}"
    images = study["images"]
    source = (
        f"made-up ones of {'×'.join(map(str, images['shape']))} in memory"
        if images
        else study["recipe"]["data"]["path"]
    )
    recipe = study["recipe"]
    size = recipe["microbatch"] or -(-recipe["batch"] // recipe["microbatches"])
    return f"An update is {batch}, in microbatches of {size} at most; the images are {source}."


def _spread(found: Results) -> str:
    rounds = sorted({row.rounds for row in found.rows})
    if not rounds or rounds[-1] < 2:
        return "± needs two rounds at least."
    number = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    return (
        f"Times are medians over {number} rounds, each in fresh processes and of the slowest rank. ± is what the same "
        "configuration, measured again, differs by at most in 95 of 100 cases (repeatability limit, ISO 5725-6)."
    )


def _cost(found: Results) -> str:
    cost = found.cost
    if cost.wall <= 0:
        return ""
    overhead = max((row.overhead / row.seconds for row in found.rows), default=0.0)
    return (
        f"The measuring took {units.duration(cost.wall)}: {units.percent(cost.timed / cost.wall, 0)} were updates "
        f"that count, {units.percent(cost.planning / cost.wall, 0)} planning, the rest starting, building and "
        f"warming up. Taking the time of parts makes an update at most {units.percent(overhead, 2)} longer."
    )


def _same(found: Results) -> str:
    difference = found.loss_difference
    if difference is None:
        return ""
    by = f"differs by {units.significant(difference, 2)} of itself at most" if difference else "is the same number"
    return f"The first update's loss {by} in all rows of Convoy: they do the same work."


def _unequal(document: Mapping[str, Any], found: Results) -> list[str]:
    """What devices of their own speeds do together, beside the sum of what they do one by one."""
    if not found.alone:
        return []
    speeds = found.alone
    rates = ", ".join(units.significant(speed) for speed in speeds)
    rows = [row for row in found.rows if row.kind == CONVOY and row.devices == len(speeds)]
    reached = ", ".join(f"{plan_label(row)} {units.percent(row.images_per_s / sum(speeds), 0)}" for row in rows)
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
            said.append(f"{plan_label(row)} is {ratio:.2f} times as fast as even parts{parts}.")
    rows = [row for row in rows if row.plan is not None and parts_of(row.plan, row.devices) == row.devices]
    batch, num = document["study"]["batch"], sum(next((row.microbatches for row in rows), ()))
    coarse = too_coarse(batch, num, speeds) if num and any(row.uneven for row in rows) else ""
    return [*said, *([coarse] if coarse else [])]


def _predictions(found: Results) -> str:
    """How good the predictions were."""
    errors = [abs(row.error) for row in found.rows if row.error is not None]
    if not errors:
        return ""
    mean, worst = units.percent(statistics.mean(errors)), units.percent(max(errors), 0)
    number = units.plural(len(errors), "prediction")
    said = f"The planner's {number} of an update were off by {mean} in the mean, by {worst} at most"
    doubt = ", as far as times so different can tell" if doubts(found) else ""
    return f"{said}{doubt}; they were made before anything was measured, as if nothing else ran here."


def _not_predicted(found: Results) -> str:
    """Which rows of Convoy have no prediction where others have."""
    own = [row for row in found.rows if row.kind == CONVOY]
    without = [row for row in own if row.predicted is None and row.uneven]
    if not without or all(row.predicted is None for row in own):
        return ""
    but = ", that of auto of the planner's own" if any(row.predicted is not None and row.uneven for row in own) else ""
    return f"Predictions are of even parts of the batch{but}; not predicted: {_names(without)}."


def _over(found: Results) -> str:
    if found.reference is None or sum(row.devices == 1 and not row.place for row in found.rows) == 1:
        return ""
    reference = found.reference
    if reference.devices > 1:
        return (
            f"Nothing was measured on one device, so that speed-up is over {_row(reference)} and efficiency not known: "
            "a 1 in --devices adds it."
        )
    return f"Speed-up is over the fastest row on one device: {plan_label(reference)}."


def _row(row: StudyRow) -> str:
    return f"{plan_label(row)} on {row.devices} devices"


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
    """What an efficiency above 100 % in the table means."""
    above = [row for row in found.rows if row.devices > 1 and round(100 * (row.efficiency or 0)) > 100]
    if not above:
        return ""
    caches = "" if weak else "a device's smaller part of the work may fit its caches better, or "
    return (
        f"Efficiency above {units.percent(1, 0)} ({_names(above)}): {caches}one device alone was slow when it was "
        "measured; where the speed-up is above the ideal one by less than its ±, it may be chance."
    )


def _names(rows: Sequence[StudyRow]) -> str:
    return ", ".join(f"{plan_label(row)} on {row.devices}" for row in rows)
