"""The configurations of a study: plans and peers for every number of devices."""

import importlib.util
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from convoy.bench.records import AUTO, CONVOY, PEERS, TORCH, Configuration
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan, plan_text
from convoy.plans.strategies import WORDS

if TYPE_CHECKING:
    from convoy.training import Recipe

# The package, and the extra of Convoy's, that a peer needs.
EXTRAS = {"fabric": "lightning", "accelerate": "accelerate"}
_AUTO_ON = re.compile(r"auto=[1-9][0-9]*")


def missing(kind: str) -> str | None:
    """The package that a peer needs and that is not installed."""
    package = EXTRAS.get(kind)
    return package if package is not None and importlib.util.find_spec(package) is None else None


def check_peer(kind: str) -> None:
    """Refuse (ConvoyError) what is no peer, or is not installed."""
    if kind not in PEERS:
        raise ConvoyError(f"--peers {kind} is no peer: choose among {', '.join(PEERS)}")
    if (package := missing(kind)) is not None:
        raise ConvoyError(f"--peers {kind} needs {package}, which is not installed: pip install 'convoy-nn[{package}]'")


def check_recipe(recipe: "Recipe") -> None:
    """Refuse (ConvoyError) a recipe by which only Convoy trains."""
    for asked, what in (
        (recipe.precision == "fp16", "precision=fp16 (bf16 can be)"),
        (recipe.ema is not None, "ema"),
        (recipe.reproducible, "reproducible"),
    ):
        if asked:
            raise ConvoyError(f"--peers do not train with {what}: leave that or --peers out")


def configurations(
    devices: Sequence[int], plans: Sequence[str], peers: Sequence[str], shares: Sequence[str] = ("",), alone: int = 1
) -> list[Configuration]:
    """All rows: for every number of devices the plans that are for so many, and the peers.

    A plan without a size, as `sample`, is on all devices of the configuration; `auto=4` is the planner's on 4 devices
    only. Plans that divide the samples have a row for each of the `shares`. With any peer, plain PyTorch on one device
    is measured too, and `alone` devices are measured each by itself where one device is asked for. A number of devices
    that comes twice is measured twice. A ConvoyError says where a plan fits none of them.
    """
    rows: list[Configuration] = []
    used: set[str] = set()
    times: Counter[str] = Counter()

    def add(kind: str, number: int, plan: str | None, series: str, part: str = "") -> None:
        also = f", shares {part}" if part else ""
        key = f"{plan if kind == CONVOY else kind} on {number}{also}"
        times[key] += 1
        key = key if times[key] == 1 else f"{key} #{times[key]}"
        row = Configuration(key=key, kind=kind, devices=number, plan=plan, series=f"{series}{also}", shares=part)
        rows.append(row)

    for number in devices:
        fitting = {text for text in plans if fixed_size(text) in (None, number)}
        used |= fitting
        if number == 1:
            add(CONVOY, 1, "serial", "")
            if peers:
                add(TORCH, 1, None, TORCH)
            continue
        for text in plans:
            if text in fitting:
                plan = _plan(text, number)
                for part in [one for one in shares if _fits(one, plan, number)] or [""]:
                    add(CONVOY, number, plan, text, part)
        for peer in peers:
            add(peer, number, None, peer)
    for text in plans:
        if text not in used:
            size = fixed_size(text)
            raise ConvoyError(
                f"--plans {text} is for {size} devices, but --devices has no {size}: add it, or leave the sizes out"
            )
    after = max((place for place, row in enumerate(rows, 1) if row.devices == 1), default=0)
    for place in range(alone if after else 0, 1, -1):
        key = f"serial on device {place}"
        row = Configuration(key=key, kind=CONVOY, devices=1, plan="serial", series="", place=place - 1)
        rows.insert(after, row)
    return rows


def parts_of(plan: str, devices: int) -> int:
    """The number of parts into which a plan divides the batch: as many as devices for one still to be chosen."""
    return devices if plan == AUTO else Plan.parse(plan).parts


def _fits(shares: str, plan: str, devices: int) -> bool:
    """Whether a plan can have such shares: it divides the samples, into so many parts where they are numbers."""
    if not shares:
        return True
    parts, number = parts_of(plan, devices), len(shares.split(","))
    if plan == AUTO and shares != "auto":
        return number > 1 and devices % number == 0
    return parts > 1 and (shares == "auto" or number == parts)


def fixed_size(text: str) -> int | None:
    """The number of devices that a plan is for; None where it does not say."""
    if text == AUTO or text in WORDS:
        return None
    if _AUTO_ON.fullmatch(text):
        return int(text.partition("=")[2])
    if text.startswith(f"{AUTO}="):
        raise ConvoyError(f"--plans {text} has no number of devices: write auto, or auto=4 for 4 devices only")
    return Plan.parse(text).mesh.num_devices


def _plan(text: str, devices: int) -> str:
    if text == AUTO or _AUTO_ON.fullmatch(text):
        return AUTO
    return f"{text}={devices}" if text in WORDS else plan_text(Plan.parse(text))
