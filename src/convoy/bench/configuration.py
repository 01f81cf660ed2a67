"""Configurations that are measured beside each other: Convoy under a plan, or another tool, on some devices."""

import importlib.util
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.errors import ConvoyError
from convoy.plans.plan import Plan, plan_text
from convoy.plans.strategies import STRATEGIES

if TYPE_CHECKING:
    from convoy.training import Recipe


PEERS = {"ddp": "DistributedDataParallel", "fabric": "Lightning Fabric", "accelerate": "accelerate"}
"""What plain PyTorch users would take, by their names on the command line."""
EXTRAS = {"fabric": "lightning", "accelerate": "accelerate"}
"""The package, and the extra of Convoy's, that a peer needs."""


def check_peers(peers: Sequence[str]) -> None:
    """Refuse what is no peer.

    Raises:
        ConvoyError: it is none.
    """
    for peer in peers:
        if peer not in PEERS:
            raise ConvoyError(f"--peers {peer} is no peer: choose among {', '.join(PEERS)}")


def missing(kind: str) -> str | None:
    """The package that a peer needs and that is not installed."""
    package = EXTRAS.get(kind)
    return package if package is not None and importlib.util.find_spec(package) is None else None


def check_installed(kind: str) -> None:
    """Refuse a peer that is not installed.

    Raises:
        ConvoyError: it is not; the sentence names the extra.
    """
    package = missing(kind)
    if package is not None:
        raise ConvoyError(f"--peers {kind} needs {package}, which is not installed: pip install 'convoy-nn[{package}]'")


def check_recipe(recipe: "Recipe") -> None:
    """Refuse what only Convoy's trainer does.

    Raises:
        ConvoyError: the peers cannot train by this recipe.
    """
    for asked, what in (
        (recipe.precision == "fp16", "precision=fp16 (bf16 can be)"),
        (recipe.ema is not None, "ema"),
        (recipe.reproducible, "reproducible"),
    ):
        if asked:
            raise ConvoyError(f"--peers do not train with {what}: leave that or --peers out")


CONVOY, TORCH = "convoy", "torch"
AUTO = "auto"
"""The plan that the planner chooses; on the command line with a number of devices, too, as in `auto=4`."""
_AUTO_ON = re.compile(r"auto=[1-9][0-9]*")


@dataclass(frozen=True)
class Configuration:
    """A row of the table.

    Attributes:
        key: different for every row, also for one that is measured twice.
        kind: `convoy`, `torch` (plain PyTorch on one device), or one of `PEERS`.
        plan: of Convoy, as a recipe has it; `auto` is the planner's.
        series: rows of one series differ by their devices only.
        shares: parts of the batch, as a recipe has them: empty for even ones, or with the planner's plan for its own;
            `auto`, or `3,3,2`.
        place: of one device alone, which one it is, from 0.
    """

    key: str
    kind: str
    devices: int
    plan: str | None
    series: str
    shares: str = ""
    place: int = 0

    @property
    def label(self) -> str:
        """For people."""
        number = self.key.partition("#")[2]
        return self.name + (f" (row {number})" if number else "")

    @property
    def name(self) -> str:
        """The same without telling apart what is measured twice."""
        if self.kind in PEERS:
            return PEERS[self.kind]
        if self.kind == TORCH:
            return "plain PyTorch"
        if self.place:
            return f"device {self.place + 1} alone"
        if self.devices == 1:
            return "one device"
        assert self.plan is not None
        plan = self.series if "\n" in self.plan else self.plan
        return f"{plan}, shares {self.shares}" if self.shares else plan


def configurations(
    devices: Sequence[int],
    plans: Sequence[str],
    peers: Sequence[str],
    shares: Sequence[str] = ("",),
    alone: int = 1,
) -> list[Configuration]:
    """All rows: for every number of devices the plans that are for so many, and the peers.

    Args:
        devices: numbers of devices. One that comes twice is measured twice.
        plans: texts of plans; a part without a size, as in `sample`, is on all devices of the configuration; `auto=4`
            is the planner's on 4 devices only.
        peers: keys of `PEERS`; with any, plain PyTorch on one device is measured too.
        shares: of unequal devices, as in `Configuration`; plans that divide the samples have a row for each.
        alone: so many devices are measured each by itself, where one device is asked for.

    Raises:
        ConvoyError: a plan is wrong, or for a number of devices that is not asked for.
    """
    found: list[tuple[str, int, str | None, str, str]] = []
    places: list[Configuration] = []
    used: set[str] = set()
    for number in devices:
        if number == 1:
            found.append((CONVOY, 1, "serial", "", ""))
            found += [(TORCH, 1, None, TORCH, "")] if peers else []
            places = [
                Configuration(f"serial on device {place + 1}", CONVOY, 1, "serial", "", place=place)
                for place in range(1, alone)
            ]
            used |= {text for text in plans if _fixed_size(text) in (None, 1)}
            continue
        for text in plans:
            size = _fixed_size(text)
            if size is None or size == number:
                used.add(text)
                plan = _plan(text, number)
                fitting = [one for one in shares if _fits(one, plan, number)] or [""]
                found += [(CONVOY, number, plan, text, one) for one in fitting]
        found += [(peer, number, None, peer, "") for peer in peers]
    for text in plans:
        if text not in used:
            raise ConvoyError(
                f"--plans {text} is for {_fixed_size(text)} devices, but --devices has no {_fixed_size(text)}: add it, "
                "or leave the sizes out"
            )
    times: Counter[str] = Counter()
    rows = []
    for kind, number, used_plan, series, part in found:
        name = f"{used_plan if kind == CONVOY else kind} on {number}{f', shares {part}' if part else ''}"
        times[name] += 1
        key = name if times[name] == 1 else f"{name} #{times[name]}"
        rows.append(Configuration(key, kind, number, used_plan, f"{series}, shares {part}" if part else series, part))
    after = max((number for number, row in enumerate(rows, 1) if row.devices == 1), default=0)
    return [*rows[:after], *places, *rows[after:]]


def check_plans(plans: Sequence[str]) -> None:
    """Refuse texts that are no plans on any number of devices.

    Raises:
        ConvoyError: one is none.
    """
    for text in plans:
        _fixed_size(text)


def parts_of(plan: str, devices: int) -> int:
    """Into how many parts a plan divides the batch; one that the planner is to choose, into as many as devices."""
    return devices if plan == AUTO else Plan.parse(plan).parts


def _fits(shares: str, plan: str, devices: int) -> bool:
    """Whether a plan can have such shares: it divides the samples, into so many parts where they are numbers."""
    if not shares:
        return True
    parts, number = parts_of(plan, devices), len(shares.split(","))
    if plan == AUTO and shares != "auto":
        return number > 1 and devices % number == 0
    return parts > 1 and (shares == "auto" or number == parts)


def _fixed_size(text: str) -> int | None:
    """How many devices a plan is for; None where it says nothing of that.

    Raises:
        ConvoyError: it is no plan.
    """
    if text == AUTO or text in STRATEGIES:
        return None
    if _AUTO_ON.fullmatch(text):
        return int(text.partition("=")[2])
    if text.startswith(f"{AUTO}="):
        raise ConvoyError(f"--plans {text} has no number of devices: write auto, or auto=4 for 4 devices only")
    return Plan.parse(text).mesh.num_devices


def _plan(text: str, devices: int) -> str:
    """A plan as a recipe has it."""
    if text == AUTO or _AUTO_ON.fullmatch(text):
        return AUTO
    if text in STRATEGIES:
        return f"{text}={devices}"
    return plan_text(Plan.parse(text))


def short(plan: str) -> str:
    """A plan for one line of a table: files lose their folders."""
    return Path(plan).name if plan.endswith((".yaml", ".yml")) else plan
