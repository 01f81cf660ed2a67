"""What is seen of a session's updates for the doctor's rules: how long they take and wait, and what the host does."""

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from convoy.data import num_workers
from convoy.data.loader import batch_maker, first_workers
from convoy.data.sources import EncodedSource
from convoy.data.workers import samples_ahead
from convoy.doctor.facts import Facts, Pictures, RankFacts
from convoy.launch import cores
from convoy.launch.host import HostLoad, HostWatch, network_place
from convoy.planner.comparison import Comparison
from convoy.plans.schedule import bubble
from convoy.training.derived import num_threads
from convoy.training.session import Session
from convoy.training.step import StepResult

UPDATES = 100  # after so many updates a run says what holds it back, by these
LEAST = 10  # fewer updates say nothing
# Between two looks at the host, at least: each takes some milliseconds, 15 beside a thousand processes.
_SELDOM_S = 10.0


@dataclass
class Checkup:
    """Collects what one rank sees of its updates, and remembers the last of them; all ranks make the same calls."""

    session: Session
    gpu: bool = False  # whether `nvidia-smi` is asked as well, which may take seconds
    remembered: int | None = UPDATES  # how many of the last updates; None: all

    def __post_init__(self) -> None:
        data, config = self.session.data, self.session.recipe.data
        # Processes of this rank that make pictures ready, by now.
        self.workers = first_workers(config, num_workers(data, config)[0])
        self.begin()

    def begin(self) -> None:
        """Forget the updates so far: they count from now on."""
        self.num = 0  # updates seen
        self._seconds, self._waits, self._own = (deque[float](maxlen=self.remembered) for _ in range(3))
        self._watch: HostWatch | None = None
        with suppress(Exception):  # a look at the machine is no reason to stop a training
            self._watch = HostWatch(self.session.device if self.gpu else None)
        self._load: HostLoad | None = None
        self._looked = time.perf_counter()
        self._asked = self._waited_s = 0.0

    def told(self, workers: int) -> None:
        """Other worker processes have started: there are so many."""
        self.workers = workers

    def ask(self) -> None:
        """The batch of an update is asked for."""
        self._asked = time.perf_counter()

    def got(self) -> float:
        """The batch is there: the seconds for which it was waited for."""
        self._waited_s = time.perf_counter() - self._asked
        return self._waited_s

    def add(self, result: StepResult) -> None:
        """The update is done."""
        self.num += 1
        self._seconds.append(time.perf_counter() - self._asked)
        self._waits.append(self._waited_s)
        self._own.append(result.own_s)

    def look(self) -> HostLoad | None:
        """What the host has done since the look before, while the processes that make pictures are there to be counted.

        The first look is at all since the beginning. One that comes too soon finds what the one before found.
        """
        now = time.perf_counter()
        if self._watch is not None and (self._load is None or now - self._looked >= _SELDOM_S):
            self._looked = now
            with suppress(Exception):  # as above
                self._load = self._watch.read()
        return self._load

    def facts(self, comparison: Comparison, since: int = 0) -> Facts:
        """What all ranks have seen, and what the last look at their hosts showed. The first `since` of the remembered
        updates do not count: the batches of a training's first ones were made before it. All ranks call it.
        """
        session = self.session
        recipe, quantities, ranks = session.recipe, session.quantities, session.ranks
        network, passes = session.network, len(session.division.passes(session.merge))
        samples = len(session.division.positions(ranks.sample_rank))
        waits, own, seconds = (fmean(islice(each, since, None)) for each in (self._waits, self._own, self._seconds))
        source = session.data.train
        in_memory = batch_maker(session.data, recipe.data, source, recipe.seed).vectorised
        everyone = ranks.gather((RankFacts(samples, waits, own, self._load), seconds, self.workers, network_place()))
        return Facts(
            model=recipe.model.name,
            data=str(recipe.data.path),
            devices=ranks.num,
            plan=str(session.plan),
            batch=recipe.batch,
            update_s=max(seconds for _, seconds, _, _ in everyone),
            parts={name: both.measured_s for name, both in comparison.parts.items() if both.measured_s},
            ranks=tuple(one for one, _, _, _ in everyone),
            workers=max(workers for _, _, workers, _ in everyone),
            cores=cores.own_share(),
            threads=num_threads(recipe) if session.device.type == "cpu" else 0,
            microbatches=len(quantities.sizes),
            pictures=Pictures(in_memory=True) if in_memory else None,
            can_pack=isinstance(source, EncodedSource) and not source.is_packed,
            evaluate_every=quantities.evaluate_every,
            test_samples=-(-len(session.data.test) // ranks.num_sample_ranks),
            ahead=samples_ahead(max(1, samples)) / max(1, samples),
            checkpoint_every=quantities.checkpoint_every,
            updates_per_epoch=quantities.updates_per_epoch,
            total_updates=quantities.total_updates,
            mtbf_s=recipe.checkpoint.mtbf.seconds,
            hosts=tuple(name for name, _ in dict.fromkeys(where for *_, where in everyone)) if ranks.num > 1 else (),
            bubble=bubble(network.schedule, passes, session.plan.num_stages) if network.stages is not None else 0.0,
        )
