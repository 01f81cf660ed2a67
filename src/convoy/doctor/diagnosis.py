"""What holds a training back and what would help: a rule for each cause, and the diagnosis that they give together."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic.dataclasses import dataclass

from convoy.doctor.facts import Cause, Facts, InputModel, Pictures, Trial
from convoy.launch.host import HostLoad
from convoy.units import per_second, plural, rough_percent, seconds, times_as_fast

LEAST = 1.03  # the gain from which on a change is mentioned; smaller ones are lost in what a machine varies by
# The same of a change that makes another training, or that was tried: some updates of it err by up to a tenth.
# Channels-last was promised 6 % twice and brought nothing, and on another machine 10 %, and brought 11, 8 and -3.
_LEAST_TRIED = 1.15
_LEAST_OF_A_BATCH = 1.25  # the same of a larger batch, which is nearly always somewhat faster, and learns otherwise
_STEPS = 20  # steps of a doubling in which a picture's processor time is fitted
_WAITING = 0.01  # part of an update from which on pictures are waited for, or in the way
_BEYOND = 1.5  # how many times as much as is waited for pictures an update loses by them where they also take its cores
_NEARLY = 0.9  # part of the best gain that is enough for a batch that is smaller
_FEWER = 1.1  # how many times as much one device has to bring as another change
_PAUSES = 0.02  # part of the time that evaluations are advised to take
_EVALUATIONS = 5  # evaluations that a run keeps in any case: a curve needs points
_OTHER = 0.1  # cores from which on another process is counted as one of several
# n threads are taken to be n ** 0.5 times as fast as one: two were measured to be 1.1 to 1.7 times as fast.
_THREADS = 0.5
_OF_SEVERAL = 0.8  # part of the time for which several threads wait for cores that is lost
_MOST_LOST = 0.95  # part of the time that a change is said to save, at most
STEADY = 1.25  # how many times as fast a machine may be at one time as at another for a measured gain to be certain
_FAR = 2.0  # how many times as much a change may bring as was predicted, or as little, before a word is said of it
_HOT = 0.5  # the same of a processor that is too hot: at half its clock, about
_SUFFICES = 0.05  # part of an update for which ranks still wait where the link is fast enough
WORTH_SAYING = 1.15  # the gain from which on a run says by itself what would help
SHOWN = 3  # how many changes are printed: the one that would help most, and the next two
_ANOTHER = (
    "Another training: what is learned changes, or its last bits; such changes are ranked by the square root of their "
    "gain."
)
_ALIKE = 0.99  # pauses are worth a word where they leave a training less than this part of the pace of its updates


@dataclass(frozen=True)
class Advice:
    """One change, and what it would bring."""

    cause: Cause  # what it would mend
    change: str  # what to do, as one would say it
    arguments: tuple[str, ...]  # the same as arguments of `convoy train`; empty where no option does it
    gain: float  # predicted: times as many training images a second
    sentence: str  # what holds the training back so far
    another_training: bool = False  # it changes what is learned, or its last bits
    measured: float | None = None  # the gain where the change was tried
    turns: tuple[float, ...] = ()  # images a second as it is, changed, changed, and as it is

    @property
    def text(self) -> str:
        other = " (another training)" if self.another_training else ""
        tried = "" if self.measured is None else f", {times_as_fast(self.measured)} when tried"
        least = "at least " if self.gain > 0.99 / (1 - _MOST_LOST) else ""
        return f"{self.change}{other}: {least}{times_as_fast(self.gain)} (predicted){tried}"

    @property
    def verdict(self) -> str:
        """A word on the gain that was measured, where there is none, or it is uncertain or far from the prediction;
        empty otherwise."""
        if self.measured is None:
            return ""
        pairs = {"as it is": self.turns[::3], "with the change": self.turns[1:3]} if self.turns else {}
        for how, (first, last) in pairs.items():
            if max(first, last) > STEADY * min(first, last):
                pace = f"the training {how} made {per_second(first)} images a second, and later {per_second(last)}"
                return f"The machine's speed changed meanwhile: {pace}, so the measured gain is uncertain."
        if self.measured < 1:
            return "The change that was tried brings nothing here, so leave it out."
        if max(self.gain / self.measured, self.measured / self.gain) > _FAR:
            return "Prediction and trial are far apart: ask again when nothing else uses this machine."
        return ""

    def tried(self, turns: Sequence[float]) -> "Advice":
        """The same with the gain measured by `turns`, in an order in which a machine that slows down does not look like
        a bad change."""
        return replace(self, measured=sum(turns[1:3]) / (turns[0] + turns[3]), turns=tuple(turns))

    @property
    def _least(self) -> float:
        """The gain from which on it is mentioned."""
        if self.cause == "batch":
            return _LEAST_OF_A_BATCH
        return _LEAST_TRIED if self.another_training or self.cause in (*_TRIED, "threads") else LEAST

    @property
    def _rank(self) -> float:
        """Of several, the one that ranks highest comes first. A larger batch is nearly always faster, and would be the
        first advice of most runs, where it is often not what is wrong with them."""
        gain = math.sqrt(self.gain) if self.another_training else self.gain
        return gain / (_FEWER if self.cause == "devices" else 1.0)


def advise(facts: Facts) -> tuple[Advice, ...]:
    """What would make the training faster, the most helpful first: the best change for every cause.

    A change of the experiment itself has to bring twice as much, in orders of magnitude, as one that leaves the results
    what they are, and fewer devices more than another plan for those there are.
    """
    rules, best = _Rules(facts), dict[Cause, Advice]()
    for rule in (rules.input, rules.tried, rules.shares, rules.link, rules.host, rules.pauses):
        for advice in rule():
            if advice.gain >= advice._least and (advice.cause not in best or advice.gain > best[advice.cause].gain):
                best[advice.cause] = advice
    return tuple(sorted(best.values(), key=lambda advice: -advice._rank))


def _advice(cause: Cause, change: str | tuple[str, ...], gain: float, sentence: str, other: bool = False) -> Advice:
    """The change as arguments where an option makes it, and as words otherwise."""
    arguments = () if isinstance(change, str) else change
    return Advice(cause, change if isinstance(change, str) else " ".join(change), arguments, gain, sentence, other)


def input_model(facts: Facts) -> InputModel:
    """The model of an update's time, whose processor time of a picture is fitted to the update that was measured."""
    slowest = max(facts.ranks, key=lambda rank: rank.wait_s)
    compute = facts.compute_s if facts.compute_s is not None else facts.update_s - slowest.wait_s
    pictures, samples = facts.pictures, max(1, slowest.samples)
    if pictures is None:  # as long as the waits tell
        making_s = facts.update_s * facts.workers if facts.workers else slowest.wait_s
        pictures = Pictures(cpu_s=making_s / samples if slowest.wait_s > 0 else 0.0)
    read = pictures.read_s, pictures.least_read_s
    model = InputModel(compute, samples, *read, pictures.cpu_s, facts.workers, facts.threads, facts.cores)
    # Beside other processes, and in other caches, a picture takes another time than by itself.
    fits = [model.cpu_s * 2 ** (step / _STEPS) for step in range(-_STEPS, _STEPS + 1)]
    return replace(model, cpu_s=min(fits, key=lambda cpu_s: abs(model(cpu_s=cpu_s) - facts.update_s)))


_TRIED: dict[Cause, str] = {  # and threads, whose numbers are said
    "batch": "The batch is too small: what every update costs, whatever its size, takes much of it",
    "microbatch": "The microbatches are too small for the layers to compute at their pace",
    "plan": "The plan divides the work badly for this network on these devices",
    "precision": "Another precision is faster here",
    "memory_format": "Another memory format is faster here",
    "compile": "Much of an update is small operations that torch.compile would join",
    "devices": "The network is too small for several devices: they wait for each other longer than they save",
}


class _Rules:
    """One for each kind of cause: what holds the training back, how much of an update it costs, and what mends it."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.model = facts, input_model(facts)
        self.modelled_s = self.model()

    def _saving(self, saved_s: float) -> float:
        """How many times as fast the training is without so many seconds of each update."""
        total_s = self.facts.total_s
        return total_s / max(total_s - saved_s, (1 - _MOST_LOST) * total_s)

    def _beside(self, **changes: Any) -> float:
        """The gain of other input, as the model has it; evaluations take their pictures from there as well."""
        facts, model = self.facts, self.model
        if not self.modelled_s:
            return 1.0
        if "cpu_s" in changes and facts.pictures is not None and facts.pictures.cpu_s:
            changes["cpu_s"] *= model.cpu_s / facts.pictures.cpu_s
        # No update is shorter than what is left of it: the longer of computing, and of making its pictures that way.
        saved_s = max(0.0, facts.update_s - model(**changes) * max(1.0, facts.update_s / self.modelled_s))
        if facts.evaluate_every and model.picture_s:
            reading_s = min(facts.evaluation_cost_s, facts.test_samples * model.picture_s)
            saved_s += reading_s * (1 - replace(model, **changes).picture_s / model.picture_s) / facts.evaluate_every
        return self._saving(saved_s)

    def _gain_of(self, trial: Trial) -> float:
        """The gain of a change that was tried, with the input and the pauses of the training as it is."""
        facts, model = self.facts, self.model
        ratio = trial.seconds / trial.before_s if trial.before_s else 1.0
        changes = {"compute_s": model.compute_s * ratio, "samples": round(model.samples * trial.samples)}
        if trial.cause == "devices":  # one reads for all, with the cores of all
            everyone = {name: getattr(model, name) * facts.devices for name in ("cores", "threads", "workers")}
            changes |= {"samples": facts.batch, **everyone}
        update_s = facts.update_s * model(**changes) / self.modelled_s if self.modelled_s else facts.update_s
        return trial.samples * facts.total_s / (update_s + facts.pauses_s * trial.samples)

    def input(self) -> Iterator[Advice]:
        """Too few workers, slow storage, decoding."""
        facts, model, pictures = self.facts, self.model, self.facts.pictures
        late_s = 0.0 if facts.compute_s is None else facts.update_s - facts.compute_s
        is_waited_for = facts.wait_s >= _WAITING * facts.update_s
        if (pictures is not None and pictures.in_memory) or not (is_waited_for or late_s >= _WAITING * facts.update_s):
            return
        paces = f"an update takes {seconds(facts.update_s)}, and {seconds(facts.compute_s or 0.0)} where they are ready"
        waits = f"Processes that make pictures take cores from the training: {paces}"
        if is_waited_for:
            waits = f"Training waits for pictures for {rough_percent(facts.wait_s / facts.update_s)} of its time"
            if late_s > _BEYOND * facts.wait_s:
                waits += f", and the processes that make them take cores from it: {paces}"
        making = f"{waits}: the process that trains makes them itself"
        if facts.workers:
            rate = 1 / (model.read_s + model.cpu_s) if model.cpu_s else math.inf
            processes = plural(facts.workers, "process", "processes")
            making = f"{waits}: {processes} make them, at {per_second(rate)} a second each"
        more = 1.0
        if (number := model.most_workers) > facts.workers:
            more = self._beside(workers=number)
            yield _advice("workers", ("--workers", str(number)), more, f"{making}, and there are cores to spare.")
        pack = f"convoy data pack {shlex.quote(facts.data)} PACK"
        if pictures is None:  # what decoding takes is not known
            if facts.can_pack and more < LEAST:
                gain = self._saving(facts.wait_s)
                yield _advice("decoding", f"{pack}, then --data PACK", gain, f"{making}.", True)
            return
        if pictures.read_s and 4 * pictures.read_s >= pictures.read_s + pictures.cpu_s:
            share = rough_percent(pictures.read_s / (pictures.read_s + pictures.cpu_s))
            yield _advice(
                "storage",
                "pictures on a faster disk, such as a local one, or packed (convoy data pack)",
                self._beside(read_s=0.0, least_read_s=0.0),
                f"{waits}: {share} of what a picture takes is waiting for the storage, {seconds(pictures.read_s)}.",
            )
        slow = f"{waits}: decoding and augmenting one takes {seconds(pictures.cpu_s)} of a core."
        pack = f"{pack} --short-side {pictures.short_side}"
        ways: list[tuple[float | None, str | tuple[str, ...]]] = [
            (pictures.packed_s, f"{pack}, then --data PACK"),
            (pictures.raw_s, f"{pack} --raw, then --data PACK"),
            (pictures.turbo_s, ("--set", "data.decoder=turbo")),
        ]
        for cpu_s, change in ways:
            if cpu_s is not None:
                yield _advice("decoding", change, self._beside(cpu_s=cpu_s), slow, True)

    def tried(self) -> Iterator[Advice]:
        """Every change that was tried; of larger batches the smallest that brings nearly as much as the best."""
        gains = [(trial, self._gain_of(trial)) for trial in self.facts.trials]
        enough = _NEARLY * max((gain for trial, gain in gains if trial.cause == "batch"), default=0.0)
        batches = [pair for pair in gains if pair[0].cause == "batch" and pair[1] >= enough]
        for trial, gain in (*(pair for pair in gains if pair[0].cause != "batch"), *batches[:1]):
            threads = plural(self.facts.threads, "thread computes", "threads compute")
            why = _TRIED.get(trial.cause) or f"{threads}, and there are cores free for {trial.threads}"
            pace = f"an update takes {seconds(trial.before_s)}, and {seconds(trial.seconds / trial.samples)}"
            sentence = f"{why}: {pace} for as many samples with the change, both without their input."
            yield _advice(trial.cause, trial.arguments, gain, sentence, trial.another_training)

    def shares(self) -> Iterator[Advice]:
        """Devices that are not equally fast, and get equal parts."""
        from convoy.training.division import soonest  # with torch, for which who only reads a diagnosis is not to wait

        facts = self.facts
        ranks = [rank for rank in facts.ranks if rank.samples and rank.own_s]
        if len(ranks) < 2 or len(ranks) < len(facts.ranks) or sum(rank.samples for rank in ranks) != facts.batch:
            return
        of_sample = [rank.own_s / rank.samples for rank in ranks]
        of_microbatch = [cost * facts.batch / facts.microbatches for cost in of_sample]
        counts = soonest(facts.microbatches, of_microbatch)
        last_s = max(count * cost for count, cost in zip(counts, of_microbatch, strict=True))
        gain, slowest = self._saving(max(rank.own_s for rank in ranks) - last_s), max(of_sample)
        times = f"{slowest / min(of_sample):.2g} times as long for a sample as the fastest"
        sentence = f"Rank {of_sample.index(slowest)} takes {times}, and the others wait for it."
        yield _advice("shares", ("--shares", "auto"), gain, sentence)

    def link(self) -> Iterator[Advice]:
        """Ranks wait for what the link carries; within a host of CPUs they wait for each other, not for a link."""
        facts, exchange_s = self.facts, self.facts.exchange_s
        if not exchange_s or (len(facts.hosts) < 2 and facts.threads):
            return
        enough_s = _SUFFICES * (facts.update_s - exchange_s) / (1 - _SUFFICES)
        factor = max(1.0, exchange_s / enough_s) if enough_s > 0 else math.inf
        names = facts.hosts if len(set(facts.hosts)) == len(facts.hosts) else (plural(len(facts.hosts), "host"),)
        between = f" between {', '.join(names)}" if len(facts.hosts) > 1 else ""
        rate = facts.link_bits_per_s
        rates = "" if rate is None else f" ({factor * rate / 1e9:.2g} Gbit/s in place of {rate / 1e9:.2g})"
        share = rough_percent(exchange_s / facts.update_s)
        sentence = f"Devices wait for the link{between} for {share} of an update."
        change = f"a link{between} {factor:.2g} times as fast{rates}"
        yield _advice("link", change, self._saving(exchange_s - enough_s), sentence)

    def host(self) -> Iterator[Advice]:
        """Cores that others have, heat, limits of control groups, memory that is swapped."""
        facts = self.facts
        for number, load in enumerate(rank.load for rank in facts.ranks):
            if load is None or not load.wall_s:
                continue
            where = f" of rank {number}" if len(facts.ranks) > 1 else ""
            if load.others and load.waited_s:
                named = f"{load.others[0].name} (process {load.others[0].pid})"
                if len(load.others) > 1:
                    named += f" and {plural(len(load.others) - 1, 'other')}"
                lost, busy = self._lost_to_others(load), load.others_cores or sum(other.cores for other in load.others)
                cores = f"{rough_percent(busy)} of the core"
                if load.cores != 1:
                    cores = f"{busy:.2g} of {load.cores:.2g} cores"
                yield _advice(
                    "busy",
                    f"wait for {named} to end, or give the training other cores",
                    self._saving(lost * facts.total_s),
                    f"Other processes, {named}, keep {cores}{where} busy: waiting for a core takes "
                    f"{rough_percent(lost)} of the training's time.",
                )
            for cause, share, lost, change, sentence in self._limits(load):
                if share:
                    gain = self._saving(min(share * lost, _MOST_LOST) * facts.update_s)
                    yield _advice(cause, change, gain, sentence.format(where=where, share=rough_percent(share)))

    def _limits(self, load: HostLoad) -> Iterator[tuple[Cause, float, float, str, str]]:
        """What a host limits a training by: the cause, the share of the time in which it does, how much of that is
        lost, the change, and the sentence."""
        wall_s, ranks = load.wall_s, self.facts.ranks
        sentence = "The processor{where} is too hot, and runs slower for {share} of the time."
        yield "limit", min((load.hot_s or 0.0) / wall_s, _MOST_LOST), _HOT, "better cooling", sentence
        # A limit that only some ranks have makes unequal devices, which are for `shares`.
        if all(rank.load is not None and rank.load.throttled_s for rank in ranks):
            # The kernel counts every core that a control group keeps; ranks of a host share the group.
            held_s = (load.throttled_s or 0.0) * max(1, len(self.facts.hosts)) / len(ranks)
            share = held_s / max(wall_s, held_s + load.cpu_s + load.run_cores * wall_s)
            sentence = "A control group's CPU limit{where} stops the training for {share} of its time."
            yield "limit", min(share, _MOST_LOST), 1.0, "a higher CPU limit (the control group's quota)", sentence
        if load.swapped_bytes:
            share = min((load.memory_pressure_s or 0.0) / wall_s, _MOST_LOST)
            sentence = "Memory is swapped{where}: processes wait for it for {share} of the time."
            yield "swap", share, 1.0, "less memory: --recompute, fewer --workers, or a smaller batch", sentence

    def _lost_to_others(self, load: HostLoad) -> float:
        """The part of the time that a training loses as others have its cores.

        Its threads wait for each other, and some of them spin meanwhile: what is lost does not follow from how long
        they wait (of two networks with the same waits one lost 63 %, one 81 %). So a trial with as many threads as
        cores are free tells it, where there was one.
        """
        facts, other_cores = self.facts, load.others_cores or sum(other.cores for other in load.others)
        for trial in facts.trials:
            if trial.threads is not None and trial.threads < facts.threads <= facts.cores:
                scale = (1 - trial.waited) * (trial.threads / facts.threads) ** _THREADS
                undisturbed = _Rules(replace(facts, evaluate_every=None))
                gain = undisturbed._gain_of(replace(trial, seconds=trial.seconds * scale))
                return min(1 - 1 / max(gain, 1.0), _MOST_LOST)
        waited = (load.waited_s or 0.0) * other_cores / max(other_cores + load.run_cores, 1e-9) / load.wall_s
        if facts.threads > 1:
            number = sum(other.cores > _OTHER for other in load.others)
            waited *= _OF_SEVERAL / math.sqrt(min(facts.threads, max(number, 1)))
        return min(waited, other_cores, _MOST_LOST)

    def pauses(self) -> Iterator[Advice]:
        """Evaluations and checkpoints that come too often."""
        facts, epoch, every = self.facts, self.facts.updates_per_epoch, self.facts.evaluate_every
        if facts.evaluation_s and every:
            fewest = math.ceil(facts.evaluation_s / (_PAUSES * facts.update_s) / epoch)
            epochs = max(1, min(fewest, facts.total_updates // (_EVALUATIONS * epoch)))
            gain = self._saving(facts.evaluation_cost_s * max(0.0, 1 / every - 1 / (epochs * epoch)))
            updates = f"every {plural(every, 'update')}, which take {seconds(facts.update_s * every)}"
            sentence = f"An evaluation takes {seconds(facts.evaluation_s)} and comes {updates}."
            yield _advice("evaluation", ("--set", f"evaluate_every={epochs}ep"), gain, sentence)
        if facts.checkpoint_s and (every := facts.checkpoint_every):
            young_s = math.sqrt(facts.checkpoint_s / (2 * facts.mtbf_s)) * facts.update_s  # at Young's interval
            gain = self._saving(max(0.0, facts.checkpoint_s / every - young_s))
            sentence = f"Training waits {seconds(facts.checkpoint_s)} for a checkpoint every {plural(every, 'update')}."
            yield _advice("checkpoint", ("--set", "checkpoint.every=auto"), gain, sentence)


_OF_FACTS = ("model", "data", "devices", "plan", "batch", "images_per_s", "update_s", "notes")


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
            **{name: getattr(facts, name) for name in _OF_FACTS},
            parts={part: facts.update_s * facts.share(part) for part in facts.parts},  # other updates were watched
            sentence=advice[0].sentence if advice else _healthy(facts),
            advice=advice,
            updates=updates,
        )

    @property
    def possible(self) -> int | None:
        """Place in `advice` of the first change that an option makes; None where there is none among those printed."""
        return next((place for place, advice in enumerate(self.advice[:SHOWN]) if advice.arguments), None)

    @property
    def brief(self) -> str:
        """The diagnosis in a run and its report: of which updates, what holds it back, and what would help most."""
        when, sentence = "", self.sentence
        if self.updates is not None:
            when, sentence = "In updates {:,} to {:,}: ".format(*self.updates), sentence[:1].lower() + sentence[1:]
        return " ".join([f"{when}{sentence}", *(f"What would help most: {advice.text}." for advice in self.advice[:1])])

    def text(self) -> str:
        """Lines for people: how fast the training is, what holds it back, and the first changes."""
        where = "on one device" if self.devices == 1 else f"on {self.devices} devices, plan {self.plan}"
        pace = f"{per_second(self.batch / self.update_s)} images a second"
        if self.images_per_s * self.update_s < _ALIKE * self.batch:
            pace += f" ({per_second(self.images_per_s)} with evaluations and checkpoints)"
        changes = self.advice[:SHOWN]
        lines = [
            f"{self.model} {where}: {pace}, {seconds(self.update_s)} for an update of {self.batch:,}",
            self.sentence,
            *(f"{number}. {advice.text}" for number, advice in enumerate(changes, 1)),
        ]
        if any(advice.another_training for advice in changes):
            lines.append(_ANOTHER)
        if self.command is not None and self.possible is not None:
            lines.append(f"With change {self.possible + 1}: {self.command}")
        return "\n".join([*lines, *self.notes])


def _healthy(facts: Facts) -> str:
    most = ""
    if facts.parts:
        largest = max(facts.parts, key=lambda part: facts.parts[part])
        most = f"; the largest part of an update, {rough_percent(facts.share(largest))}, is {largest}"
    return f"None of the changes that were looked at would make it noticeably faster{most}."
