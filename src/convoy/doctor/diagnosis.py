"""A diagnosis: what holds a training back and what would help, as text and as it is kept in files."""

from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from convoy.doctor.advice import Advice, advise
from convoy.doctor.facts import Facts
from convoy.units import per_second, rough_percent, seconds

WORTH_SAYING = 1.15  # the gain from which on a run says by itself what would help
SHOWN = 3  # how many changes are printed: the one that would help most, and the next two
_ANOTHER = (
    "Another training: what is learned changes, or its last bits; such changes are ranked by the square root of their "
    "gain."
)
_ALIKE = 0.99  # pauses are worth a word where they leave a training less than this part of the pace of its updates


@dataclass(frozen=True)
class Diagnosis:
    """What holds a training back, as `convoy doctor --json` prints it and `diagnosis.json` of a run keeps it."""

    model: str
    data: str
    devices: int
    plan: str
    batch: int
    images_per_s: float  # training images a second, evaluations and checkpoints included
    update_s: float  # seconds of an update, without these
    parts: dict[str, float]  # seconds by name, as in `Facts`; they add up to `update_s`
    sentence: str  # what holds the training back
    advice: tuple[Advice, ...] = ()  # the most helpful first
    updates: tuple[int, int] | None = None  # first and last that were looked at, from 1; None without a run
    command: str | None = None  # trains with the first change that an option makes; None without one, and in a run
    notes: tuple[str, ...] = ()  # sentences on what there was no time for

    @staticmethod
    def of(facts: Facts, updates: tuple[int, int] | None = None) -> "Diagnosis":
        """The diagnosis that follows from the facts, which are of these updates of a run."""
        advice = advise(facts)
        return Diagnosis(
            facts.model,
            facts.data,
            facts.devices,
            facts.plan,
            facts.batch,
            facts.images_per_s,
            facts.update_s,
            {part: facts.update_s * facts.share(part) for part in facts.parts},  # other updates were watched
            advice[0].sentence if advice else _healthy(facts),
            advice,
            updates,
            notes=facts.notes,
        )

    @property
    def possible(self) -> int | None:
        """Place in `advice` of the first change that an option makes; None where there is none among those printed."""
        return next((place for place, one in enumerate(self.advice[:SHOWN]) if one.arguments), None)

    @property
    def brief(self) -> str:
        """The diagnosis in a run and its report: of which updates, what holds it back, and what would help most."""
        when = "" if self.updates is None else "In updates {:,} to {:,}: ".format(*self.updates)
        return " ".join([f"{when}{self.sentence}", *(f"What would help most: {one.text}." for one in self.advice[:1])])

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_document(document: Any) -> "Diagnosis":
        return TypeAdapter(Diagnosis).validate_python(document)

    def text(self) -> str:
        """Lines for people: how fast the training is, what holds it back, and the first changes."""
        where = "on one device" if self.devices == 1 else f"on {self.devices} devices, plan {self.plan}"
        pace = f"{per_second(self.batch / self.update_s)} images a second"
        if self.images_per_s * self.update_s < _ALIKE * self.batch:
            pace += f" ({per_second(self.images_per_s)} with evaluations and checkpoints)"
        lines = [
            f"{self.model} {where}: {pace}, {seconds(self.update_s)} for an update of {self.batch:,}",
            self.sentence,
        ]
        shown = self.advice[:SHOWN]
        lines += [f"{number}. {one.text}" for number, one in enumerate(shown, 1)]
        if any(one.another_training for one in shown):
            lines.append(_ANOTHER)
        if self.command is not None and self.possible is not None:
            lines.append(f"With change {self.possible + 1}: {self.command}")
        lines += self.notes
        return "\n".join(lines)


def _healthy(facts: Facts) -> str:
    most = ""
    if facts.parts:
        largest = max(facts.parts, key=lambda part: facts.parts[part])
        most = f"; the largest part of an update, {rough_percent(facts.share(largest))}, is {largest}"
    return f"None of the changes that were looked at would make it noticeably faster{most}."
