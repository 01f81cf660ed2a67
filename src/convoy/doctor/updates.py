"""What the doctor sees of a training's updates: how long they take and wait, and what the host does meanwhile; and the
diagnosis that a run makes of itself, after its first updates and at its end.
"""

import time
from contextlib import suppress
from dataclasses import asdict, replace
from statistics import fmean

from convoy import resources
from convoy.data.loader import batch_maker, samples_ahead
from convoy.data.sources import EncodedSource
from convoy.doctor.diagnosis import WORTH_SAYING, Diagnosis
from convoy.doctor.facts import Facts, Pictures, RankFacts
from convoy.files import write_json
from convoy.launch.host import HostLoad, HostWatch, network_place
from convoy.planner.comparison import Comparison
from convoy.plans.schedule import bubble
from convoy.training.derived import num_threads
from convoy.training.loop import Loop
from convoy.training.recorder import REMEMBERED, Recorder

LEAST = 10  # fewer updates say nothing
# Between two looks at the host, at least: each takes some milliseconds, 15 beside a thousand processes.
_SELDOM_S = 10.0


class Watch:
    """What the host of one process does, beside what a recorder has of its updates."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.begin()

    def begin(self) -> None:
        """What the host has done so far does not count."""
        self._host: HostWatch | None = None
        with suppress(Exception):  # a look at the machine is no reason to stop a training
            self._host = HostWatch()
        self._load: HostLoad | None = None
        self._looked = time.perf_counter()

    def look(self) -> None:
        """See what the host has done since the look before, while the processes that make pictures are there to be
        counted. The first look is at all since the beginning; one that comes too soon sees nothing new."""
        now = time.perf_counter()
        if self._host is not None and (self._load is None or now - self._looked >= _SELDOM_S):
            self._looked = now
            with suppress(Exception):  # as in `begin`
                self._load = self._host.read()

    def facts(self, comparison: Comparison, last: int) -> Facts:
        """What the `last` updates have shown on all ranks, and the last look at their hosts. All ranks call it."""
        session, updates = self._recorder.session, list(self._recorder.recent)[-last:]
        recipe, quantities, ranks = session.recipe, session.quantities, session.ranks
        samples = len(session.division.positions(ranks.sample_rank))
        wait_s, own_s, update_s = map(fmean, zip(*updates, strict=True))
        source = session.data.train
        in_memory = batch_maker(session.data, recipe.data, source, recipe.seed).vectorised
        facts_here = RankFacts(samples, wait_s, own_s, self._load), update_s, session.workers, network_place()
        of_ranks, of_updates, workers, places = zip(*ranks.gather(facts_here), strict=True)
        lengths = ("evaluate_every", "checkpoint_every", "updates_per_epoch", "total_updates")
        bubble_share = 0.0
        if session.plan.num_stages > 1:
            bubble_share = bubble(session.schedule, len(session.passes), session.plan.num_stages)
        return Facts(
            model=recipe.model.name,
            data=str(recipe.data.path),
            devices=ranks.num,
            plan=str(session.plan),
            batch=recipe.batch,
            update_s=max(of_updates),
            parts={name: both.measured_s for name, both in comparison.parts.items() if both.measured_s},
            ranks=of_ranks,
            workers=max(workers),
            cores=resources.own_share(),
            threads=num_threads(recipe) if session.device.type == "cpu" else 0,
            microbatches=len(quantities.sizes),
            pictures=Pictures(in_memory=True) if in_memory else None,
            can_pack=isinstance(source, EncodedSource) and not source.is_packed,
            test_samples=-(-len(session.data.test) // ranks.num_sample_ranks),
            ahead=samples_ahead(max(1, samples)) / max(1, samples),
            **{name: getattr(quantities, name) for name in lengths},
            mtbf_s=recipe.checkpoint.mtbf_s,
            hosts=tuple(name for name, _ in dict.fromkeys(places)) if ranks.num > 1 else (),
            bubble=bubble_share,
        )


class RunDoctor:
    """Says once, after the first updates of a run, what holds it back, if that is much; and keeps it, also at the end.
    Looks at a loop's updates."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._watch = loop, Watch(loop.recorder)

    def __call__(self, at_end: bool) -> None:
        if not at_end:
            self._watch.look()
        if at_end or self._loop.recorder.num == REMEMBERED:
            self._diagnose(at_end)

    def _diagnose(self, at_end: bool) -> None:
        loop, num_updates = self._loop, len(self._loop.recorder.recent)
        if loop.comparison is None or num_updates < LEAST:
            return
        num_counted = num_updates - LEAST // 2  # the batches of a training's first ones were made before it
        facts = self._watch.facts(loop.comparison, num_counted)
        if loop.session.ranks.rank > 0:
            return
        tally, evaluation = loop.saver.tally, loop.evaluation
        if evaluation is not None:
            facts = replace(facts, evaluation_s=evaluation.seconds)
        if tally.written:
            facts = replace(facts, checkpoint_s=tally.waited_s / tally.written)
        try:
            diagnosis = Diagnosis.of(facts, (loop.done - num_counted + 1, loop.done))
        except Exception as error:  # no reason to stop a training
            loop.tell(f"what holds the run back is not known ({type(error).__name__}: {error})")
            return
        with suppress(OSError):  # neither is a full disk
            write_json(loop.run.diagnosis, asdict(diagnosis))
        if not at_end and diagnosis.advice and diagnosis.advice[0].gain > WORTH_SAYING:
            loop.tell(f"{diagnosis.sentence} convoy doctor {loop.run.path} looks closer")
